"""Tests the papers' own numbers in papers/. test_extend.py tests adding a paper."""

import dataclasses

import pytest

import papers.__main__
from errors import InputError
from flags import resolve
from metrics import PUNCTUATION
from papers import PAPERS, PROTOCOLS, paper_of, record_of
from rewards import example, good_format
from settings import Settings
from world.world import KINDS

EVERYWHERE = [(name, stage) for name, paper in PAPERS.items() for stage in paper.stages]

# -------------------------------------------------------------------------------------- the numbers

# The papers' tables of hyper-parameters at 7B, copied by hand. Settings that a paper does not
# mention are left out.
NUMBERS = {
    ("ur2", 1): """
        algorithm reinforce_pp_baseline   clip_low 0.2   clip_high 0.2   group_size 16
        questions_per_step 64   trajectories_per_update 256   lr 2e-6   kl_coef 0   temperature 1
        max_searches 4   max_turn_tokens 512
        documents_per_search 10   document_tokens 1536   steps 10""",
    # one epoch: ceil(350 / 64) steps
    ("r1_searcher", 1): """
        algorithm reinforce_pp   group_size 16   questions_per_step 64   trajectories_per_update 256
        lr 2e-6   kl_coef 0   kl_estimator k1   temperature 1   max_searches 8   max_turn_tokens 512
        documents_per_search 5   steps 6""",
    # 5 · 256 trajectories
    ("r_search", 1): """
        algorithm grpo   group_size 5   questions_per_step 256   trajectories_per_update 1280
        lr 1e-6   warmup_ratio 0.95  kl_coef 1e-3   temperature 1   max_searches 4
        max_turn_tokens 500   documents_per_search 3   steps 195""",
    # arXiv 2503.09516, appendix B: batches of 512, split in two
    ("search_r1", 1): """
        algorithm ppo   group_size 1   questions_per_step 512   trajectories_per_update 256
        lr 1e-6   critic_lr 1e-5   warmup_ratio 0.285   critic_warmup_ratio 0.015   kl_coef 1e-3
        clip_low 0.2   clip_high 0.2   gae_lambda 1   temperature 1   max_searches 4
        max_turn_tokens 500   document_tokens 500   documents_per_search 3   steps 500""",
    # 32 · 32 trajectories; the two clips of DAPO; 2048 + 16384 tokens
    ("when_to_search", 1): """
        algorithm dapo   group_size 32   questions_per_step 32   trajectories_per_update 1024
        lr 1e-6   kl_coef 0   temperature 1   top_p 1   max_searches 5   max_turn_tokens 8192
        documents_per_search 5   document_tokens 4096   max_context 18432
        clip_low 0.2   clip_high 0.28   loss_aggregation token""",
    # 7 · 256 trajectories
    ("arena", 1): """
        algorithm grpo   kl_estimator k2   group_size 7   questions_per_step 256
        trajectories_per_update 1792   lr 3e-6   kl_coef 0.04   temperature 0.9   max_searches 0
        max_turn_tokens 256   steps 95   clip_low 0.2
        clip_high 0.2""",
}
# The numbers of steps are those of the checkpoints in table 15.
NUMBERS["ur2", 2] = NUMBERS["ur2", 1].replace("steps 10", "steps 40")
NUMBERS["ur2_choice", 1] = NUMBERS["ur2", 2].replace("steps 40", "steps 100 reward ur2_choice")
NUMBERS["vanilla_rl", 1] = NUMBERS["ur2", 2].replace("steps 40", "steps 25 reward ur2_stage2")
NUMBERS["vanilla_rl", 1] += " direct_tasks math,choice"
# one epoch: ceil(8148 / 64) steps
NUMBERS["r1_searcher", 2] = NUMBERS["r1_searcher", 1].replace("steps 6", "steps 128")
NUMBERS["when_to_search", 2] = NUMBERS["when_to_search", 1]


def same(value, text: str) -> bool:
    return value == text if isinstance(value, str) else value == float(text)


@pytest.mark.parametrize("name, stage", EVERYWHERE)
def test_the_papers_numbers(name, stage):
    settings = resolve(name, stage, tiny=False)
    words = NUMBERS[name, stage].split()
    for setting, number in zip(words[::2], words[1::2], strict=True):
        assert same(getattr(settings, setting), number), setting


ARENA = {  # variant -> the settings that differ: section 5.3, figure 3; appendices D.3 and H.2
    "naive_grpo": {
        "reward_args": {"relevance_reward": False, "bonus": 0},
        "kl_estimator": "k3",
    },
    "k3": {"kl_estimator": "k3"},
    "no_bonus": {"reward_args": {"bonus": 0}},
    "no_relevance": {"reward_args": {"relevance_reward": False}},
    "thinking": {"protocol": "arena_thinking"},
    "f1": {"reward_args": {"answer_metric": "f1"}},
    "judge": {"judge": "https://api.openai.com/v1#gpt-4o-2024-11-20"},
    "summaries": {"protocol": "arena_summary", "steps": 20},  # ceil(5000 / 256)
}
ARENA["naive_summaries"] = ARENA["naive_grpo"] | ARENA["summaries"]  # table 9


def test_arenas_variants():
    assert set(PAPERS["arena"].variants) == set(ARENA)
    for name, changes in ARENA.items():
        settings = resolve("arena", 1, tiny=False, given={"variant": name})
        assert settings == dataclasses.replace(resolve("arena", 1, False), variant=name, **changes)


@pytest.mark.parametrize("variant, direct", [("llama_8b", ""), ("llama_8b_direct", "math")])
def test_llama_trains_on_easy_math_instead_of_hard_math(variant, direct):
    """In UR² C.5, half of the easy math questions allow searching, or none; in stage 1 all do."""
    settings = {"variant": variant, "difficulty": "level"}
    one, two = (resolve("ur2", stage, False, settings) for stage in (1, 2))
    assert (two.math_searches, two.direct_tasks) == ({"easy": 0.5}, direct)
    assert (two.buckets["math:medium"], two.buckets["math:easy"]) == (1, 2)
    assert (one.buckets, one.direct_tasks) == ({"math:dropped": 1}, "")


def test_max_searches_replaces_the_limits_of_all_tasks():
    """The prompt for open questions allows five queries in D.2, and section 4.4 four."""
    five = {"variant": "five_queries"}
    assert resolve("ur2", 2, False, five).task_searches == {"qa": 5}
    assert resolve("ur2", 2, False, five | {"max_searches": 3}).task_searches == {}


@pytest.mark.parametrize(
    "recipe, variant, saved",  # steps between checkpoints, number of checkpoints to keep (0: all)
    [
        # UR² C.2: every 5 steps for 3B and for one task, else every 10; the best is chosen later
        ("ur2", "qwen_7b", (10, 0)),
        ("ur2_choice", "qwen_3b", (5, 0)),
        ("vanilla_rl", "llama_8b_qa", (5, 0)),
        ("vanilla_rl", "qwen_7b_choice", (10, 0)),  # two tasks
        ("vanilla_rl", "qwen_3b_choice", (5, 0)),
        ("when_to_search", "", (30, 2)),  # B.3
        ("when_to_search", "unified", (30, 0)),  # Table 2 compares its checkpoints
        ("r_search", "", (10, 2)),
    ],
)
def test_checkpoints_saved_and_kept_are_those_of_the_paper(recipe, variant, saved):
    for stage in record_of(recipe, variant).stages:
        result, small = (resolve(recipe, stage, tiny, {"variant": variant}) for tiny in (0, 1))
        assert (result.save_every, result.keep_checkpoints) == saved
        assert (small.save_every, small.keep_checkpoints) == (10, 2)


@pytest.mark.parametrize(
    "name, variant, changed",  # the settings that differ from those of the paper
    [
        ("r1_searcher", "llama_8b", "kl_coef 1e-4"),  # section 3.3
        ("r1_searcher", "grpo", "algorithm grpo kl_coef 1e-4 kl_estimator k3"),  # table 3
        ("when_to_search", "to_the_end", "protocol when_to_search_eos"),
        # the paper's scripts: R − mean of the group, no std, whitening over tokens
        (
            "r1_searcher",
            "as_its_code",
            "algorithm reinforce_pp_baseline group_std 0 whiten_tokens 1",
        ),
        ("r_search", "without_evidence", "protocol r_search_plain reward_args -"),  # table 3
        ("r_search", "whole_reply", "whole_reply 1"),  # eq. 4
        # Section 4.3 has 5 responses, β 0.001, lr 1e-6, warm-up 0.95 for GRPO and PPO; the script
        # for PPO has 1 response.
        ("r_search", "ppo", "algorithm ppo kl_estimator k1 critic_warmup_ratio 0.05"),
        (
            "r_search",
            "ppo_code",
            "algorithm ppo kl_estimator k1 critic_warmup_ratio 0.05 group_size 1 "
            "trajectories_per_update 256",
        ),
        ("search_r1", "grpo", "algorithm grpo group_size 5 kl_estimator k3"),  # appendix B
    ],
)
def test_variants_by_name(name, variant, changed):
    words = changed.split()
    for stage in PAPERS[name].stages:
        one, other = (resolve(name, stage, False, {"variant": v}) for v in ("", variant))
        different = {k for k, v in vars(one).items() if v != getattr(other, k)} - {"variant"}
        assert different == set(words[::2])
        for setting, number in zip(words[::2], words[1::2], strict=True):
            assert number == "-" or same(getattr(other, setting), number)


def test_a_variant_s_arguments_of_the_reward_are_those_of_its_last_stage():
    for metric in ("em", "cem"):  # R1-Searcher, table 5
        stages = PAPERS["r1_searcher"].variants[metric].stages
        assert "reward_args" not in stages[1]
        assert stages[2]["reward_args"] == {"answer_metric": metric}
    plain = PAPERS["r_search"].variants["without_evidence"].stages[1]  # R-Search, table 3
    assert plain["reward_args"] == {"evidence_reward": False}
    turns = PAPERS["ur2"].stages[1]["turn_tokens"]  # section 4.4
    assert turns == {"math": 3072, "choice": 1536}


def test_without_difficult_questions_both_stages_use_medium_ones():  # R1-Searcher, table 6
    for tiny in (True, False):
        settings = {"difficulty": "d", "variant": "without_difficult"}
        one, two = (resolve("r1_searcher", stage, tiny, settings) for stage in (1, 2))
        assert one.buckets == two.buckets == {"medium": 1}
        assert two.mix == ({} if tiny else PAPERS["r1_searcher"].stages[2]["mix"])


def test_the_aligned_search_r1_has_the_settings_of_r_search():
    # R-Search trains (4.2) and evaluates (A.3, 4.3) Search-R1 with the parameters of R-Search.
    own = {"recipe": "search_r1", "protocol": "search_r1", "reward": "search_r1"}
    expected = dataclasses.replace(resolve("r_search", 1, False), variant="aligned", **own)
    assert resolve("search_r1", 1, False, {"variant": "aligned"}) == expected
    paper = record_of("search_r1", "aligned")
    assert paper.decoding == {"temperature": 0.1, "documents_per_search": 5}
    assert paper.punctuation == "delete" and [*paper.protocols] == ["search_r1"]


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_s_record_is_complete(name):
    paper = PAPERS[name]
    fields = {f.name for f in dataclasses.fields(Settings)}
    assert set(paper.tiny) == set(paper.stages)
    assert set(paper.decoding) <= fields and paper.punctuation in PUNCTUATION
    assert set(paper.world.kinds) <= set(KINDS)
    for stage in paper.stages:
        small = resolve(name, stage, tiny=True)
        assert small.protocol == next(iter(paper.protocols))
        assert {*small.mix} <= {*paper.world.kinds, "direct"}
    assert {good_format(example(protocol)) for protocol in paper.protocols} <= {True, False}


def test_every_protocol_belongs_to_a_paper_and_an_unknown_one_is_one_line():
    assert {paper_of(name).source for name in PROTOCOLS} <= {p.source for p in PAPERS.values()}
    assert paper_of("when_to_search") is PAPERS["when_to_search"]  # not the record of the ablation
    with pytest.raises(InputError, match=r"protocol xml: no file of papers/ has it"):
        paper_of("xml")


def test_python_papers_prints_the_settings_of_every_stage_and_every_variant(capsys):
    papers.__main__.main()
    lines = capsys.readouterr().out.splitlines()
    names = [f"{name}:{v}" for name, paper in PAPERS.items() for v in paper.variants]
    assert {line.split(" | ")[0] for line in lines[2:]} == {*PAPERS, *names}
    assert "arena:k3 | 1 | kl_estimator k3 | ARENA section 4.4, app. F" in lines
    assert "steps 195, group_size 5" in next(line for line in lines if "r_search |" in line)

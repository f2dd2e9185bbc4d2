"""Tests settings.py: the precedence of values, the flags, and the settings that are rejected."""

import dataclasses
import re

import pytest
from conftest import message

import kl
import ppo
import train
import update
from flags import check_settings, parse, resolve, shown_settings
from lab.ablate import ARMS
from lab.ablate import settings_of as arm_settings
from papers import PAPERS, record_of
from settings import Settings

FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
TRAIN = {n for n, f in FIELDS.items() if f.metadata.get("only", "train") == "train" and f.metadata}


def test_defaults_then_the_paper_then_the_built_in_world_then_the_flags():
    # Only the defaults have a value of save_every.
    assert parse(["--model", "m"]).save_every == Settings().save_every
    assert parse(["--model", "m"]).documents_per_search == 10  # UR² C.2
    assert Settings().documents_per_search == 5
    assert parse([]).lr == PAPERS["ur2"].tiny[1]["lr"] != PAPERS["ur2"].stages[1]["lr"]
    assert parse(["--lr", "0.5"]).lr == 0.5


def test_the_console_shows_the_settings_that_differ_from_the_defaults():
    text = shown_settings(parse(["--seed", "4"]))
    assert "recipe=ur2 stage=1" in text and "seed=4" in text and "algorithm=" not in text


def test_the_choices_of_the_flags_are_the_names_that_the_files_define():
    names = {name: {*field.metadata.get("one_of", ())} for name, field in FIELDS.items()}
    assert names["algorithm"] == {*update.ALGORITHMS}
    assert names["kl_estimator"] == {*kl.PLACES}
    assert names["mismatch"] == {"auto", "none", *ppo.MISMATCH}


# --------------------------------------------------------------------------- flags and their help


def test_help_shows_every_flag_with_its_choices_and_default_and_an_example(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    output = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert all(f"--{name} " in output for name in TRAIN)
    assert "one of sequence, token, question ('sequence')" in output
    assert "example: python train.py" in output


def test_a_second_stage_needs_a_first_stage_or_a_model(tmp_path):
    words = ["--stage", "2", "--output_dir", str(tmp_path), "--run_name", "r"]
    assert "--stage 2: there is no checkpoint of the stage before" in message(parse, words)
    parse([*words, "--model", "m"])
    (tmp_path / "r" / "stage1" / "checkpoint-000002.partial").mkdir(parents=True)
    assert "--stage 2: there is no checkpoint of the stage before" in message(parse, words)
    (tmp_path / "r" / "stage1" / "checkpoint-000002").mkdir()
    parse(words)


STAGES = [
    (r, v, s) for r in PAPERS for v in ("", *PAPERS[r].variants) for s in record_of(r, v).stages
]


@pytest.mark.parametrize("recipe, variant, stage", STAGES)
@pytest.mark.parametrize("tiny", [False, True])
def test_every_recipe_and_variant_can_be_trained(recipe, variant, stage, tiny):
    check_settings(resolve(recipe, stage, tiny, {"variant": variant}))


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_of_the_lab_can_be_trained(name):
    check_settings(arm_settings(name, 0, "r"))


def test_a_reward_argument_replaces_the_variants_own_but_not_its_others():
    whole = resolve("ur2", 1, False, {"variant": "llama_8b"}).reward_args
    given = {"variant": "llama_8b", "reward_args": {"fallback_penalty": 0.5}}
    assert resolve("ur2", 1, False, given).reward_args == whole | {"fallback_penalty": 0.5} != whole
    # Another reward has other arguments.
    assert not resolve("ur2", 1, False, {"variant": "llama_8b", "reward": "search_r1"}).reward_args
    assert (
        resolve("ur2", 1, False, given | {"reward": "search_r1"}).reward_args
        == given["reward_args"]
    )


def test_another_algorithm_undoes_dapo_s_settings_unless_a_flag_sets_them():
    """When to Search 3.2 compares DAPO with GRPO, which has one clip range, its own mean and a KL
    (Table 5: 1e-4).
    """
    for stage, tiny in ((1, False), (2, True)):
        run = resolve("when_to_search", stage, tiny, {"algorithm": "grpo"})
        assert (run.clip_low, run.clip_high, run.loss_aggregation) == (0.2, 0.2, "sequence")
        assert (run.kl_coef, run.kl_estimator) == (1e-4, "k3")
        given = {"algorithm": "ppo", "clip_high": 0.28, "kl_coef": 0.0}
        run = resolve("when_to_search", stage, tiny, given)
        assert (run.clip_high, run.kl_coef, run.loss_aggregation) == (0.28, 0.0, "sequence")
    # Nothing changes if neither algorithm is DAPO.
    assert resolve("r1_searcher", 1, False, {"algorithm": "ppo"}).kl_estimator == "k1"


def test_dapo_has_the_same_settings_in_every_recipe_unless_a_flag_changes_them():
    run = resolve("r_search", 1, False, {"algorithm": "dapo", "kl_coef": 0.01})
    assert (run.clip_low, run.clip_high, run.loss_aggregation) == (0.2, 0.28, "token")
    assert run.kl_coef == 0.01


# ------------------------------------------------------------------- values that no run can use


@pytest.mark.parametrize(
    "arguments, nearest",
    [
        ("--grup_size 4", "--group_size"),
        ("--group-size 4", "--group_size"),
        ("--learning_rate=3 --lr 1", ""),
        ("--recipe ur3", "ur2"),
        ("--retriever bm52", "bm25"),
        ("--algorithm reinforce_baseline", "reinforce_pp_baseline"),
    ],
)
def test_the_error_of_a_typo_names_the_nearest_flag_or_value(arguments, nearest):
    assert (f"did you mean {nearest}?" if nearest else "unknown flag") in message(
        parse, arguments.split()
    )


def test_flags_are_not_abbreviated():
    assert "unknown flag --group " in message(parse, ["--group", "4"])


BAD = """
--group_size 0                   at least 1
--steps 0                        at least 1
--questions_per_step 0           at least 1
--save_every 0                   at least 1
--max_turn_tokens 0              at least 1
--tokens_per_micro_batch 0       at least 1
--documents_per_search 0         at least 1
--keep_checkpoints -1            at least 0
--temperature -1                 at least 0
--kl_coef -1                     at least 0
--lr 0                           at least 1e-09
--critic_lr 0                    at least 1e-09
--timeout 0                      at least 0.01
--retriever x                    one of
--loss_aggregation x             one of
--document_tokens 0              must be at least 1  135
--lr inf                         finite  136
--clip_high nan                  finite  138
--steps many                     train.py: argument --steps: invalid int value: 'many'
--lr nan                         finite  137
--warmup_ratio 3                 --warmup_ratio 3.0: must be at most 0.99
--critic_lr inf                  finite
--seed 2147483648                at most 2147483647
--temperature 0                  greedy  139
--stage 3                        --stage 3: unknown; one of 1, 2
--stage 1,2 --resume             --stage: --resume and --dry_run take one stage: give one
--stage 1,x                      argument --stage: invalid numbers value: '1,x'
--recipe r_search --stage 2      --stage 2: unknown; one of 1
--group_size 1                   compares the trajectories of one question
--group_size 1 --algorithm grpo  compares the trajectories of one question  140
--variant unmasked --mismatch token --stage 2 --model m  --mismatch token: documents are
--data questions.jsonl           --data needs --model
--data q.jsonl --model m         --data needs --corpus
--retriever dense                --retriever dense needs --encoder
--retriever_url h                --retriever_url needs --retriever http
--retriever http                 --retriever http needs --retriever_url
--data q --model m --retriever dense --encoder e5  --data needs --corpus
--reward r1_searcher_stage1      protocol ur2 has no <answer> section, which --reward
--recipe when_to_search --max_searches 7  beta times --max_searches 7 is 2.1: it must stay
--mix a=-1                       --mix {'a': -1}: weights are numbers of at least 0
--mix a=0,b=0                    weights are numbers of at least 0, one of them above 0
--mix a=x                        weights are numbers of at least 0
--mix a=1=2                      weights are numbers of at least 0
--mix a=nan                      weights are numbers of at least 0
--mix a=1e999                    weights are numbers of at least 0
--mix one_hop                    argument --mix: invalid pairs value: 'one_hop'
--task_mixing maybe              argument --task_mixing: invalid boolean value: 'maybe'
--reward_args fallback=0         --reward_args {'fallback': 0
--reward_args variant=13b        --reward_args
--reward x                       --reward x
--recipe r_search --max_resample 2  unknown flag --max_resample
--top_p 0.5                      unknown flag --top_p
""".strip().splitlines()


BAD = [re.split(r"  +", line) for line in BAD]  # flags, fragment of the error, number of the fault


@pytest.mark.parametrize(
    "arguments, fragment",
    [pytest.param(*row[:2], marks=[pytest.mark.fault(int(n)) for n in row[2:]]) for row in BAD],
)
def test_a_bad_value_is_a_one_line_error_before_anything_is_loaded(
    arguments, fragment, monkeypatch
):
    monkeypatch.setattr(train, "build_state", lambda *_: pytest.fail("something was loaded"))
    line = message(train.main, arguments.split())
    assert fragment in line and "--" in line


@pytest.mark.parametrize(
    "words",
    [
        "--recipe when_to_search --reward_args beta=0.4 --max_searches 4",  # 1.6 is below 2
        "--recipe when_to_search --variant unified --max_searches 7",  # its price differs
        "--group_size 1 --algorithm reinforce_pp",
        "--load_in_8bit --model m --kl_coef 0.1",
        "--data q --model m --retriever oracle",  # this retriever needs no corpus
        "--data q --model m --retriever http --retriever_url http://x",
    ],
)
def test_settings_close_to_rejected_ones_are_accepted(words):
    parse(words.split())


def test_an_evaluation_may_be_greedy_with_one_trajectory_per_question():
    check_settings(Settings(temperature=0.0, group_size=1), training=False)
    error = message(check_settings, Settings(top_p=0.0), False)
    assert error == "--top_p 0.0: must be at least 0.01"

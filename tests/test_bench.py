"""lab.bench: what is compared is the same work, and the figures are what the runs say. No time is
asserted.
"""

import copy
import pickle
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import message, random_policy, small
from processes import start_server
from transformers import GPT2Config, Qwen2Config

from errors import InputError
from lab import bench
from lab.bench import LOOPS, PARTS, Scripted
from policy import Policy
from scale import packing

VOCAB = 60


def options(*words: str):
    return bench.parse(list(words))[1]


TINY = replace(options("update", "--group_size", "4", "--shorter", "10"), seed=1)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return random_policy(Qwen2Config(vocab_size=VOCAB, **small()), seed=3)


def play(work, policy, o=TINY) -> list:
    """Eight short rows of two questions, with 0 to 3 searches."""
    environment = Scripted(VOCAB, o)
    work(policy, environment, environment.rows)
    return environment.rows


def played() -> Scripted:
    environment = Scripted(VOCAB, TINY)
    environment.play(VOCAB)
    return environment


def ran(name, part, *words: str) -> tuple[dict, list]:
    """One run of a variant, in this process."""
    o = options(part, "--group_size", "4", "--shorter", "10", *words)
    return bench.variants(part, o)[name]()


def test_a_group_shares_its_prompt_and_documents_stand_behind_every_turn_but_the_last():
    o = replace(TINY, shorter=1)
    rows, again = (Scripted(VOCAB, o).rows for _ in range(2))
    assert [row.left for row in rows] == [row.left for row in again]  # the seed's alone
    prompts = [row.prompt_ids for row in rows]
    assert prompts[0] == prompts[3] != prompts[4] == prompts[7] and len(rows) == 8
    assert all(100 <= len(prompt) <= 200 for prompt in prompts)
    for row in rows:
        *before, last = [found for _, found in row.left]
        assert last == [] and len(before) <= 3
        assert all(100 <= len(found) <= 200 and 0 not in found for found in before)


# --------------------------------------------------------------------- the twins do the same work


def test_what_is_measured_can_go_to_a_process_of_its_own():
    assert pickle.loads(pickle.dumps((LOOPS, PARTS))) == (LOOPS, PARTS)


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_samples_at_the_places_that_are_written_down(name, policy):
    masks = [row.response_mask for row in play(LOOPS[name], policy)]
    assert masks == [row.response_mask for row in played().rows]


def test_whole_rows_and_shared_prompts_give_one_gradient(monkeypatch):
    monkeypatch.setattr(packing, "LEAST", packing.LEAST)  # put back when this ends
    words = ("--vocab", str(VOCAB), "--prompt", "700", "--micro_batch", "4")
    found = [ran(name, "prompts", *words)[1] for name in ("whole", "ours")]
    expected, gradient = map(torch.as_tensor, found)
    assert 0 < (gradient - expected).norm() <= 1e-5 * expected.norm()


def test_a_step_plays_and_learns_and_says_what_share_of_its_time_each_part_took(policy):
    policy = copy.deepcopy(policy)
    before = copy.deepcopy(policy.state_dict())
    environment = Scripted(VOCAB, replace(TINY, trajectories_per_update=4))  # two updates
    shares = bench.step(policy, environment, environment.rows)
    assert list(shares) == ["rollout", "score", "update"]
    assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) > 0
    masks = [row.response_mask for row in environment.rows]
    assert masks == [row.response_mask for row in played().rows]
    moved = max((w - before[name]).abs().max().item() for name, w in policy.state_dict().items())
    assert moved == pytest.approx(2e-6, rel=0.1)  # AdamW: about the learning rate per update


def test_what_is_not_the_same_work_is_refused(monkeypatch):
    monkeypatch.setattr(bench, "alone", lambda work, threads: work)
    near = {"a": ({}, [3.0, 4.0]), "b": ({}, [3.0, 4.0 + 2e-5])}  # 2e-5 / 5 = 4e-6
    runs: dict = {}
    bench.in_turns(near, replace(TINY, repeats=1), runs)
    assert runs["a"] == [{"apart": 0}] and runs["b"][0]["apart"] == pytest.approx(4e-6, rel=1e-3)
    with pytest.raises(InputError, match=r"b: 4\.0e-05 from the first variant: not the same work"):
        bench.in_turns(near | {"b": ({}, [3.0, 4.0 + 2e-4])}, replace(TINY, repeats=1), {})


def test_a_model_directory_does_the_scripted_work_with_the_vocabulary_asked_for(tmp_path):
    # Its config names an EOS, which would end turns early.
    Qwen2Config(vocab_size=40, **small(eos_token_id=3)).save_pretrained(tmp_path)
    words = ("--model", str(tmp_path), "--vocab", "60", "--questions_per_step", "2")
    found = [ran(name, "rollout", *words)[1] for name in LOOPS]
    assert found[0] == found[1] == found[2]


def test_a_model_without_rotary_positions_is_one_line(tmp_path):
    GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="gpt2 has no rotary positions; the engine cannot"):
        ran("slots", "rollout", "--model", str(tmp_path))


def test_a_line_has_medians_and_its_speed_against_every_variant_above(capsys):
    """Medians 10, 4, 2 seconds."""
    seconds = {"slow": [8.0, 10.0, 90.0], "better": [4.0], "ours": [2.0]}
    runs = {n: [{"seconds": s, "mib": 60.0, "tokens": 16} for s in seconds[n]] for n in seconds}
    bench.show(runs)
    slow, better, ours = capsys.readouterr().out.splitlines()
    assert slow.endswith("seconds 10  mib 60  tokens 16  from 8  to 90  tokens_per_s 1.6")
    assert better.endswith("tokens_per_s 4  x slow 2.5")
    assert ours.endswith("tokens_per_s 8  x slow 5  x better 2")


def test_the_variants_take_turns_and_ctrl_c_keeps_what_was_measured(monkeypatch, capsys):
    order = []

    def run_three(work, threads):
        if len(order) == 3:
            raise KeyboardInterrupt
        order.append(work.args[1])
        return {"seconds": 1.0, "mib": 0.0}, [1]

    monkeypatch.setattr(bench, "alone", run_three)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["retrieval", "--only", "rank-bm25,ours"])
    assert order == ["rank-bm25", "ours", "rank-bm25"]
    assert "rank-bm25       seconds 1  mib 0" in capsys.readouterr().out


# ----------------------------------------------------------------------------- a process of its own


@pytest.fixture(autouse=True, scope="module")
def one_server():
    """Both the benchmark and the tests fork from it."""
    start_server()


def fill() -> tuple[dict, list]:
    """64 MiB that are given back before the end are in the peak."""
    return bench.measured(lambda: torch.ones(64 * 2**18).sum().item(), "cpu")[0], []


def refuse(message: str):
    raise InputError(message)


def test_a_run_has_its_own_process_and_its_peak_is_counted():
    found, _ = bench.alone(fill, 1)
    # not the hundreds that a forked process shares
    assert 60 < found["mib"] < 128 and found["seconds"] > 0


def test_what_is_wrong_in_a_run_comes_back_as_one_line():
    with pytest.raises(InputError, match=r"^no such thing: give another$"):
        bench.alone(partial(refuse, "no such thing: give another"), 1)
    with pytest.raises(InputError, match="ended from outside: most often memory ran out"):
        bench.alone(partial(bench.os._exit, 9), 1)


def test_a_part_prints_a_row_per_variant_and_they_found_the_same(capsys):
    words = ["--shorter", "10", "--repeats", "1", "--only", "rank-bm25,ours"]
    bench.main(["retrieval", *words])
    what, twin, ours = capsys.readouterr().out.splitlines()
    assert what.startswith("retrieval: 4M, cpu") and twin.startswith("rank-bm25  ")
    assert "apart 0 " in ours and "x rank-bm25 " in ours and "build " in ours


def test_a_variant_of_another_formula_is_timed_and_not_compared(monkeypatch):
    monkeypatch.setattr(bench, "alone", lambda work, threads: work())
    found = {"a": [1.0, 2.0], "other": None, "b": [1.0, 2.0]}
    works = {name: partial(lambda did: ({"seconds": 1.0}, did), did) for name, did in found.items()}
    runs = {}
    bench.in_turns(works, options("retrieval", "--repeats", "1"), runs)
    assert runs["other"] == [{"seconds": 1.0}] and runs["b"] == [{"seconds": 1.0, "apart": 0}]


# -------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("rollout --only slot", r"--only slot: unknown; one of .* \(did you mean slots\?\)"),
        ("rollout --repeats 0", "--repeats 0: must be at least 1"),
        ("rolout", "invalid choice"),
        ("rollout --engine hf", "unknown flag --engine"),
        ("rollout --model 9B", "--model 9B: neither"),
        ("rollout --vocab 1", "--vocab 1: must be at least 2"),
        ("retrieval --device cuda", "leave --device out"),
    ],
)
def test_what_has_no_meaning_is_one_line_before_anything_runs(words, told):
    assert re.search(told, message(bench.main, words.split()))


def test_only_leaves_the_other_variants_out():
    o = options("rollout", "--only", "slots,naive")
    assert list(bench.variants("rollout", o)) == ["naive", "slots"]

"""bench.py: what is compared is the same work, and the figures are what the runs say. No time is
asserted.
"""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from errors import InputError
from lab import bench
from lab.bench import LOOPS, Part, Script, Scripted
from policy import Policy
from tests.conftest import random_policy, small

VOCAB = 60


@pytest.fixture(scope="module")
def policy() -> Policy:
    return random_policy(Qwen2Config(vocab_size=VOCAB, **small()), seed=3)


@pytest.fixture(scope="module")
def tokenizer():
    return bench.make_tokenizer(VOCAB)


@pytest.fixture(scope="module")
def scripts() -> list[Script]:
    """Eight short rows of two questions, with 0 to 3 searches."""
    return bench.write_scripts(2, 4, VOCAB, seed=1, shorter=10)


def options(*words: str, folder: Path | str = "."):
    given = bench.parse(list(words))
    given.folder = str(folder)
    return given


# -------------------------------------------------------------------------------------- the scripts


def test_a_script_depends_on_its_seed_alone():
    assert bench.write_scripts(2, 3, 100, seed=5) == bench.write_scripts(2, 3, 100, seed=5)
    assert bench.write_scripts(2, 3, 100, seed=5) != bench.write_scripts(2, 3, 100, seed=6)


def test_a_group_shares_its_prompt_and_documents_stand_behind_every_turn_but_the_last():
    rows = bench.write_scripts(2, 4, 100)
    assert len(rows) == 8 and all(
        row.prompt == rows[i // 4 * 4].prompt for i, row in enumerate(rows)
    )
    assert rows[0].prompt != rows[4].prompt
    assert all(len(row.turns) == len(row.inserted) + 1 <= 4 for row in rows)
    assert all(100 <= len(row.prompt) <= 200 for row in rows)
    assert all(100 <= len(text) <= 200 for row in rows for text in row.inserted)
    assert not any(0 in text for row in rows for text in [row.prompt, *row.inserted])


def test_the_tokens_of_a_script_are_its_prompt_its_turns_and_its_documents():
    assert Script([1, 2, 3], [4, 5], [[6, 7]]).tokens == 3 + 4 + 5 + 2


def test_a_played_row_has_mask_1_on_turns_and_0_on_documents():
    row = bench.played([Script([1, 2], [2, 1], [[7, 8, 9]])], VOCAB).rows[0]
    assert row.response_mask == [1, 1, 0, 0, 0, 1]
    assert row.response_ids[2:5] == [7, 8, 9]
    assert row.stop_reason == "length"


# ---------------------------------------------------------------------------------------- the loops


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_samples_as_many_tokens_as_the_scripts_say_at_the_same_places(
    name, policy, tokenizer, scripts
):
    environment = Scripted(scripts, tokenizer)
    LOOPS[name](policy, environment)
    assert environment.sampled == sum(sum(script.turns) for script in scripts)
    masks = [row.response_mask for row in bench.played(scripts, VOCAB).rows]
    assert [row.response_mask for row in environment.rows] == masks


@pytest.mark.parametrize("name", [name for name in LOOPS if name != "naive"])
def test_greedy_every_loop_says_what_the_naive_one_says(name, policy, tokenizer, scripts):
    first, second = Scripted(scripts, tokenizer), Scripted(scripts, tokenizer)
    LOOPS["naive"](policy, first, temperature=0.0)
    LOOPS[name](policy, second, temperature=0.0)
    assert [row.ids for row in second.rows] == [row.ids for row in first.rows]
    assert len({tuple(row.response_ids) for row in first.rows}) > 2  # they do not all say the same


def test_the_loop_with_kept_caches_samples_from_the_distribution_of_the_whole_text(
    policy, tokenizer, scripts
):
    """Its log-probs are those of a pass over the finished text: nothing that belongs to no row was
    read.
    """
    environment = Scripted(scripts, tokenizer)
    bench.kept(policy, environment)
    for row in environment.rows:
        with torch.no_grad():
            whole = policy(torch.tensor([row.ids]))[0, len(row.prompt_ids) - 1 :]  # [response]
        sampled = torch.tensor(row.response_mask).bool()
        assert torch.allclose(whole[sampled], torch.tensor(row.logprobs)[sampled], atol=1e-3)


# --------------------------------------------------------------------------------------- the update


def flat_gradient(policy: Policy) -> torch.Tensor:
    flat = torch.cat([p.grad.flatten() for p in policy.parameters()])
    policy.zero_grad(set_to_none=True)
    return flat


def test_all_ways_to_the_gradient_give_the_same_gradient(policy, scripts):
    o = options("update", "--group_size", "4")
    batch, lengths = bench.make_batch(bench.played(scripts, VOCAB).rows, o)
    gradients = {}
    for name, update in bench.UPDATES.items():
        update(policy, batch, lengths, o)
        gradients[name] = flat_gradient(policy)
    first = gradients["padded log_softmax"]
    assert first.norm() > 0
    for name, gradient in gradients.items():
        assert (gradient - first).norm() <= 1e-5 * first.norm(), name


def test_the_budget_of_a_micro_batch_changes_no_gradient(policy, scripts):
    batch, lengths = bench.make_batch(
        bench.played(scripts, VOCAB).rows, options("update", "--group_size", "4")
    )
    gradients = []
    for budget in ("1", "100000"):
        bench.our_gradient(
            policy, batch, lengths, options("update", "--tokens_per_micro_batch", budget)
        )
        gradients.append(flat_gradient(policy))
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[0].norm()


def test_another_gradient_is_refused(policy, tmp_path):
    def set_gradients(scale: float) -> None:
        for p in policy.parameters():
            p.grad = torch.full_like(p, scale)

    set_gradients(1.0)
    assert bench.same_gradient(policy, tmp_path / "g.npy") == 0  # the first one is kept
    set_gradients(1 + 5e-6)
    assert bench.same_gradient(policy, tmp_path / "g.npy") == pytest.approx(5e-6, rel=0.05)
    set_gradients(1 + 5e-5)
    with pytest.raises(InputError, match="other gradients"):
        bench.same_gradient(policy, tmp_path / "g.npy")
    policy.zero_grad(set_to_none=True)


# ----------------------------------------------------------------------------------------- the step


def test_our_step_and_the_slow_one_move_the_weights_alike_when_they_sample_the_same(
    policy, scripts, monkeypatch
):
    """Greedy, so that both sample the same; plain gradient steps, of which 0.02 does not saturate
    anything.
    """
    monkeypatch.setattr(bench, "naive", partial(bench.naive, temperature=0.0))
    monkeypatch.setattr(bench, "slots", partial(bench.slots, temperature=0.0))
    o, moved = options("step", "--group_size", "4"), []
    before = [p.detach().clone() for p in policy.parameters()]
    for step in (bench.slow_step, bench.our_step):
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.02)
        step(
            policy,
            optimizer,
            Scripted(scripts, bench.make_tokenizer(VOCAB)),
            Accelerator(cpu=True),
            o,
        )
        moved.append(
            torch.cat(
                [
                    (p.detach() - b).flatten()
                    for p, b in zip(policy.parameters(), before, strict=True)
                ]
            )
        )
        with torch.no_grad():
            for p, b in zip(policy.parameters(), before, strict=True):
                p.copy_(b)
    assert moved[0].norm() > 1e-4
    assert (moved[0] - moved[1]).norm() <= 1e-3 * moved[0].norm()


def test_with_several_updates_there_is_no_twin():
    assert list(bench.step_part(options("step", "--updates", "4"))[0].works) == ["ours"]


@pytest.mark.parametrize(
    "more, said",
    [
        (("rollout", "--peer", "trl"), "--peer trl is for"),
        (("step", "--peer", "trl", "--lora_rank", "4"), "--peer trl is for"),
        (("step", "--quick", "--updates", "100"), "there are 8 rows"),
        (("rollout", "--vocab", "1"), "--vocab must be at least 2"),
        (("update", "--vocab", "-1"), "--vocab must"),
        (("update", "--tokens_per_micro_batch", "-5"), "--tokens_per_micro_batch"),
        (("retrieval", "--device", "cuda"), "leave --device out"),
        (("rollout", "--model", "9B"), "--model 9B: neither"),
    ],
)
def test_what_has_no_meaning_is_one_line_before_anything_runs(more, said, monkeypatch):
    monkeypatch.setattr(bench, "check_peft", lambda rank: None)
    with pytest.raises(InputError, match=said):
        bench.parse(list(more))


def test_a_model_directory_does_the_scripted_work_with_the_vocabulary_that_is_asked_for(tmp_path):
    # Its config names an EOS, which would end turns early.
    Qwen2Config(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        eos_token_id=3,
    ).save_pretrained(tmp_path)
    o = options("rollout", "--quick", "--model", str(tmp_path), "--vocab", "60")
    tokens = {bench.run_rollout(name, o)["tokens"] for name in ("naive", "HF active rows", "slots")}
    assert len(tokens) == 1 and bench.config_of(o).vocab_size == 60


def test_decode_of_a_model_without_rotary_positions_is_one_line(tmp_path):
    GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match="gpt2 has no rotary positions; the engine cannot drive it"
    ):
        bench.run_decode(options("decode", "--quick", "--model", str(tmp_path)))


class FakeTrainer:
    """Generates as TRL's trainer does: every row up to the longest; notes how many rows each call
    had.
    """

    def __init__(self):
        self.generation_config, self.calls = SimpleNamespace(max_new_tokens=0), []

    def _generate_single_turn(self, contexts, images, fields, generations):
        self.calls.append([len(context) for context in contexts])
        return [[5] * self.generation_config.max_new_tokens for _ in contexts], None


def test_trl_plays_the_same_script():
    rows = [Script([1, 2], [2, 1], [[7, 8, 9]]), Script([1, 2], [3], [])]
    trainer = FakeTrainer()
    completions, masks = bench.play_with_trl(trainer, rows)
    assert completions == [[5, 5, 7, 8, 9, 5], [5, 5, 5]]
    assert (
        masks
        == [[1, 1, 0, 0, 0, 1], [1, 1, 1]]
        == [row.response_mask for row in bench.played(rows, VOCAB).rows]
    )
    assert trainer.calls == [[2, 2], [7]]  # the second turn has the one row that goes on


def test_trl_gets_the_scripts_in_the_order_of_its_own_prompts():
    rows = [Script([i], [1], []) for i in range(4)]
    assert bench.in_order(rows, ["1", "1", "0", "0"], 2) == [rows[2], rows[3], rows[0], rows[1]]


@pytest.mark.slow
def test_a_step_of_trl_runs_beside_ours(capsys):
    pytest.importorskip("trl")
    bench.main(["step", "--quick", "--peer", "trl"])
    assert [
        line.split()[0]
        for line in capsys.readouterr().out.splitlines()
        if line[:3] in ("TRL", "slo", "our")
    ] == ["TRL", "slow", "ours"]


def test_without_trl_there_is_one_line_that_names_the_command(monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"trl and datasets not installed: pip install 'trl==1\.16\.\*'"
    ) as error:
        bench.main(["step", "--peer", "trl"])
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------- the roofline


def test_the_bytes_of_a_step_are_the_weights_and_the_keys_and_values():
    """Tied. H = 32, 2 layers, 4 heads of 8, 2 of them with keys (K = 16), F = 64, V = 60. A layer's
    matrices: 32·32 queries, 2 · 32·16 keys and values, 32·32 output, 3 · 32·64 = 9216; biases 32 +
    16 + 16, norms 64: 9344. In all 2 · 9344 + 32 + 60·32 = 20,640 weights of 4 bytes. A token's
    keys and values: 2 (k, v) · 2 layers · 16 · 4 bytes = 256; 3 rows of 10: 7680.
    """
    model = random_policy(
        Qwen2Config(vocab_size=60, **small(tie_word_embeddings=True)), seed=0
    ).language_model
    assert bench.bytes_per_step(model, 3, 10) == 4 * 20_640 + 7680


def test_an_embedding_that_is_not_the_head_is_not_read():
    tied = random_policy(
        LlamaConfig(vocab_size=60, **small(tie_word_embeddings=True)), seed=0
    ).language_model
    apart = random_policy(
        LlamaConfig(vocab_size=60, **small(tie_word_embeddings=False)), seed=0
    ).language_model
    assert bench.bytes_per_step(tied, 3, 10) == bench.bytes_per_step(apart, 3, 10)


def test_the_share_of_the_roofline_is_the_least_time_over_the_time():
    """15.2 GB at 4.3 TB/s: 3.535 ms at least; in 5 ms that is 71 %."""
    found = bench.roofline(5e-3, 15.2e9, 4.3e12)
    assert found["floor"] == pytest.approx(3.535e-3, rel=1e-3) and found["share"] == pytest.approx(
        0.707, rel=1e-3
    )


def test_a_shape_of_plan_py_becomes_a_config_without_weights():
    config = bench.config_of(options("decode", "--model", "7B"))
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (3584, 28, 152064)
    assert config.tie_word_embeddings is False
    assert bench.config_of(options("decode", "--model", "4M", "--vocab", "99")).vocab_size == 99


def test_the_small_model_has_4_million_weights():
    """H = 256, V = 4096: embedding V H; a layer 2 H² + 2 · 64 H + 3 · 688 H, norms 2 H, biases 256
    + 128; the last norm H.
    """
    model, layer = (
        bench.make_model(options("rollout")),
        2 * 256**2 + 2 * 64 * 256 + 3 * 688 * 256 + 2 * 256 + 384,
    )
    assert sum(p.numel() for p in model.parameters()) == 4096 * 256 + 4 * layer + 256 == 3_821_312


# ------------------------------------------------------------------------------------------ figures

RUNS = {
    "slow": [
        {"seconds": 8.0, "mib": 100.0, "tokens": 16},
        {"seconds": 10.0, "mib": 100.0, "tokens": 16},
        {"seconds": 90.0, "mib": 100.0, "tokens": 16},
    ],
    "better": [{"seconds": 4.0, "mib": 60.0, "tokens": 16}] * 3,
    "other": [{"seconds": 5.0, "mib": 30.0, "tokens": 16}] * 3,
    "ours": [{"seconds": 2.0, "mib": 20.0, "tokens": 16}] * 3,
}
BASES = {"slow": ("slow",), "best": ("better", "other")}


def test_ratios_are_of_medians_and_the_best_twin_is_the_fastest():
    """Medians 10, 4, 5, 2 seconds; the best of "better" and "other" is "better", 4 s and 60 MiB."""
    rows = {
        row["name"]: row
        for row in bench.summarize(RUNS, Part("x", {}, BASES, {"slow": (5, 1), "best": (2, 1 / 3)}))
    }
    assert rows["slow"]["seconds"] == 10 and (rows["slow"]["low"], rows["slow"]["high"]) == (8, 90)
    assert rows["ours"]["ratios"] == {"slow": 5, "best": 2} and rows["ours"]["ratio"] == 5
    assert rows["ours"]["memory"] == {"slow": 0.2, "best": pytest.approx(1 / 3)}
    assert rows["ours"]["tokens_per_s"] == 8
    assert rows["other"]["ratios"] == {"slow": 2, "best": 0.8}
    assert [name for name, row in rows.items() if row["meets_goals"]] == ["ours"]


def test_what_did_not_run_is_not_in_the_table():
    part = Part("x", {}, BASES, {"slow": (5, 1)})
    rows = bench.summarize({"slow": [], "ours": RUNS["ours"]}, part)
    assert (
        [row["name"] for row in rows] == ["ours"]
        and rows[0]["ratios"] == {}
        and "meets_goals" not in rows[0]
    )
    assert "ours" in bench.table(part, rows) and bench.summarize({"slow": []}, part) == []


def test_the_table_has_a_line_per_variant_and_says_the_goals():
    part = Part("what it is", {}, BASES, {"slow": (5, 1), "best": (2, 1 / 3)})
    lines = bench.table(part, bench.summarize(RUNS, part)).splitlines()
    assert lines[0] == "what it is" and [line.split()[0] for line in lines[2:6]] == list(RUNS)
    assert "all goals" in lines[5] and not any("all goals" in line for line in lines[:5])
    assert lines[6] == "goal: 5x slow; 2x best with 33% of its memory"


def test_ctrl_c_keeps_what_was_measured(monkeypatch):
    calls = iter([{"seconds": 1.0}, {"seconds": 2.0}, KeyboardInterrupt])

    def work(_work, _threads):
        if (value := next(calls)) is KeyboardInterrupt:
            raise value
        return value

    monkeypatch.setattr(bench, "alone", work)
    runs, complete = bench.in_turns(Part("x", {"a": None, "b": None}), 2, 1)
    assert runs == {"a": [{"seconds": 1.0}], "b": [{"seconds": 2.0}]} and not complete


def test_the_variants_take_turns(monkeypatch):
    order = []
    monkeypatch.setattr(
        bench, "alone", lambda work, _threads: order.append(work) or {"seconds": 1.0}
    )
    bench.in_turns(Part("x", {"a": "a", "b": "b"}), 3, 1)
    assert order == ["a", "b"] * 3


# ----------------------------------------------------------------------------- a process of its own


def test_a_run_has_its_own_process_and_its_peak_is_counted():
    """64 MiB that are given back before the end are in the peak."""

    def work():
        numbers, _ = bench.measured(lambda: torch.ones(64 * 2**18).sum().item(), "cpu")
        return numbers

    found = bench.alone(work, 1)
    assert (
        60 < found["mib"] < 128 and found["seconds"] > 0
    )  # and not the hundreds that a forked process shares


def test_what_is_wrong_in_a_run_comes_back_as_one_line(capfd):
    def refuse():
        raise InputError("no such thing: give another")

    with pytest.raises(InputError, match="no such thing: give another"):
        bench.alone(refuse, 1)
    with pytest.raises(InputError, match="ended with code 1"):
        bench.alone(lambda: 1 / 0, 1)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_part_writes_its_rows_as_json(tmp_path, capsys):
    bench.main(["retrieval", "--quick", "--json", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    assert set(written) == {"what", "machine", "rows"} and written["what"] == "retrieval"
    assert {"cpu", "cores", "threads", "torch"} <= set(written["machine"])
    assert [row["name"] for row in written["rows"]] == ["rank-bm25", "ours"]
    assert all(
        row["seconds"] > 0 and math.isfinite(row["ratio"]) and "mib" in row
        for row in written["rows"]
    )
    assert "rank-bm25" in capsys.readouterr().out


def test_a_decoding_step_is_held_against_the_bandwidth_of_the_same_run():
    found = bench.run_decode(options("decode", "--quick"))
    assert found["tokens"] == 8 and found["share"] == pytest.approx(
        found["floor"] / found["seconds"]
    )
    assert found["floor"] * found["gb_per_s"] * 1e9 == pytest.approx(
        bench.bytes_per_step(bench.make_model(options("decode")), 8, 64 + 8 + 8)
    )


# -------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout", "--only", "slot"], r"--only slot: no such variant \(did you mean slots\?\)"),
        (["rollout", "--repeats", "0"], "--repeats 0: must be at least 1"),
        (["rolout"], "invalid choice"),
        (["decode", "--cuda_graphs"], "--cuda_graphs: only a GPU can record a step"),
        (["step", "--json", "/"], "name a file"),
        (["decode", "--model", "nowhere/none", "--quick"], "neither"),
    ],
)
def test_bad_flags_are_one_line(words, message):
    with pytest.raises(InputError, match=message) as error:
        bench.main(words)
    assert "\n" not in str(error.value)


def test_only_leaves_the_other_variants_out():
    parts = bench.parts_of(options("--only", "ours,half slots"))
    assert [list(part.works) for part in parts] == [["half slots"], ["ours"], ["ours"], ["ours"]]

"""lab.bench: what is compared is the same work, and the figures are what the runs say. No time is
asserted.
"""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from errors import InputError
from lab import bench
from lab.bench import LOOPS, STEPS, UPDATES, Scripted
from policy import Policy
from tests.conftest import random_policy, small

VOCAB = 60
PLAYED = ([1, 2], [(2, [7, 8, 9]), (1, [])])


def options(*words: str):
    return bench.parse(list(words))[1]


TINY = options("update", "--group_size", "4", "--shorter", "10", "--seed", "1")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return random_policy(Qwen2Config(vocab_size=VOCAB, **small()), seed=3)


@pytest.fixture(scope="module")
def scripts() -> list[bench.Script]:
    """Eight short rows of two questions, with 0 to 3 searches."""
    return bench.write_scripts(TINY, VOCAB)


def play(work, policy, scripts, o=TINY) -> Scripted:
    environment = Scripted(scripts, VOCAB, o)
    work(policy, environment, environment.rows)
    return environment


def ran(name, part, *words: str) -> tuple[dict, list]:
    """One run of a variant, in this process."""
    o = options(part, "--group_size", "4", "--shorter", "10", *words)
    return bench.variants(part, o)[name]()


# -------------------------------------------------------------------------------------- the scripts


def test_a_script_depends_on_its_seed_alone():
    assert bench.write_scripts(TINY, VOCAB) == bench.write_scripts(TINY, VOCAB)
    assert bench.write_scripts(TINY, VOCAB) != bench.write_scripts(replace(TINY, seed=2), VOCAB)


def test_a_group_shares_its_prompt_and_documents_stand_behind_every_turn_but_the_last():
    rows = bench.write_scripts(replace(TINY, shorter=1), VOCAB)
    prompts, turns = zip(*rows, strict=True)
    assert prompts[0] == prompts[3] != prompts[4] == prompts[7] and len(rows) == 8
    assert all(100 <= len(prompt) <= 200 for prompt in prompts)
    for row in turns:
        *before, last = [found for _, found in row]
        assert last == [] and len(before) <= 3
        assert all(100 <= len(found) <= 200 and 0 not in found for found in before)


def test_a_played_row_has_mask_1_on_turns_and_0_on_documents():
    environment = Scripted([PLAYED], VOCAB, TINY)
    environment.play(VOCAB)
    (row,) = environment.rows
    assert row.response_mask == [1, 1, 0, 0, 0, 1] and row.response_ids[2:5] == [7, 8, 9]
    assert row.stop_reason == "length" and environment.longest(0) == 2 + 2 + 3 + 1


# --------------------------------------------------------------------- the twins do the same work


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_samples_at_the_places_that_the_scripts_say(name, policy, scripts):
    played = Scripted(scripts, VOCAB, TINY)
    played.play(VOCAB)
    masks = [row.response_mask for row in play(LOOPS[name], policy, scripts).rows]
    assert masks == [row.response_mask for row in played.rows]
    assert sum(map(sum, masks)) == sum(said for _, turns in scripts for said, _ in turns)


@pytest.mark.parametrize("name", [name for name in LOOPS if name != "naive"])
def test_greedy_every_loop_says_what_the_naive_one_says(name, policy, scripts):
    greedy = replace(TINY, temperature=0.0)
    first, second = (play(LOOPS[n], policy, scripts, greedy).rows for n in ("naive", name))
    assert [row.ids for row in second] == [row.ids for row in first]
    assert len({tuple(row.response_ids) for row in first}) > 2  # they do not all say the same


def test_kept_caches_sample_from_the_distribution_of_the_whole_text(policy, scripts):
    """Its log-probs are those of a pass over the finished text: nothing of no row was read."""
    for row in play(bench.kept, policy, scripts).rows:
        with torch.no_grad():
            whole = policy(torch.tensor([row.ids]))[0, len(row.prompt_ids) - 1 :]  # [response]
        sampled = torch.tensor(row.response_mask).bool()
        assert torch.allclose(whole[sampled], torch.tensor(row.logprobs)[sampled], atol=1e-3)


def flat(policy: Policy, of) -> torch.Tensor:
    return torch.cat([of(p).flatten() for p in policy.parameters()])


def test_all_ways_to_the_gradient_give_the_same_gradient(policy, scripts):
    gradients = []
    for work in UPDATES.values():
        environment = Scripted(scripts, VOCAB, TINY)
        environment.play(VOCAB)
        policy.zero_grad(set_to_none=True)
        work(policy, environment, environment.rows)
        gradients.append(flat(policy, lambda p: p.grad))
    policy.zero_grad(set_to_none=True)
    assert gradients[0].norm() > 0
    for gradient in gradients[1:]:
        assert (gradient - gradients[0]).norm() <= 1e-5 * gradients[0].norm()


def greedy(loop):
    def sample(policy, environment, rows):
        o = environment.settings
        environment.settings = replace(o, temperature=0.0)
        loop(policy, environment, rows)
        environment.settings = o

    return sample


def test_our_step_and_the_slow_one_move_the_weights_alike(policy, scripts, monkeypatch):
    """Both sample the same; plain gradient steps, of which 0.02 saturates none."""
    for name in ("naive", "slots"):
        monkeypatch.setattr(bench, name, greedy(getattr(bench, name)))
    sgd = lambda policy, *_: torch.optim.SGD(policy.parameters(), lr=0.02)  # noqa: E731
    monkeypatch.setattr(bench, "make_optimizer", sgd)
    before, moved = [p.detach().clone() for p in policy.parameters()], []
    for step in STEPS.values():
        old = flat(policy, lambda p: p.detach().clone())
        play(step, policy, scripts)
        moved.append(flat(policy, lambda p: p.detach()) - old)
        with torch.no_grad():
            for p, b in zip(policy.parameters(), before, strict=True):
                p.copy_(b)
    assert moved[0].norm() > 1e-4
    assert (moved[0] - moved[1]).norm() <= 1e-3 * moved[0].norm()


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
    found = [ran(name, "rollout", *words)[1] for name in ("naive", "HF active rows", "slots")]
    assert found[0] == found[1] == found[2]


# ------------------------------------------------------------------------------------- the roofline


@pytest.mark.parametrize("tied", [True, False])
def test_the_bytes_of_a_step_are_the_weights_and_the_keys_and_values(tied):
    """H = 32, 2 layers, 4 heads of 8, 2 of them with keys (K = 16), F = 64, V = 60. A layer's
    matrices: 32·32 queries, 2 · 32·16 keys and values, 32·32 output, 3 · 32·64 = 9216; norms 64:
    9280. In all 2 · 9280 + 32 + 60·32 = 20,512 weights of 4 bytes; an embedding that is not the
    head is not read. A token's keys and values: 2 · 2 layers · 16 · 4 bytes = 256; 3 rows of 10.
    """
    config = LlamaConfig(vocab_size=60, **small(tie_word_embeddings=tied))
    model = random_policy(config, seed=0).language_model
    assert bench.bytes_per_step(model, 3, 10) == 4 * 20_512 + 7680


def test_a_decoding_step_is_held_against_the_bandwidth_of_the_same_run():
    words = ("--batch", "8", "--context", "64", "--decoded", "16")
    found, _ = ran("slots", "decode", *words)
    assert found["tokens"] == 8
    assert found["share of roofline"] == pytest.approx(found["floor"] / found["seconds"])
    model = bench.make_model(options("decode"))
    moved = bench.bytes_per_step(model, 8, 64 + 8 + 8)
    assert found["floor"] * found["gb_per_s"] * 1e9 == pytest.approx(moved)


def test_a_model_without_rotary_positions_is_one_line(tmp_path):
    GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
    for name, part in (("slots", "decode"), ("slots", "rollout")):
        with pytest.raises(InputError, match="gpt2 has no rotary positions; the engine cannot"):
            ran(name, part, "--model", str(tmp_path), "--questions_per_step", "1")


def test_the_small_model_has_4_million_weights():
    """H = 256, V = 4096: embedding V H; a layer 2 H² + 2 · 64 H + 3 · 688 H, norms 2 H, biases 256
    + 128; the last norm H.
    """
    layer = 2 * 256**2 + 2 * 64 * 256 + 3 * 688 * 256 + 2 * 256 + 384
    model = bench.make_model(options("rollout"))
    assert sum(p.numel() for p in model.parameters()) == 4096 * 256 + 4 * layer + 256 == 3_821_312


# ------------------------------------------------------------------------------------------ figures


def run(seconds: float, mib: float) -> dict:
    return {"seconds": seconds, "mib": mib, "tokens": 16}


def test_ratios_are_of_medians_and_the_best_twin_is_the_fastest():
    """Medians 10, 4, 5, 2 seconds; the best of "better" and "other" is "better", 4 s, 60 MiB."""
    runs = {
        "slow": [run(8.0, 100.0), run(10.0, 100.0), run(90.0, 100.0)],
        "better": [run(4.0, 60.0)],
        "other": [run(5.0, 30.0)],
        "ours": [run(2.0, 20.0)],
    }
    rows = bench.summarize(runs, {"slow": ("slow",), "best": ("better", "other"), "x": ("none",)})
    slow, ours = rows["slow"], rows["ours"]
    assert (slow["seconds"], slow["from"], slow["to"]) == (10, 8, 90)
    assert ours["x slow"] == 5 and ours["x best"] == 2 and rows["other"]["x best"] == 0.8
    assert ours["mib of slow"] == 0.2 and ours["mib of best"] == pytest.approx(1 / 3)
    assert ours["tokens_per_s"] == 8 and "x x" not in ours
    assert "x best 2 " in bench.line_of("ours", ours)


def test_the_variants_take_turns(monkeypatch):
    order = []
    done = ({"seconds": 1.0}, [1])
    monkeypatch.setattr(bench, "alone", lambda work, threads: order.append(work) or done)
    bench.in_turns({"a": "a", "b": "b"}, replace(TINY, repeats=3), {})
    assert order == ["a", "b"] * 3


def test_ctrl_c_keeps_what_was_measured(monkeypatch, capsys, tmp_path):
    calls = iter([({"seconds": 1.0, "mib": 0.0}, [1])])

    def stopped(work, threads):
        for found in calls:
            return found
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "alone", stopped)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["retrieval", "--json", str(tmp_path / "out.json")])
    assert "rank-bm25" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 1


# ----------------------------------------------------------------------------- a process of its own


def fill() -> tuple[dict, list]:
    """64 MiB that are given back before the end are in the peak."""
    return bench.measured(lambda: torch.ones(64 * 2**18).sum().item(), "cpu")[0], []


def refuse(message: str):
    raise InputError(message)


def test_a_run_has_its_own_process_and_its_peak_is_counted():
    found, _ = bench.alone(fill, 1)
    # and not the hundreds that a forked process shares
    assert 60 < found["mib"] < 128 and found["seconds"] > 0


def test_what_is_wrong_in_a_run_comes_back_as_one_line():
    with pytest.raises(InputError, match=r"^no such thing: give another$"):
        bench.alone(partial(refuse, "no such thing: give another"), 1)
    with pytest.raises(InputError, match="ended from outside: most often memory ran out"):
        bench.alone(partial(bench.os._exit, 9), 1)


def test_a_part_writes_its_rows_as_json(tmp_path, capsys):
    path = tmp_path / "out.json"
    bench.main(["retrieval", "--shorter", "10", "--repeats", "1", "--json", str(path)])
    written = json.loads(path.read_text())
    assert written["what"] == "retrieval" and "torch" in written["machine"]
    assert [row["name"] for row in written["rows"]] == ["rank-bm25", "ours"]
    for row in written["rows"]:
        assert row["seconds"] > 0 and math.isfinite(row["x rank-bm25"]) and row["apart"] == 0
    assert "rank-bm25" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rollout --only slot", r"--only slot: no such variant \(did you mean slots\?\)"),
        ("rollout --repeats 0", "--repeats 0: must be at least 1"),
        ("rolout", "invalid choice"),
        ("decode --engine graphs", "--engine graphs: slots, or with --device cuda"),
        ("rollout --engine hf", "--engine hf: slots"),
        ("step --json /", "name a file"),
        ("rollout --model 9B", "--model 9B: neither"),
        ("rollout --vocab 1", "--vocab 1: must be at least 2"),
        ("update --vocab -1", "--vocab -1: must be at least 0"),
        ("step --tokens_per_micro_batch 0", "--tokens_per_micro_batch 0: must be at least 1"),
        ("retrieval --device cuda", "leave --device out"),
    ],
)
def test_what_has_no_meaning_is_one_line_before_anything_runs(words, message):
    with pytest.raises(InputError, match=message) as error:
        bench.main(words.split())
    assert "\n" not in str(error.value)


def test_only_leaves_the_other_variants_out_and_several_updates_have_no_twin():
    def names(part: str, *words: str) -> list[str]:
        return list(bench.variants(part, options(part, *words)))

    assert names("rollout", "--only", "half slots,naive") == ["naive", "half slots"]
    assert names("step", "--trajectories_per_update", "8") == ["ours"]
    assert names("step") == ["slow twin", "ours"]

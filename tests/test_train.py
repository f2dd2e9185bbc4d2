"""Tests of train.py: sampling, metrics and batch of a step; whole, resumed and two-process runs."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from conftest import flags, rows_of, same, same_end, settings_for
from test_lora import needs_peft
from test_shards import in_two
from test_update import trajectory, unequal_batch

import rewards
import train
import update as update_file
from data import Question
from plumbing import build
from plumbing.build import build_state
from plumbing.files import checkpoints
from policy import Batch, collate
from rewards import OtherModels
from scale.shards import full, in_parts
from settings import Settings
from train import Rollouts, collect, learn, measure, prepare, shuffled_updates
from trajectory import Search, Trajectory
from update import TrainState, compute_values, update


@pytest.fixture
def built(model, tmp_path):
    """Returns built("--flag value ..."), which builds the state of a tiny run."""
    return lambda more="", **fields: build_state(settings_for(model, tmp_path, more, **fields))


def weights_of(module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


@pytest.fixture
def marks(monkeypatch):
    """Returns marks(mark), which replaces the rewards: mark(rows) -> (reward_terms, correct)."""

    def set_to(mark) -> None:
        monkeypatch.setattr(train, "compute_rewards", lambda rows, *_: mark(rows))

    return set_to


@pytest.fixture
def pay(marks):
    """Returns pay(amounts), which gives the sampled trajectories these rewards, in this order."""
    return lambda amounts: marks(
        lambda _: ([{"answer": r} for r in amounts], [r > 0 for r in amounts])
    )


@pytest.fixture
def run(monkeypatch):
    """Returns run(state), which trains with this state and returns the rows of metrics.jsonl."""

    def run_with(state: TrainState) -> list[dict]:
        monkeypatch.setattr(train, "build_state", lambda settings: state)
        return rows_of(train.train(state.settings))

    return run_with


# ------------------------------------------------------- DAPO: further draws, and groups left out

FULL, NONE, ALL = (1, 0), (0, 0), (1, 1)  # a group of two: informative, all wrong, all right


@pytest.fixture
def scripted(monkeypatch, marks):
    """Returns scripted(rights, ...), which builds a state without a model. rights[draw] lists the
    groups of a draw; a group such as (1, 0) says which answers are right. The id of a question has
    the number of the draw, the number of the group, and "right" or "wrong".
    """

    def make(rights: list[list[tuple[int, ...]]], algorithm="dapo", **named) -> TrainState:
        settings = Settings(algorithm=algorithm, group_size=2, questions_per_step=2, **named)
        state = TrainState(settings, Accelerator(), None, None, None, False)
        state.other_models = OtherModels()
        marks(mark)
        state.stream = SimpleNamespace(attempts=len(rights))
        state.environment = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0))
        monkeypatch.setattr(train, "sample_draw", lambda _, step, draw: drawn(rights[draw], draw))
        return state

    def drawn(groups, draw) -> list[Trajectory]:
        generator = torch.Generator().manual_seed(draw)
        rows = [trajectory(generator, 4 + i, vocabulary=30) for i in range(2 * len(groups))]
        for i, t in enumerate(rows):
            end = "right" if groups[i // 2][i % 2] else "wrong"
            t.question = Question(f"{draw} {i // 2} {end}", "?", ["!"])
        return rows

    def mark(trajectories):
        right = [t.question.id.endswith("right") for t in trajectories]
        return [{"answer": float(r)} for r in right], right

    return make


@pytest.mark.parametrize(
    "algorithm, rights, draws, kept",  # kept: "draw question" of each group
    [
        ("dapo", [[FULL, FULL], []], 1, ["0 0", "0 1"]),  # enough at once: no further draw
        ("dapo", [[ALL, FULL], [FULL, FULL]], 2, ["0 1", "1 0"]),  # the last group is surplus
        ("dapo", [[ALL, NONE], [NONE, NONE], [ALL, FULL]], 3, ["2 1"]),  # no draw is left
        ("grpo", [[ALL, NONE], [FULL, FULL]], 1, ["0 0", "0 1"]),  # grpo keeps every group
    ],
)
def test_groups_that_teach_nothing_are_replaced_while_draws_are_left(
    algorithm, rights, draws, kept, scripted
):
    rollouts = collect(scripted(rights, algorithm), 0)
    firsts = [rollouts.trajectories[row].question.id for row in rollouts.kept[::2]]
    assert rollouts.draws == draws and [name.rpartition(" ")[0] for name in firsts] == kept
    assert len(rollouts.trajectories) == len(rollouts.reward_terms) == 4 * draws


def test_metrics_cover_all_sampled_rows_and_the_batch_has_only_the_kept_ones(scripted):
    state = scripted([[ALL, ALL], [NONE, FULL], [ALL, FULL]])
    rollouts = collect(state, 0)
    record = measure(state, rollouts)
    assert (record["resampled"], record["skipped"]) == (2, 0)
    shares = record["informative"], record["frac_reward_zero_std"]
    assert shares == pytest.approx((2 / 6, 4 / 6))
    batch = prepare(state, rollouts)
    assert batch.rewards.tolist() == [1, 0, 1, 0]
    assert torch.equal(batch.tokens[1], torch.tensor(rollouts.trajectories[7].ids))


def test_a_run_that_skips_every_step_still_ends_with_a_checkpoint(
    built, tmp_path, run, pay, capsys
):
    state = built("--algorithm dapo", max_resample=1)
    before = weights_of(state.policy)
    pay([1.0] * 4)
    rows = run(state)
    assert [row["skipped"] for row in rows] == [1, 1] and "loss" not in rows[0]
    assert len(checkpoints(tmp_path / "t" / "stage1")) == 1
    assert same(before, weights_of(state.policy))
    assert capsys.readouterr().out.count("no update: ") == 2


def test_dapo_can_filter_groups_by_the_answer_term_or_the_total_reward(scripted, marks):
    # In When to Search's stage 2 a right answer earns 1 without a search and 0.7 after one. Only in
    # the second group the format term differs, so its total rewards differ.
    terms = [{"answer": a, "format": f} for a, f in ((1.0, 1.0), (0.7, 1.0), (1.0, 1.0), (1.0, -1))]
    for by, kept in (("correct", []), ("answer", [0, 1]), ("total", [0, 1, 2, 3])):
        state = scripted([[ALL, ALL]], filter_by=by)
        marks(lambda _: (terms, [True] * 4))
        assert collect(state, 0).kept == kept


# --------------------------------------------------------------------------- metrics of a step


def ended(reason="eos", text="\\boxed{elm}", **question) -> Trajectory:
    question = {"answers": ["elm"], **question}
    t = trajectory(torch.Generator().manual_seed(0), 3)
    t.question = Question("q", "?", **question)
    t.stop_reason = reason
    t.segments = []
    t.append_model([5], [-1.0], text)
    return t


def test_the_metrics_of_a_step_are_means_over_all_its_trajectories(scripted):
    right = ended(text="\\boxed{0.5}", answers=["\\frac12"], task="math")
    right.searches = [Search("x", [], "x", cut=True), Search("y", [], "y", fallback=True)]
    right.append_environment([7] * 6, "documents", "documents")
    truncated = ended("length", "elm")
    failed = ended()  # used twice: a group that counts only in the metrics of searches and groups
    failed.searches = [Search("z", [], "z", error="down")]
    terms = [{"a": a, "b": b} for a, b in ((1.0, 1.0), (0.0, -1.0), (9.0, 9.0), (7.0, 9.0))]
    rows = [right, truncated, failed, failed]
    rollouts = Rollouts(rows, terms, [True, False, False, False], [0, 1, 2, 3], seconds=3.0)
    expected = {"reward": 0.5, "reward/a": 0.5, "reward/b": 0.0, "frac_reward_zero_std": 1 / 2}
    expected |= {"failed_rows": 1 / 2, "rollout_seconds": 3.0}
    expected |= {"em/math": 1, "searched/math": 1, "searches/math": 2, "em/qa": 0, "searches/qa": 0}
    expected |= {"em": 0.5, "searched": 0.5, "searches": 1.0, "answered": 0.5, "truncated": 0.5}
    # Each trajectory has 4 sampled tokens; one has 6 inserted tokens. Of 4 searches, the failed
    # rows made two.
    expected |= {"model_tokens": 4, "inserted_tokens": 3.0}
    expected |= {"fallbacks": 1 / 4, "search_errors": 2 / 4, "documents_cut": 1 / 4}
    record = measure(scripted([], "grpo"), rollouts)
    assert {name: record[name] for name in expected} == pytest.approx(expected)


# ----------------------------------------------------------------------------- the batch of a step


def rollouts_of(*rows: Trajectory) -> Rollouts:
    kept = [*range(len(rows))]
    return Rollouts(rows, [{"r": 0.0} for _ in rows], [False for _ in rows], kept)


def test_a_trajectory_truncated_before_it_answered_is_overlong(scripted):
    rows = [ended("length", "well"), ended("length"), ended("eos", "well"), ended("rejected", "x")]
    batch = prepare(scripted([]), rollouts_of(*rows))
    assert batch.overlong.tolist() == [True, False, False, False]


def test_mask_documents_false_trains_on_every_token_after_the_prompt(scripted):
    # prompt 3, then 2 sampled, 2 inserted, 1 sampled: columns 2, 3 and 6; without the mask 2 to 6
    draw = torch.Generator().manual_seed(0)
    rollouts = rollouts_of(trajectory(draw, 5, (2, 4)), trajectory(draw, 2))
    second = [0, 0, 1, 1, 0, 0, 0]
    for masked, first in ((True, [0, 0, 1, 1, 0, 0, 1]), (False, [0, 0, 1, 1, 1, 1, 1])):
        batch = prepare(scripted([], mask_documents=masked), rollouts)
        assert batch.response_mask.tolist() == [first, second]
        assert (batch.sampled_logprobs is None) != masked  # so that no gap is reported


def test_a_ppo_step_uses_the_values_of_the_critic_before_the_step(built):
    state = built("--algorithm ppo")
    torch.nn.init.normal_(state.critic.head.weight, generator=torch.Generator().manual_seed(0))
    batch = prepare(state, collect(state, 0))
    values = compute_values(state, batch)
    assert values.abs().max() > 0.1 and torch.equal(batch.values, values)


# --------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("recompute", [False, True])
def test_the_first_update_has_ratio_one_and_a_second_one_is_off_policy(recompute, built, run, pay):
    ratios = []
    for rows in (0, 2):
        # At temperature 2 the two samples of a group are never the same text. With equal texts the
        # two rewards would cancel out and the policy would not change.
        state = built(f"--steps 1 --temperature 2 --trajectories_per_update {rows}")
        state.recompute = recompute
        pay([1.0, 0.0, 0.0, 1.0])
        (record,) = run(state)
        ratios += [record["ratio_min"], record["ratio_max"]]
    assert ratios[:2] == pytest.approx([1, 1], abs=1e-4)
    assert ratios[2] < 0.999 or ratios[3] > 1.001


@pytest.mark.parametrize(
    "rewards, more, replaced",
    [
        ([1, 0, 1, 1], "", [True, True, False, False]),  # the second group has equal rewards
        ([1, 1, 1, 1], "", [False] * 4),
        ([1, 1, 1, 1], "--kl_coef 0.05", [True] * 4),  # its gradient needs every row
        ([1, 1, 1, 1], "--kl_coef 0.05 --kl_estimator k1", [True] * 4),  # before the updates
        ([1, 0, 1, 1], "--trajectories_per_update 2", [True, True, False, False]),
        ([1, 0, 1, 1], "--mismatch sequence_mask", [True] * 4),
    ],
)
def test_pi_old_is_the_policy_before_the_step(rewards, more, replaced, built, pay):
    """The sampler's log-probs are replaced in each row whose loss has a gradient."""
    state = built(f"--algorithm grpo --temperature 2 {more}")
    state.recompute = True
    pay(list(map(float, rewards)))
    rollouts = collect(state, 0)
    exact = collate(rollouts.trajectories, rewards, 2).old_logprobs  # [4, T]
    for t in rollouts.trajectories:
        t.logprobs = [value - 1 for value in t.logprobs]  # as of a sampler that rounds badly
    _, batch = learn(state, rollouts, 0)
    gap = (batch.old_logprobs - exact).abs() * batch.response_mask  # [4, T]
    assert (gap.amax(1) < 1e-4).tolist() == replaced


def test_a_run_that_samples_from_a_copy_recomputes_logprobs_and_logs_the_gap(
    built, run, monkeypatch
):
    for copies, smallest, largest in ((False, 0, 1e-4), (True, 1e-4, 0.2)):
        monkeypatch.setattr(build, "wants_copy", lambda *_, copies=copies: copies)
        for row in run(built("--trajectories_per_update 2")):
            assert smallest <= row["logprob_gap"] <= row["logprob_gap_max"] < largest


def test_a_run_prints_its_settings_its_steps_and_a_sample(model, tmp_path, capsys):
    train.main(flags(model, tmp_path, "--questions_per_step 4"))
    out = capsys.readouterr().out
    assert out.startswith("settings: ") and re.search(r"recipe=ur2\s+stage=1", out)
    assert len(re.findall(r"^step +\d+  reward ", out, re.MULTILINE)) == 2
    assert out.count("question: ") == 2 and "; reward " in out
    assert f"python eval.py --model {tmp_path}/t/stage1/checkpoint-000002" in out


# ------------------------------------------------------------------------------ an interrupted run

RUNS = [  # (flags, settings without a flag)
    ("--algorithm grpo --kl_coef 0.05 --load_in_8bit --eval_every 1", {"eval_questions": 1}),
    ("--algorithm reinforce_pp --kl_coef 0.05 --kl_estimator k1 --warmup_ratio 0.5", {}),
    ("--optimizer adamw8bit", {}),  # of reinforce_pp_baseline
    ("--algorithm dapo --clip_high 0.28", {"max_resample": 1}),
    ("--algorithm ppo --critic_lr 1e-3 --kl_coef 0.05 --kl_estimator k1", {"gae_lambda": 0.95}),
    pytest.param("--algorithm grpo --kl_coef 0.05 --lora_rank 4 --lr 1e-2", {}, marks=needs_peft),
]


@pytest.mark.parametrize("words, fields", RUNS)
def test_a_resumed_run_equals_an_uninterrupted_run(words, fields, model, tmp_path, monkeypatch):
    # The tiny model is hardly ever right, so here a response with an odd number of tokens is right.
    monkeypatch.setattr(rewards, "is_right", lambda t, _: len(t.response_ids) % 2 == 1)
    more = f"--steps 3 --save_every 2 --trajectories_per_update 2 {words}"
    if "adamw8bit" in words:  # samples from a bf16 copy, as on a GPU
        monkeypatch.setattr(build, "wants_copy", lambda *_: True)
    unbroken = train.train(settings_for(model, tmp_path / "a", more, **fields))
    resumed = shutil.copytree(unbroken, tmp_path / "b" / "t" / "stage1")
    shutil.rmtree(resumed / "checkpoint-000003")  # as if it had stopped after two steps
    assert train.train(settings_for(model, tmp_path / "b", f"{more} --resume", **fields)) == resumed
    rows = rows_of(unbroken)
    assert same_end(unbroken, resumed) and [row["step"] for row in rows] == [0, 1, 2]
    # The KL is one to the stage's first model, also after a resume.
    assert "kl_coef" not in words or rows[2]["k_abs"] > rows[0]["k_abs"]
    if "dapo" in words:
        assert any(row["resampled"] for row in rows) and not all(row["skipped"] for row in rows)


def test_a_held_out_evaluation_changes_nothing_in_training(model, tmp_path):
    last = []
    for every, evaluated in ((1, [True, True]), (2, [False, True])):
        more = f"--steps 2 --save_every 2 --eval_every {every}"
        folder = train.train(settings_for(model, tmp_path / str(every), more, eval_questions=1))
        rows = rows_of(folder)
        assert ["eval/em" in row for row in rows] == evaluated
        assert len(checkpoints(folder)) == sum(evaluated)
        last.append(rows[1])
    assert last[0] == last[1]


def test_training_turns_queries_away_but_its_evaluation_does_not(built, monkeypatch):
    """UR² (D.3)."""
    held_out = []
    with mock.patch.object(build, "build_search", side_effect=build.build_search) as search:
        state = built("--eval_every 1", eval_questions=1)
    assert search.call_args.args[0].fallback
    monkeypatch.setattr(train, "rollout", lambda _, env, *__: held_out.append(env.held_out) or [])
    monkeypatch.setattr(train, "merge_records", lambda *_: {})
    train.sample_draw(state, 0, 0), train.evaluate(state)
    assert held_out == [False, True]


def test_the_best_checkpoint_is_kept_and_named(model, tmp_path, monkeypatch, capsys):
    scores = iter([0.2, 0.6, 0.4, 0.6])
    # UR² chooses by F1 (C.2), of which exact match may know nothing
    monkeypatch.setattr(train, "evaluate", lambda _: {"eval/em": 0.0, "eval/f1": next(scores)})
    more = "--steps 4 --save_every 4 --eval_every 1 --keep_checkpoints 1"
    train.main(flags(model, tmp_path, more))
    folder = tmp_path / "t" / "stage1"
    # of two equal scores the first counts as the best
    assert [path.name[-1] for path in checkpoints(folder)] == ["2", "4"]
    assert f"--model {folder}/checkpoint-000002" in capsys.readouterr().out


# ------------------------------------------------------------------------------------ two processes


def take_step(settings: Settings, batch: Batch, out: Path) -> None:
    """Updates on a batch that every process has, and samples. The last update has a single row, so
    that one of two processes has no row.
    """
    state = build_state(settings)
    # Adam divides by the gradient's size, which would amplify rounding errors.
    state.optimizer = torch.optim.SGD(state.policy.parameters(), 0.1)
    if state.critic is not None:
        torch.nn.init.constant_(state.critic.head.weight, 0.01)
        state.critic_optimizer = torch.optim.SGD(state.critic.parameters(), 0.01)
    rows = [*shuffled_updates(0, batch.rewards, settings), torch.tensor([3])]
    with mock.patch.object(update_file, "MAX_GRAD_NORM", 1e9):
        totals = [update(state, batch.rows(some), number == 0) for number, some in enumerate(rows)]
    with mock.patch.object(train, "compute_rewards", by_place):  # only the main process calls it
        rollouts = collect(state, 0)
    sampled = [t.question.id for t in rollouts.trajectories]
    result = train.evaluate(state)
    modules = torch.nn.ModuleList(filter(None, (state.policy, state.critic)))
    weights = [full(p.detach()) for p in modules.parameters()]
    state.accelerator.wait_for_everyone()
    if state.accelerator.is_main_process:
        kept = [sampled[row] for row in rollouts.kept]
        how = state.accelerator.num_processes, in_parts(state.policy)
        torch.save((weights, totals, kept, sampled, result, *how), out)


def by_place(trajectories, *_):
    """Rewards by question and row, because two processes sample other texts than one process."""
    right = [i % 2 == 0 or t.question.id[-1] not in "02468" for i, t in enumerate(trajectories)]
    return [{"answer": float(r)} for r in right], right


@pytest.mark.parametrize(
    "sharding, words",
    [
        ("ddp", "--algorithm grpo"),
        ("ddp", "--algorithm dapo"),
        ("ddp", "--algorithm ppo"),
        ("zero2", "--algorithm grpo"),
        ("fsdp2", "--algorithm ppo"),
        pytest.param("ddp", "--algorithm grpo --lora_rank 4", marks=needs_peft),
    ],
)
def test_two_processes_take_the_same_step_as_one(sharding, words, model, tmp_path):
    # Updates of unequal size: 8 trajectories in updates of 3, 3 and 2, then an update of one row.
    more = "--tokens_per_micro_batch 10 --trajectories_per_update 3 --questions_per_step 4"
    more += f" --eval_every 1 {words}"
    settings = settings_for(model, tmp_path, more, eval_questions=1, max_resample=1)
    batch = unequal_batch(settings)
    if "ppo" not in words:  # so that rows of groups with equal rewards are left out
        batch.ref_logprobs = batch.values = None
    take_step(settings, batch, tmp_path / "one.pt")
    in_two(sharding, take_step, settings, batch, tmp_path / "two.pt")
    one, two = (torch.load(tmp_path / name) for name in ("one.pt", "two.pt"))
    weights, totals, kept, sampled, result, *_ = one
    assert two[2:] == (kept, sampled, result, 2, sharding != "ddp") and result["eval/queries"] > 0
    assert len(sampled) > len(kept) if "dapo" in words else len(sampled) == len(kept) == 8
    torch.testing.assert_close(two[0], weights, atol=2e-6, rtol=0)
    assert max(total["grad_norm"] for total in totals) > 1e-2
    for expected, actual in zip(totals, two[1], strict=True):
        assert actual == pytest.approx(expected, abs=1e-5, rel=1e-5)


def test_two_stages_behind_one_start_are_those_of_two_starts(model, tmp_path):
    more = "--steps 1 --task_mixing false --stage"
    train.main(flags(model, tmp_path / "one", f"{more} 1,2"))
    for stage, start in (("1", model), ("2", "")):
        train.main(flags(start, tmp_path / "two", f"{more} {stage}"))
    for stage in ("stage1", "stage2"):
        assert same_end(*(tmp_path / runs / "t" / stage for runs in ("one", "two")))

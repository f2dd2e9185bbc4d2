"""Tests lab/export.py: our rewards as functions for TRL and verl."""

import copy
from dataclasses import asdict

import pytest
from conftest import message
from test_rewards import BOX, CHOICE, CLOSE, MATH, QA, ar, r1, search, sections, ur2

from data import Question
from lab.export import trl_reward, verl_score
from rewards import REWARDS, Extras, RewardSettings, example

NOT_EXPORTED = ["r_search", "ur2_choice", "ur2_weak"]
NOT_EXPORTED += [name for name in REWARDS if name.startswith("when")]
TRANSCRIPTS = {  # protocol -> trajectories
    "ur2": [
        ur2(search() + BOX),
        ur2(search() * 5 + "\\boxed{Sudria}"),
        ur2("\\boxed{Kelmouth, Norland}"),
        ur2("\\boxed{\\frac{1}{2}}", MATH),
        ur2("The correct answer is: B", CHOICE),
        ur2(search() + BOX, may_search=False),
    ],
    "r1_searcher": [r1(search() + CLOSE), r1(CLOSE.replace("Norland", "in Norland")), r1("no")],
    "search_r1": [],
    "arena": [ar(sections()), ar(sections("[1]")), ar("<answer> x </answer>", gold="x")],
}


def row_of(question: Question) -> dict:
    """Returns the question as a row of a data set, in which empty fields are null."""
    row = asdict(question) | {"answers": list(question.answers)}
    return {name: value if value or value is False else None for name, value in row.items()}


@pytest.mark.parametrize("name", [name for name in REWARDS if name not in NOT_EXPORTED])
def test_the_exported_functions_return_the_same_as_our_reward(name):
    (protocol,) = [protocol for protocol in TRANSCRIPTS if name.startswith(protocol)]
    settings = RewardSettings(answer_metric="em" if protocol == "arena" else "f1")
    trajectories = [example(protocol, answer, 1) for answer in ("Norland", "Sudria")]
    trajectories += TRANSCRIPTS[protocol]  # none has a fallback, which a text does not show
    expected = [sum(REWARDS[name](t, settings, 0, Extras()).values()) for t in trajectories]
    assert len({*expected}) > 1
    rows = [row_of(t.question) for t in trajectories]
    columns = {field: [row[field] for row in rows] for field in rows[0]}
    texts = [t.text for t in trajectories]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    for completions in (texts, chats):
        rewards = trl_reward(name)(prompts=None, completions=completions, **columns)
        assert rewards == pytest.approx(expected)
    for text, row, reward in zip(texts, rows, expected, strict=True):
        terms = verl_score("any", text, {"target": row["answers"]}, row, reward=name)
        assert terms.pop("score") == pytest.approx(reward) == pytest.approx(sum(terms.values()))


@pytest.mark.parametrize("name", NOT_EXPORTED)
def test_a_reward_that_needs_more_than_the_text_is_refused_in_one_line(name):
    assert "depends on the step, on a reader's answer or on an embedder's vectors" in message(
        trl_reward, name
    )


def test_an_unknown_reward_is_one_line():
    text = message(trl_reward, "search_r2")
    assert "search_r2: unknown reward; " in text and "did you mean search_r1?" in text


def test_the_trainer_of_trl_accepts_the_function(qwen2, bpe, tmp_path):
    trl = pytest.importorskip("trl", reason="needs trl (pip install trl)")
    datasets = pytest.importorskip("datasets", reason="comes with trl")
    reward, calls = trl_reward("r1_searcher_stage2"), []

    def record_reward(**arguments):
        calls.append((arguments["completions"], reward(**arguments)))
        return calls[-1][1]

    rows = [{"prompt": QA.question, "answers": QA.answers, "task": "qa"}] * 2
    sizes = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 8}
    options = {"max_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False, **sizes}
    trainer = trl.GRPOTrainer(
        model=copy.deepcopy(qwen2.language_model),
        reward_funcs=record_reward,
        args=trl.GRPOConfig(output_dir=str(tmp_path / "trl"), **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=bpe,
    )
    trainer.train()
    assert trainer.state.global_step == 1
    # The reward of a reply in the wrong format is −2.
    assert calls and len(calls[0][0]) == len(calls[0][1]) == 2 and calls[0][1][0] == -2.0

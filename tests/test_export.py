"""lab/export.py: a run for the viewer unipo; rewards as the functions that TRL and verl take."""

import copy
import json
import runpy
import sys
from dataclasses import asdict

import pytest
from conftest import command_line, rows_of, settings_for
from test_rewards import BOX, CHOICE, CLOSE, MATH, QA, ar, r1, search, sections, ur2

import train
from data import Question
from lab import export
from lab.export import unipo
from rewards import REWARDS, Extras, RewardSettings, example

NOT_EXPORTED = {"r_search": "reader", "ur2_choice": "by the step", "ur2_weak": "by the step"}
NOT_EXPORTED |= dict.fromkeys([name for name in REWARDS if name.startswith("when")], "embedder")
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


@pytest.fixture
def exported(tmp_path, monkeypatch, capsys):
    """exported(trainer, reward) -> what the written file defines."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def exported(trainer, name):
        out = tmp_path / trainer / f"{name}.py"
        export.main([trainer, name, "--out", str(out)])
        assert capsys.readouterr().out == f"written: {out}\n"
        return runpy.run_path(str(out))

    return exported


def row_of(question: Question) -> dict:
    """As a data set holds it: what is not there is null."""
    row = asdict(question) | {"answers": list(question.answers)}
    return {name: value if value or value is False else None for name, value in row.items()}


@pytest.mark.parametrize("name", [name for name in REWARDS if name not in NOT_EXPORTED])
def test_the_written_functions_pay_what_the_reward_pays(name, exported):
    (protocol,) = [its for its in TRANSCRIPTS if name.startswith(its)]
    settings = RewardSettings(answer_metric="em" if protocol == "arena" else "f1")
    some = [example(protocol, answer, 1) for answer in ("Norland", "Sudria")]
    some += TRANSCRIPTS[protocol]  # without a fallback, which a text does not tell
    wanted = [sum(REWARDS[name](t, settings, 0, Extras()).values()) for t in some]
    assert len({*wanted}) > 1
    rows = [row_of(t.question) for t in some]
    columns = {field: [row[field] for row in rows] for field in rows[0]}
    reward = exported("trl", name)[name]
    texts = [t.text for t in some]
    assert reward(prompts=[""] * len(some), completions=texts, **columns) == pytest.approx(wanted)
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert reward(prompts=None, completions=chats, **columns) == pytest.approx(wanted)
    score = exported("verl", name)["compute_score"]
    for t, row, its in zip(some, rows, wanted, strict=True):
        found = score("any", t.text, {"target": row["answers"]}, row)
        assert found.pop("score") == pytest.approx(its) == pytest.approx(sum(found.values()))
    found = score("any", some[0].text, rows[0]["answers"][0])  # an answer, and nothing more
    assert set(found) > {"score"}


@pytest.mark.parametrize("name", NOT_EXPORTED)
def test_a_reward_that_no_text_decides_is_refused_in_one_line(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert NOT_EXPORTED[name] in command_line(export.main, ["verl", name], capsys)
    assert not [*tmp_path.iterdir()]


def test_an_unknown_reward_or_run_is_one_line(capsys, tmp_path):
    said = command_line(export.main, ["trl", "search_r2"], capsys)
    assert "search_r2: no reward; " in said and "did you mean search_r1?" in said
    said = command_line(export.main, ["unipo", tmp_path / "none"], capsys)
    assert "none: no metrics.jsonl there nor in a stage" in said


def test_trls_own_trainer_takes_the_function(exported, qwen2, bpe, tmp_path):
    trl = pytest.importorskip("trl", reason="needs trl (pip install trl)")
    datasets = pytest.importorskip("datasets", reason="comes with trl")
    reward, paid = exported("trl", "r1_searcher_stage2")["r1_searcher_stage2"], []

    def noted(**given):
        paid.append((given["completions"], reward(**given)))
        return paid[-1][1]

    rows = [{"prompt": QA.question, "answers": QA.answers, "task": "qa"}] * 2
    sizes = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 8}
    how = {"max_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False, **sizes}
    trainer = trl.GRPOTrainer(
        model=copy.deepcopy(qwen2.language_model),
        reward_funcs=noted,
        args=trl.GRPOConfig(output_dir=str(tmp_path / "trl"), **how),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=bpe,
    )
    trainer.train()
    assert trainer.state.global_step == 1
    assert paid and len(paid[0][0]) == len(paid[0][1]) == 2 and paid[0][1][0] == -2.0  # no format


# ------------------------------------------------------------------------------------------- a run
@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """Two steps of GRPO with a KL, two updates each, of which everything is kept."""
    more = "--groups_kept -1 --algorithm grpo --kl_coef 0.1 --kl_estimator k2 --lr 1e-2"
    more += " --trajectories_per_update 2"
    return train.train(settings_for(model, tmp_path_factory.mktemp("t"), more)).parent


def strict(text: str) -> dict:
    """As a browser reads it: without NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(name))


def test_a_run_is_written_in_unipos_form(run, capsys):
    export.main(["unipo", str(run)])
    assert capsys.readouterr().out == f"written: {run / 'unipo.json'}\n"
    found = strict((run / "unipo.json").read_text())
    header, entries = found["header"], found["entries"]
    assert header["algorithm"] == "grpo" and header["totalSteps"] == 2
    assert header["reward_strategy"] == "ur2_stage1" and header["dataset"] == "built-in world 0"
    assert header["hparams"]["kl_coef"] == 0.1 and len(header["hparams"]["clip_eps"]) == 2
    assert [entry["step"] for entry in entries] == [0, 1]
    ids = []
    for entry, row in zip(entries, rows_of(run / "stage1"), strict=True):
        assert entry["metrics"]["reward"] == row["reward"]
        assert entry["metrics"]["policy_objective"] == -row["loss"]
        assert all(isinstance(value, int | float) for value in entry["metrics"].values())
        assert [len(prompt["responses"]) for prompt in entry["prompts"]] == [2, 2]
        responses = [r for prompt in entry["prompts"] for r in prompt["responses"]]
        objective = sum(sum(r["tokens"]["token_objective"]) for r in responses)
        # two updates a step, and metrics have their mean
        assert objective / 2 == pytest.approx(entry["metrics"]["policy_objective"], abs=2e-4)
        assert sum(r["reward"] for r in responses) / 4 == pytest.approx(row["reward"], abs=1e-4)
        ids += [r["id"] for r in responses]
    assert len({*ids}) == 8


def test_every_series_has_a_number_per_token_and_0_where_nothing_was_sampled(run):
    for entry in unipo(run / "stage1")["entries"]:
        for prompt in entry["prompts"]:
            for its in prompt["responses"]:
                tokens, n = its["tokens"], its["response_length"]
                assert {len(series) for series in tokens.values()} == {n}
                assert its["response_text"] == "".join(tokens["strings"])
                first = tokens["response_mask"].index(1)
                assert tokens["advantages"][first] == pytest.approx(its["advantage"])
                names = ("log_probs", "old_log_probs", "ref_log_probs", "token_objective")
                for name in names:
                    pairs = zip(tokens[name], tokens["response_mask"], strict=True)
                    assert not any(value for value, mask in pairs if not mask)
                assert min(tokens["log_probs"]) < 0 and min(tokens["ref_log_probs"]) < 0


def test_what_was_written_before_is_kept(run, capsys):
    out = run / "again.json"
    out.write_text("mine")
    export.main(["unipo", str(run / "stage1"), "--out", str(out)])
    assert "is kept as again.json.old1" in capsys.readouterr().out
    assert (run / "again.json.old1").read_text() == "mine" != out.read_text()

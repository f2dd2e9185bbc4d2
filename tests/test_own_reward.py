"""Tests --reward FILE.py:FUNCTION, a reward that the user writes."""

import json

import pytest
from conftest import command_line, rows_of, settings_for

import eval as evaluation
import train
from errors import InputError
from flags import parse
from plumbing.files import checkpoints
from rewards import (
    REWARDS,
    OtherModels,
    check_reward,
    compute_rewards,
    example,
    needs,
    own_reward,
)
from settings import Settings

SHORT = """
from metrics import exact_match

LIMIT = 20


def words(text):
    return len(text.split())


def mine(trajectory):
    right = exact_match(trajectory.answer, trajectory.question.answers)
    return {"right": right, "short": float(words(trajectory.model_text) < LIMIT)}
"""


@pytest.fixture
def own(tmp_path):
    """Returns a function that writes a file with this text and returns "FILE.py:mine"."""

    def own(text: str) -> str:
        (tmp_path / "mine.py").write_text(text)
        return f"{tmp_path}/mine.py:mine"

    yield own
    for name in [name for name in REWARDS if ":" in name]:
        del REWARDS[name]


def test_a_run_with_an_own_reward_is_trained_logged_resumed_and_evaluated(
    own, model, tmp_path, capsys
):
    name = own(SHORT)
    folder = train.train(settings_for(model, tmp_path, f"--steps 1 --reward {name}"))
    (row,) = rows_of(folder)
    assert row["reward"] == pytest.approx(row["reward/right"] + row["reward/short"], abs=1e-5)
    assert json.loads((folder / "settings.json").read_text())["reward"] == name
    train.train(settings_for(model, tmp_path, f"--steps 2 --reward {name} --resume"))
    assert len(rows_of(folder)) == 2
    (tmp_path / "mine.py").unlink()  # an evaluation does not use the reward,
    del REWARDS[name]  # and has not loaded it
    arguments = f"--model {checkpoints(folder)[-1]} --questions 1 --output_dir {tmp_path}".split()
    evaluation.main(arguments)
    assert "predictions:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, fragment",
    [
        ("def other(t): ...", "not found: 'mine'"),
        ("def mine(t):\n    return 1.0", "1.0 is not a reward: return named finite numbers, suc"),
        ("def mine(t):\n    return {'a': '1'}", "{'a': '1'} is not a reward"),
        ("def mine(t):\n    return {'a': 0 * 1e999}", "{'a': nan} is not a reward"),
    ],
)
def test_a_bad_reward_is_a_one_line_error_before_a_model_is_loaded(own, text, fragment, capsys):
    line = command_line(train.main, ["--reward", own(text)], capsys)
    assert line.startswith("error: --reward ") and fragment in line and len(line) < 600


def test_a_missing_reward_file_is_a_one_line_error(tmp_path, capsys):
    output = command_line(train.main, ["--reward", f"{tmp_path}/no.py:mine"], capsys)
    assert "no.py" in output and "No such file" in output


def test_a_recipe_that_compares_groups_by_the_answer_term_needs_that_term(own, capsys):
    arguments = ["--recipe", "when_to_search", "--reward", own(SHORT)]
    output = command_line(train.main, arguments, capsys)
    assert "mine.py:mine: the recipe compares its term `answer`" in output
    parse([*arguments, "--algorithm", "grpo"])


def test_an_exception_in_the_users_file_keeps_its_traceback(own):
    with pytest.raises(AttributeError) as raised:
        own_reward(own("def mine(t):\n    return t.nothing"))(example("r_search"))
    assert raised.traceback[-1].lineno + 1 == 2


def test_a_function_gets_the_arguments_and_what_it_names_of_other_models(own):
    text = "def mine(t, step, correct=None, weight=1.0):\n    return {'a': weight * step}"
    name = own(text)
    args = {"weight": 3.0}
    settings = Settings(recipe="r_search", protocol="r_search", reward=name, reward_args=args)
    check_reward(settings)
    assert needs(settings) == {"step", "correct"}
    ((terms,), _) = compute_rewards([example("r_search")], settings, 2, OtherModels())
    assert terms == {"a": 6.0}


def test_terms_of_different_names_are_an_error_before_they_are_logged(own):
    name = own("def mine(t):\n    return {'a': 1, **({'b': 1} if t.searches else {})}")
    settings = Settings(recipe="r_search", protocol="r_search", reward=name)
    check_reward(settings)
    rows = [example("r_search"), example("r_search", searches=0)]
    with pytest.raises(InputError, match="its terms differ in their names"):
        compute_rewards(rows, settings, 0, OtherModels())

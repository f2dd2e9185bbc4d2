"""lab.moments: what a run searched for before RL, after stage 1 and after stage 2."""

import pytest
from conftest import message

from data import Question
from lab.moments import main, searched, shows_most
from prompts import PROTOCOLS
from trajectory import Search, Trajectory


def asked(kind: str, searches: int, answer: str = "Rom") -> Trajectory:
    t = Trajectory(Question("q", "where ?", ["Rom"], source=kind), PROTOCOLS["ur2"], prompt_ids=[1])
    t.append_model([2], [-0.5], f"\\boxed{{{answer}}}")
    t.searches += [Search("a", [], "") for _ in range(searches)]
    return t


def test_the_share_of_a_kind_that_is_searched_for_by_hand():
    rows = [asked("one_hop", 1), asked("one_hop", 0), asked("one_hop", 3), asked("known", 0)]
    assert searched(rows, "one_hop") == pytest.approx(2 / 3)
    assert searched(rows, "known") == 0.0


def test_the_question_that_is_shown_has_two_hops_two_searches_and_is_right():
    assert shows_most(asked("two_hop", 2))
    assert not shows_most(asked("two_hop", 1))
    assert not shows_most(asked("two_hop", 2, "Ulm")) and not shows_most(asked("one_hop", 2))


def test_a_picture_of_a_run_and_a_run_without_stages_is_one_line(trained, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    monkeypatch.setattr("lab.moments.shows_most", lambda t: t.question.kind == "two_hop")
    monkeypatch.chdir(tmp_path)
    main(["--output_dir", str(trained), "--questions", "4"])
    assert (tmp_path / "moments.png").stat().st_size > 10_000
    assert "no checkpoint of that run" in message(main, ["--output_dir", str(tmp_path)])

"""Tests lab.moments: the searches of a run before RL, after stage 1 and after stage 2."""

import pytest
from conftest import message

from data import Question
from lab.moments import main, searched, shows_most
from papers import PROTOCOLS
from trajectory import Search, Trajectory


def answered(kind: str, searches: int, answer: str = "Rom") -> Trajectory:
    t = Trajectory(Question("q", "where ?", ["Rom"], source=kind), PROTOCOLS["ur2"], prompt_ids=[1])
    t.append_model([2], [-0.5], f"\\boxed{{{answer}}}")
    t.searches += [Search("a", [], "") for _ in range(searches)]
    return t


def test_the_share_of_questions_with_a_search_by_hand():
    rows = [
        answered("one_hop", 1),
        answered("one_hop", 0),
        answered("one_hop", 3),
        answered("known", 0),
    ]
    assert searched(rows, "one_hop") == pytest.approx(2 / 3)
    assert searched(rows, "known") == 0.0


def test_the_example_has_two_hops_two_searches_and_a_right_answer():
    assert shows_most(answered("two_hop", 2))
    assert not shows_most(answered("two_hop", 1))
    assert not shows_most(answered("two_hop", 2, "Ulm")) and not shows_most(answered("one_hop", 2))


def test_a_run_is_drawn_and_a_run_without_stages_is_one_line(trained, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    monkeypatch.setattr("lab.moments.shows_most", lambda t: t.question.kind == "two_hop")
    monkeypatch.chdir(tmp_path)
    main(["--output_dir", str(trained), "--questions", "4"])
    assert (tmp_path / "moments.png").stat().st_size > 10_000
    assert "no checkpoint for these flags" in message(main, ["--output_dir", str(tmp_path)])

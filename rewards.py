r"""What a trajectory is worth: one function per reward formula, each a dict of named components whose sum is the reward.

    n   valid searches: executed by the environment, for a query of at most 20 words
    f   searches that came back as the fallback ("this query asks for no fact")
    v   number of format violations

    UR²           stage 1   R = format + retrieval − 0.5 f       format = +1 if v = 0 else −v,  retrieval = 0, 3, 4 by n
                  stage 2   R = answer − 0.5 f + format          answer = 2 · score,  format = +1 if v = 0 else 0
                  choice    stage 2 plus 0.5 (n = 1) or 1 (n ≥ 2) in the first steps
    R1-Searcher   stage 1   R = 0.5 [n ≥ 1] + 0.5 [format]
                  stage 2   R = F1(answer, gold) + (0 if format else −2)

Three rules hold for every function here, because breaking them is what training then exploits:
  1. only the model's own text is scored: what stands in a document or in the prompt is nobody's answer and nobody's fault;
  2. searches are counted in the environment's log, never by tags: a tag can be written without a search;
  3. the answer is the last one, found by position with balanced braces. Two answers are a fault; the last is still scored.

Left out: R-Search, When to Search and ARENA; anything that looks at more than one trajectory (that is an advantage).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING

from data import InputError, Question, run_main
from metrics import choice_letter, cover_exact_match, exact_match, f1_score, math_equal

if TYPE_CHECKING:
    from rollout import Trajectory

MAX_QUERY_WORDS = 20
MAX_ANSWER_WORDS = 10
MAX_QUERIES = 4
ANSWER_METRICS = {"f1": f1_score, "em": exact_match, "cem": cover_exact_match}


def _pick(table: dict, name: str, what: str):
    if name not in table:
        raise InputError(f"unknown {what} {name!r}: one of {', '.join(table)}")
    return table[name]


# ---------------------------------------------------------------------------------------- what all formats share

def count_valid_searches(trajectory: Trajectory) -> int:
    """n. The environment runs a longer query too, and refuses an empty one; only short ones earn anything."""
    return sum(len(search.query.split()) <= MAX_QUERY_WORDS for search in trajectory.searches)


def count_fallbacks(trajectory: Trajectory) -> int:
    """f, from the summariser's own flag: the wording of the message, or a paraphrase of it in a document, is no evidence."""
    return sum(search.fallback for search in trajectory.searches)


def tags_pair(text: str, begin: str, end: str) -> bool:
    """Does every `begin` have its `end` before the next one opens?"""
    order = re.findall(f"{re.escape(begin)}|{re.escape(end)}", text)
    return order == [begin, end] * (len(order) // 2)


def scripts(text: str) -> set[str]:
    """The scripts of a text's letters, by the first word of their Unicode names: "LATIN", "CJK", "CYRILLIC", ...

    >>> sorted(scripts("π r², ℝ, 巴黎"))       # NFKC turns the mathematician's ℝ into R
    ['CJK', 'GREEK', 'LATIN']
    """
    letters = {c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) in ("Lu", "Ll", "Lt", "Lo")}
    return {unicodedata.name(c, "UNKNOWN").split()[0] for c in letters}


def is_garbled(trajectory: Trajectory) -> bool:
    """Letters of a script that neither the question nor a document uses, U+FFFD, or private-use characters.

    Latin and Greek always pass: prompts are English and formulas are Greek. Trap: a Chinese question is no garbled text.
    """
    question, text = trajectory.question, trajectory.model_text
    shown = [question.question, *question.options]
    shown += [f"{document.title} {document.text}" for document in question.references]
    shown += [segment.text for segment in trajectory.segments if segment.writer != "model"]
    broken = any(c == "\ufffd" or unicodedata.category(c) == "Co" for c in text)
    return broken or bool(scripts(text) - scripts(" ".join(shown)) - {"LATIN", "GREEK"})


def own_format_faults(trajectory: Trajectory) -> list[str]:
    """Faults that UR² and R1-Searcher name alike, one entry each."""
    text, protocol = trajectory.model_text, trajectory.protocol
    faults = []
    if not tags_pair(text, *protocol.query_tags):
        faults.append("unpaired_query_tags")
    if any(tag in text for tag in protocol.documents_tags):  # what the environment writes is not in model_text
        faults.append("written_documents")
    if is_garbled(trajectory):
        faults.append("garbled_text")
    if any(tag in answer for tag in protocol.tags for answer in trajectory.answers):
        faults.append("tag_in_answer")
    return faults


# ------------------------------------------------------------------------------------------------------------ UR²

UR2_RETRIEVAL = {"qwen_7b": (0.0, 3.0, 4.0), "qwen_3b": (0.0, 5.0, 7.0), "llama_8b": (0.0, 3.0, 3.0)}  # for n = 0, 1, ≥ 2
UR2_CHOICE_BONUS = (0.0, 0.5, 1.0)  # for n = 0, 1, ≥ 2
UR2_CHOICE_STEPS = {"qwen_7b": 10, "qwen_3b": 15, "llama_8b": 10}  # steps 0 .. 9 (14) pay it

# Traps: no <|im_end|> or <|eot_id|> here: they are EOS tokens, and a response that ends well ends in one. A line begins
# where a turn of the model begins too, because the newline before it is the environment's.
_ILLEGAL = {
    "user_turn": r"(?m)^user\b",
    "assistant_turn": r"(?m)^assistant\b",
    "im_start": r"<\|im_start\|>",
    "tool_call": r"<tool_call>",
    "start_header": r"<\|start_header_id\|>",
    "end_header": r"<\|end_header_id\|>",
}


def ur2_violations(trajectory: Trajectory, search_required: bool = False) -> list[str]:
    """The names of all format violations; v is their number (UR² appendix C.7).

    Long queries count each; an illegal token counts once for its kind, so that one loop of the policy cannot write an
    unbounded penalty. `search_required` adds stage 1's "missing retrieval".

    >>> ur2_violations(example("ur2", answer="Norland or rather perhaps the old town of Kelmouth on its coast"))
    ['long_answer']
    """
    asked = [search.query for search in trajectory.searches]
    asked += [refusal.query for refusal in trajectory.refusals if refusal.reason == "limit"]
    faults = _ur2_answer_faults(trajectory) + own_format_faults(trajectory)
    faults += ["long_query" for query in asked if len(query.split()) > MAX_QUERY_WORDS]
    if len(asked) > MAX_QUERIES:
        faults.append("too_many_queries")
    turns = [segment.text for segment in trajectory.segments if segment.writer == "model"]
    faults += [f"illegal_{name}" for name, pattern in _ILLEGAL.items() if any(re.search(pattern, turn) for turn in turns)]
    if search_required and not trajectory.searches:
        faults.append("missing_retrieval")
    return faults


def _ur2_answer_faults(trajectory: Trajectory) -> list[str]:
    answers, question = trajectory.answers, trajectory.question
    if len(answers) > 1:
        return ["several_answers"]
    if not answers or not answers[0]:
        return ["no_answer"]
    if question.task == "choice":
        return [] if _is_one_letter(answers[0]) else ["not_a_letter"]
    words = len(answers[0].split())
    longest_gold = max((len(gold.split()) for gold in question.answers), default=0)
    return ["long_answer"] if words > max(MAX_ANSWER_WORDS, longest_gold) else []


def _is_one_letter(answer: str) -> bool:
    bare = re.sub(r"<\|[^|]*\|>|</s>|\\(?:boxed|text)\b", "", answer)  # "B.<|im_end|>": the line's end is the response's end
    return re.fullmatch(r"[\W_]*[A-Za-z][\W_]*", bare) is not None


def ur2_stage1(
    trajectory: Trajectory, variant: str = "qwen_7b", retrieval: bool = True, fallback_penalty: float = 0.5
) -> dict[str, float]:
    """R = format + retrieval − fallback: learn to search (UR² eq. 1, appendix C.7). No answer term.

        format     +1 if v = 0, else −v          retrieval   0, 3, 4 for n = 0, 1, ≥ 2 (3B: 0, 5, 7; Llama: 0, 3, 3)
        fallback   −0.5 f (`fallback_penalty` is the 0.5)

    On a prompt without retrieval (`retrieval`, or the trajectory's own flag) only the format counts: +1 or 0.

    >>> ur2_stage1(example("ur2"))             # v = 0, n = 2, f = 1: 1 + 4 − 0.5 = 4.5
    {'format': 1.0, 'retrieval': 4.0, 'fallback': -0.5}
    """
    table = _pick(UR2_RETRIEVAL, variant, "variant")
    if not (retrieval and trajectory.retrieval):
        return {"format": float(not ur2_violations(trajectory)), "retrieval": 0.0, "fallback": 0.0}
    v = len(ur2_violations(trajectory, search_required=True))
    n, f = count_valid_searches(trajectory), count_fallbacks(trajectory)
    return {"format": -float(v) if v else 1.0, "retrieval": table[min(n, 2)], "fallback": 0.0 - fallback_penalty * f}


def ur2_stage2(
    trajectory: Trajectory,
    answer_metric: str = "f1",
    judge: Callable[[Question, str], float] | None = None,
    fallback_penalty: float = 0.5,
) -> dict[str, float]:
    """R = answer + format − fallback: learn to be right (UR² eq. 2, appendix C.7).

        answer     2 · score: the letter (choice), math equality (math), `answer_metric` (open QA; "f1", "em" or "cem")
        format     +1 if v = 0, else 0           fallback    −0.5 f

    The paper gives +2 / 0 for open QA without naming a metric; F1 is what its code pays. `judge(question, answer)`
    grades math answers that are not plainly equal: 2, 1 or 0 for correct, partly, wrong.

    >>> ur2_stage2(example("ur2", answer="Kelmouth, Norland"))   # F1 = 2/3, v = 0, f = 1: 1.3333 + 1 − 0.5 = 1.8333
    {'answer': 1.3333333333333333, 'format': 1.0, 'fallback': -0.5}
    """
    metric = _pick(ANSWER_METRICS, answer_metric, "answer metric")
    return {
        "answer": _ur2_answer(trajectory, metric, judge),
        "format": float(not ur2_violations(trajectory)),
        "fallback": 0.0 - fallback_penalty * count_fallbacks(trajectory),
    }


def _ur2_answer(trajectory: Trajectory, metric: Callable, judge: Callable | None) -> float:
    question, answer = trajectory.question, trajectory.answer
    if not answer:
        return 0.0
    if question.task == "choice":
        letter = choice_letter(answer, question.options)
        return 2.0 * (letter is not None and letter in {choice_letter(gold, question.options) for gold in question.answers})
    if question.task == "math":
        if math_equal(answer, question.answers):
            return 2.0
        return float(judge(question, answer)) if judge else 0.0
    return 2.0 * metric(answer, question.answers)


def ur2_choice(
    trajectory: Trajectory,
    step: int,
    variant: str = "qwen_7b",
    answer_metric: str = "f1",
    judge: Callable[[Question, str], float] | None = None,
    fallback_penalty: float = 0.5,
) -> dict[str, float]:
    """Stage 2 and a search bonus that ends: 0.5 for n = 1, 1 for n ≥ 2, in steps 0 to 9 (3B: 14) (UR² appendix C.7).

    This is the "weak" stage 1 of multiple choice and medicine, where the model mostly knows the answer.

    >>> ur2_choice(example("ur2"), step=0)     # right, v = 0, f = 1, n = 2: 2 + 1 − 0.5 + 1 = 3.5
    {'answer': 2.0, 'format': 1.0, 'fallback': -0.5, 'retrieval': 1.0}
    >>> ur2_choice(example("ur2"), step=10)["retrieval"]
    0.0
    """
    paid = step < _pick(UR2_CHOICE_STEPS, variant, "variant")
    bonus = UR2_CHOICE_BONUS[min(count_valid_searches(trajectory), 2)] if paid else 0.0
    return ur2_stage2(trajectory, answer_metric, judge, fallback_penalty) | {"retrieval": bonus}


# ---------------------------------------------------------------------------------------------------- R1-Searcher

def r1_searcher_format(trajectory: Trajectory) -> list[str]:
    """The names of all format faults; the format is correct if there is none (R1-Searcher section 3.2).

    thinking </think> <answer> at most 10 words </answer>, and nothing else. The prompt ends inside <think>, so the
    response holds one </think> and no <think>; searches belong to the thinking.

    >>> r1_searcher_format(example("r1_searcher", answer="Norland </answer> <answer> Norland"))
    ['several_answers']
    """
    text, (begin, end) = trajectory.model_text, trajectory.protocol.answer_tags
    answers, faults = trajectory.answers, own_format_faults(trajectory)
    thinking, _, rest = text.partition("</think>")
    if text.count("</think>") != 1 or "<think>" in text:
        faults.append("thinking_not_closed_once")
    elif begin in thinking:
        faults.append("answer_in_thinking")
    if len(answers) != 1 or not answers[0] or not tags_pair(text, begin, end):
        faults.append("several_answers" if len(answers) > 1 else "no_answer")
    elif _outside(rest, begin, end):
        faults.append("text_beside_answer")
    if answers and len(answers[-1].split()) > MAX_ANSWER_WORDS:
        faults.append("long_answer")
    return faults


def _outside(rest: str, begin: str, end: str) -> str:
    """What stands behind </think> but in no answer box; an EOS token is nothing."""
    rest = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", "", rest, flags=re.DOTALL)
    return re.sub(r"<\|[^|<>]*\|>\s*$|</s>\s*$", "", rest).strip()


def r1_searcher_stage1(trajectory: Trajectory, answer_metric: str = "none") -> dict[str, float]:
    """R = 0.5 [n ≥ 1] + 0.5 [format]: learn to search, whatever the answer (R1-Searcher eq. 1 and 2).

    answer_metric="cem" is the released code: it adds +1 or −1 by cover-EM.

    >>> r1_searcher_stage1(example("r1_searcher"))               # 0.5 + 0.5 = 1
    {'retrieval': 0.5, 'format': 0.5}
    >>> r1_searcher_stage1(example("r1_searcher", answer="Sudria"), answer_metric="cem")
    {'retrieval': 0.5, 'format': 0.5, 'answer': -1.0}
    """
    reward = {"retrieval": 0.5 * (count_valid_searches(trajectory) >= 1), "format": 0.5 * (not r1_searcher_format(trajectory))}
    return reward if answer_metric == "none" else reward | {"answer": _r1_answer(trajectory, answer_metric)}


def r1_searcher_stage2(trajectory: Trajectory, answer_metric: str = "f1", format_penalty: float = 2.0) -> dict[str, float]:
    """R = F1(answer, gold) + (0 if format else −2): learn to be right (R1-Searcher eq. 3 and 4).

    answer_metric="em" or "cem" pays +1 or −1 instead of F1 (its table 5). format_penalty=1 is the released Llama code.

    >>> r1_searcher_stage2(example("r1_searcher", answer="Kelmouth, Norland"))   # P = 1/2, R = 1: F1 = 2/3
    {'answer': 0.6666666666666666, 'format': 0.0}
    >>> r1_searcher_stage2(example("r1_searcher", answer="<think> Norland"))     # F1 = 2/3 of "think norland", less 2
    {'answer': 0.6666666666666666, 'format': -2.0}
    """
    penalty = float(-format_penalty) if r1_searcher_format(trajectory) else 0.0
    return {"answer": _r1_answer(trajectory, answer_metric), "format": penalty}


def _r1_answer(trajectory: Trajectory, answer_metric: str) -> float:
    score = _pick(ANSWER_METRICS, answer_metric, "answer metric")(trajectory.answer, trajectory.question.answers)
    return score if answer_metric == "f1" else 2.0 * score - 1.0


# ---------------------------------------------------------------------------------------------------------- a look

def example(protocol_name: str, answer: str = "Norland") -> Trajectory:
    """One story in the tags of any protocol: a search, a search that comes back as the fallback, an answer."""
    from prompts import PROTOCOLS, frame_documents  # here, so that importing the rewards does not load torch
    from rollout import trajectory_from_text

    protocol = PROTOCOLS[protocol_name]
    (begin, end), box = protocol.query_tags, protocol.answer_tags
    found = frame_documents(protocol, "Kelmouth is a town in Norland."), frame_documents(protocol, "No fact is asked for.")
    boxed = f"</think> {box[0]} {answer} {box[1]}" if box else f"The answer is \\boxed{{{answer}}}."
    text = f"She was born in Kelmouth.{begin} Kelmouth country {end}{found[0]}{begin} think about it {end}{found[1]}{boxed}"
    question = Question("demo", "In which country was Ana Bell born?", ["Norland"])
    return trajectory_from_text(question, text, protocol, fallbacks=[1])


def main() -> None:
    answer = "Kelmouth, Norland"
    ur2, r1 = example("ur2", answer), example("r1_searcher", answer)
    print(ur2.text, "\n")
    rewards = {
        "UR² stage 1": ur2_stage1(ur2),
        "UR² stage 2": ur2_stage2(ur2),
        "UR² choice": ur2_choice(ur2, step=0),
        "R1-S. stage 1": r1_searcher_stage1(r1),
        "R1-S. stage 2": r1_searcher_stage2(r1),
    }
    print(f"gold: {ur2.question.answers[0]}   n = {count_valid_searches(ur2)}   f = {count_fallbacks(ur2)}")
    faults = ur2_violations(ur2, search_required=True), r1_searcher_format(r1)
    print(f"format faults: UR² {faults[0] or 'none'}, R1-Searcher {faults[1] or 'none'}")
    print("(R1-Searcher reads the same story with </think> <answer> ... </answer> at its end)\n")
    print(f"{'':<10}" + "".join(f"{name:>15}" for name in rewards))
    for component in ("answer", "format", "retrieval", "fallback"):
        cells = [f"{reward[component]:+.3f}" if component in reward else "" for reward in rewards.values()]
        print(f"{component:<10}" + "".join(f"{cell:>15}" for cell in cells))
    print(f"{'reward':<10}" + "".join(f"{sum(reward.values()):>+15.3f}" for reward in rewards.values()))


if __name__ == "__main__":
    run_main(main)

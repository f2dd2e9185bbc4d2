r"""Answer metrics, one function for each. Of the project, this file imports only errors.py.

    exact_match         1 if the normalised prediction equals a normalised gold, else 0
    f1_score            2PR / (P + R),  P = common / predicted tokens,  R = common / gold tokens
    cover_exact_match   1 if the prediction has all gold tokens, at least as often, in any order
    summary_scores      ROUGE: F1 of common words (1), of pairs (2), of the longest subsequence (L)
    choice_letter       the letter of the option that a text chooses
    math_equal          whether two answers are equal as strings, as numbers or by math-verify
    score_answer        em, f1 and cem of an answer, by the metric of its task

`golds` is one gold answer or a list of them; the gold with the best score counts. A missing answer
(None or "") scores 0. There are four normalisations; do not compare scores of different ones:
    "plain"        punctuation becomes a blank: "Spider-Man" is "spider man" (R1-Searcher's eq. 4)
    "space"        as "plain", but the texts "True" and "False" become "yes" and "no" (code of
                   R1-Searcher, UR², ARENA)
    "delete"       ASCII punctuation is removed: "Spider-Man" is "spiderman" (R-Search, Search-R1,
                   When to Search)
    "underscore"   as "delete", but "_" becomes a blank: "x_y-z" is "x yz" (ARENA appendix D.1)
Left out: model judges, and algebra, which math-verify does (an optional dependency).
"""

import importlib.util
import json
import os
import re
import signal
import string
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path

from errors import InputError

# ---------------------------------------------------------------------------------- open answers
_BLANKS = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))  # "_" becomes a blank too
PUNCTUATION = {  # style -> translation table
    "space": _BLANKS,
    "plain": _BLANKS,
    "delete": str.maketrans("", "", string.punctuation),  # keeps ’: O’Hara and O'Hara differ
    "underscore": str.maketrans("_", " ", string.punctuation.replace("_", "")),
}
Golds = str | list[str]


@lru_cache(maxsize=4096)  # the same golds and answers are compared again and again
def normalize_answer(text: str, punctuation: str = "space") -> str:
    """Returns the text in lower case, without punctuation and articles, with single blanks. Under
    "space" the text "True" becomes "yes" and the text "False" becomes "no".

    >>> normalize_answer("The A.B. Smith"), normalize_answer("The A.B. Smith", "delete")
    ('b smith', 'ab smith')
    """
    lowered = text.lower()
    # "true" is replaced only if it is the whole text: otherwise the EM of R1-Searcher's published
    # predictions on HotpotQA would be 58.2, not 58.0 as in its paper.
    if punctuation == "space":
        lowered = {"true": "yes", "false": "no"}.get(lowered, lowered)
    plain = lowered.translate(PUNCTUATION[punctuation])
    words = re.sub(r"\b(a|an|the)\b", " ", plain).split()
    # Trap: the gold "A" would lose its article and become "", which every prediction contains
    # (CEM 1). So a text of which nothing would be left is kept: "A" becomes "a".
    return " ".join(words) or lowered.strip()


def tokenize(text: str) -> list[str]:
    """Splits a text into words for a search index: tokenize("Sao_1, x") is ["sao_1", "x"]."""
    return re.findall(r"\w+", text.lower())


def _as_list(golds: Golds) -> list[str]:
    return [golds] if isinstance(golds, str) else golds


def _best(score, prediction: str | None, golds: Golds, punctuation: str) -> float:
    """Returns the best score over the golds, or 0 if there is no prediction."""
    if not prediction or not prediction.strip():
        return 0.0
    predicted = normalize_answer(prediction, punctuation)
    scores = (score(predicted, normalize_answer(g, punctuation)) for g in _as_list(golds) if g)
    return max(scores, default=0.0)


def exact_match(prediction: str | None, golds: Golds, punctuation="space") -> float:
    """Returns 1 if prediction and gold are equal after normalisation, else 0.

    exact_match("The Beatles!", "Beatles") is 1.
    """
    return _best(lambda p, g: float(p == g), prediction, golds, punctuation)


def f1_score(prediction: str | None, golds: Golds, punctuation="space") -> float:
    """Returns the F1 of two bags of tokens: f1_score("Paris, France", "Paris") is 0.6667 (P = 1/2,
    R = 1). f1_score("yes it is", "yes") is 0.5. HotpotQA's own scorer would give 0, by a special
    rule that none of the papers has.
    """
    return _best(lambda p, g: _bag_f1(p.split(), g.split()), prediction, golds, punctuation)


def _bag_f1(predicted: list, gold: list) -> float:
    common = (Counter(predicted) & Counter(gold)).total()
    return 2 * common / max(1, len(predicted) + len(gold))


def cover_exact_match(prediction: str | None, golds: Golds, punctuation="space") -> float:
    """Returns 1 if the prediction contains every gold token (at least as often as the gold), else
    0: "in Lyon, France" contains "Lyon", but "Parisian" does not contain "Paris".
    """
    return _best(
        lambda p, g: float(Counter(p.split()) >= Counter(g.split())), prediction, golds, punctuation
    )


def summary_scores(prediction: str | None, golds: Golds) -> dict[str, float]:
    """Returns ROUGE-1, ROUGE-2 and ROUGE-L as F1, each against its best gold, and their mean as
    `rouge`. There is no stemming, and articles are kept.

    Worked: "the cat sat down" and "the cat lay down" have 3 of 4 words in common (0.75), 1 of 3
    pairs, "the cat" (0.3333), and the subsequence "the cat down", 3 of 4 words (0.75). The mean is
    0.6111.
    """
    scores = [_rouge(prediction or "", gold) for gold in _as_list(golds)]
    best = [max(column) for column in zip(*scores, strict=True)] or [0.0, 0.0, 0.0]
    return dict(zip(("rouge1", "rouge2", "rougeL", "rouge"), [*best, sum(best) / 3], strict=True))


def _rouge(prediction: str, gold: str) -> tuple[float, float, float]:
    predicted, gold = (re.findall(r"[^\W_]+", text.lower()) for text in (prediction, gold))
    pairs = list(pairwise(predicted))
    gold_pairs = list(pairwise(gold))
    longest = 2 * _common_subsequence(predicted, gold) / max(1, len(predicted) + len(gold))
    return _bag_f1(predicted, gold), _bag_f1(pairs, gold_pairs), longest


def _common_subsequence(left: list[str], right: list[str]) -> int:
    """Returns the length of the longest common subsequence. After each word of `left`, best[j] is
    this length for the words of `left` so far and right[:j].
    """
    best = [0] * (len(right) + 1)
    for word in left:
        previous, best = best, [0]
        for j, other in enumerate(right):
            best.append(previous[j] + 1 if word == other else max(best[j], previous[j + 1]))
    return best[-1]


# ---------------------------------------------------------------------------------- boxes, letters
@dataclass(frozen=True)
class Span:
    """Text in tags or a box: text[start:end] includes these, `content` is the inside, stripped."""

    start: int
    end: int
    content: str


# "\{" and "\}" are characters, not braces. "\\boxed{" (one backslash too many) still opens a box.
_BRACES = re.compile(r"(?P<box>\\boxed\s*\{)|\\(?!\\boxed).|[{}]", re.DOTALL)


def find_boxed(text: str) -> list[Span]:
    r"""Finds every \boxed{...} with balanced braces that is not inside another one. Boxes after one
    that is never closed are found too.
    """
    spans = []
    open_braces = []
    for brace in _BRACES.finditer(text):
        if brace["box"] or brace.group() == "{":
            open_braces.append(brace)
        elif brace.group() == "}" and open_braces:
            begin = open_braces.pop()
            if begin["box"]:
                while spans and spans[-1].start > begin.start():  # a box inside this one
                    spans.pop()
                content = text[begin.end() : brace.start()].strip()
                spans.append(Span(begin.start(), brace.end(), content))
    return spans


def last_boxed(text: str | None) -> str | None:
    r"""Returns the content of the last \boxed{...} or None: r"\boxed{1}, no: \boxed{2}" gives 2."""
    boxed = find_boxed(text or "")
    return boxed[-1].content if boxed else None


_CHOSEN = re.compile(r"correct (?:answer|option|choice) is\s*:?\s*([^\n]*)", re.IGNORECASE)
SPECIAL_TOKEN = r"<\|[^|<>]*\|>|</s>|<eos>"
_WRAPPING = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\b|[{}$*\"'`]")


def choice_letter(text: str | None, options=()) -> str | None:
    r"""Returns the letter of the option that a text chooses, or None. The choice X is read from the
    last "correct answer is X" (or option, choice), else from the last \boxed{X}; else it is the
    whole text. X must be a letter ("b", "(B)"), a capital letter before other text ("B. Oak"; not
    "B or C" or "A tree"), or the text of exactly one option:
    choice_letter("The correct answer is: oak.", ["elm", "Oak"]) is "B".
    """
    text = re.sub(SPECIAL_TOKEN, "", text or "")  # a decoded response ends in its EOS token
    chosen = [last_boxed(text), *_CHOSEN.findall(text)][-1]
    chosen = _WRAPPING.sub("", text if chosen is None else chosen).strip(" :\n")
    chosen = re.sub(r"^(option|choice|letter)\s+", "", chosen, flags=re.IGNORECASE)
    letter = _leading_letter(chosen)
    if letter and not (options and ord(letter) - 65 >= len(options)):
        return letter
    chosen = normalize_answer(chosen)
    normal = [normalize_answer(option) for option in options]
    return chr(65 + normal.index(chosen)) if normal.count(chosen) == 1 else None


def same_choice(text: str | None, golds: Golds, options=()) -> bool:
    """Returns whether a text chooses a gold: same_choice("(B).", "oak", ["elm", "oak"]) is True."""
    letter = choice_letter(text, options)
    return letter is not None and letter in [choice_letter(g, options) for g in _as_list(golds)]


def _leading_letter(text: str) -> str | None:
    if re.fullmatch(r"[\W_]*[A-Za-z][\W_]*", text):
        return re.search("[A-Za-z]", text).group().upper()
    match = re.match(r"\(?([A-Z])\b\)?(.*)", text, re.DOTALL)
    if not match:
        return None
    letter, rest = match.groups()
    if re.match(r"\s*(,|/|&|and\b|or\b)\s*\(?[A-Z]\b", rest):  # "B or C" chooses nothing
        return None
    # "B because ..." is a choice; "A patient ..." and "I think ..." are sentences.
    return None if letter in "AI" and re.match(r"\s+\w", rest) else letter


# ---------------------------------------------------------------------------------- math
MATH_SECONDS = 3.0  # time limit of one comparison by math-verify
MAX_MATH = 500  # characters; a longer prediction is compared as a string
_LOCK = threading.Lock()
_IDLE = []  # holds the worker process while it is idle
# Trap: if a forked process shared the worker, it could read replies to its parent's questions. If
# another thread of the parent held the lock during the fork, the child would wait for it forever.
os.register_at_fork(after_in_child=lambda: globals().update(_LOCK=threading.Lock(), _IDLE=[]))
_print_once = cache(print)

_UNICODE = str.maketrans({"−": "-", "·": r"\cdot ", "√": r"\sqrt ", "²": "^2", "°": r"^\circ "})
_DOLLARS = re.compile(r"\\?\$|\bdollars?\b|(?<!\\)\\[()\[\]]")  # "$", "dollars", and \( \) \[ \]
_GROUPED = re.compile(r"(?<=\d)(?:\{,\}|\\[,!]|,\\!)(?=\d{3}(?!\d))")  # 10{,}000 and 10\,000
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_FRACTION = re.compile(r"^([-+]?)\\[dtc]?frac(?:\{(-?\d+)\}\{(\d+)\}|(\d)(\d))$")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+|\d+/0*[1-9]\d*)")


def math_equal(prediction: str | None, gold: Golds) -> bool:
    r"""Returns whether the prediction and a gold are the same mathematical object.

    >>> math_equal(r"\frac12", "0.5"), math_equal("3,250", "3250"), math_equal("(1,2)", "(2,1)")
    (True, True, False)
    """
    text = str(prediction or "").strip()
    if len(text) > MAX_MATH:
        return text in _as_list(gold)
    left = clean_math(text)
    return bool(left) and any(_same_math(left, clean_math(one)) for one in _as_list(gold))


@lru_cache(maxsize=4096)  # the trajectories of a group often have the same answer
def clean_math(text: str) -> str:
    r"""Removes what surrounds a value (such as boxes and dollar signs) and the commas of thousands:
    clean_math(r"$\boxed{\text{1,000}}$.") is "1000".
    """
    text = _DOLLARS.sub("", text.translate(_UNICODE)).strip()
    text = text.replace("**", "^").replace(r"\%", "%")
    while text.startswith(r"\boxed") and (inner := last_boxed(text)):
        text = inner
    text = " ".join(text.split()).rstrip(". ")
    text = re.sub(r"^\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}$", r"\1", text)
    text = _GROUPED.sub("", text)
    if not re.search(r"[(\[{]", text):  # in brackets 1,000 may be a pair of numbers
        text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    return text


def plain_number(text: str) -> Fraction | None:
    r"""Returns the value of a number or fraction, or None: r"-\frac{1}{2}" is Fraction(-1, 2)."""
    text = _FRACTION.sub(r"\1\2\4/\3\5", text)
    return Fraction(text) if _NUMBER.fullmatch(text) else None


def _same_math(left: str, right: str) -> bool:
    left_word = left.replace(" ", "")
    right_word = right.replace(" ", "")
    if left_word == right_word:
        return True
    if left_word.isalpha() and right_word.isalpha():
        # "Even" equals "even", but the variable x is not X. Trap: math-verify reads a word as a
        # product of letters, so that "on" would equal "no".
        return len(left_word) > 1 and left_word.casefold() == right_word.casefold()
    one_percent = ("%" in left) != ("%" in right)  # 50% equals 50, and by math-verify also 0.5
    if one_percent and _same_math(left.replace("%", ""), right.replace("%", "")):
        return True
    x = plain_number(left)
    y = plain_number(right)
    if y is not None and not re.search(r"[\d\\]", left):
        return False  # `left` has no digit and no LaTeX command, so it is no number
    if x is None or y is None:
        return _math_verify(left, right, gold_is_number=y is not None)
    if x.denominator == y.denominator == 1:  # by the tolerance below, 1000001 would equal 1000000
        return x == y
    return abs(x - y) * 10**6 <= max(abs(x), abs(y))  # 0.333333 equals 1/3


@lru_cache(maxsize=4096)
def _math_verify(prediction: str, gold: str, gold_is_number: bool) -> bool:
    if has_math_verify():
        return ask_worker(prediction, gold)
    if not gold_is_number:
        _print_once(
            "math-verify is missing: answers that are not numbers are compared as strings (pip "
            "install math-verify)",
            file=sys.stderr,
        )
    return False


def has_math_verify() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def ask_worker(prediction: str, gold: str, seconds: float = MATH_SECONDS) -> bool:
    """Asks the worker whether two answers are equal. Returns False if the comparison fails or takes
    longer than `seconds`.
    """
    with _LOCK:
        idle = _IDLE.pop() if _IDLE else None
        worker = idle if idle and idle.poll() is None else start_worker()
        print(json.dumps([prediction, gold, seconds]), file=worker.stdin, flush=True)
        reply = worker.stdout.readline()
        # Trap: in a `finally` this would also run after a Ctrl-C, and the next question would get
        # the late reply to this one.
        if reply:
            _IDLE.append(worker)
    return reply == "True\n"


def start_worker() -> subprocess.Popen:
    """Starts the worker. It is a process, because sympy can run for hours and a thread cannot be
    killed. It gets a session of its own, so that Ctrl-C in the terminal does not reach it.
    """
    command = [sys.executable, "-c", "import metrics; metrics.serve_math()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    folder = Path(__file__).parent
    worker = subprocess.Popen(command, cwd=folder, text=True, start_new_session=True, **pipes)
    if worker.stdout.readline() != "ready\n":
        raise InputError("math-verify does not start: try python -c 'import math_verify'")
    return worker


def serve_math() -> None:
    """Runs the worker: reads lines [prediction, gold, seconds], prints True or False for each."""
    from math_verify import LatexExtractionConfig, parse, verify  # optional dependency

    def expression(text: str) -> list:
        latex = [LatexExtractionConfig()]
        return parse(f"${text}$", latex, extraction_mode="first_match", parsing_timeout=None)

    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # lets the timer kill a forked copy
    # The first comparison imports and builds things that all forked copies below then share.
    verify(expression("x^2-1"), expression("(x-1)(x+1)"), timeout_seconds=None)
    print("ready", flush=True)
    for line in sys.stdin:
        prediction, gold, seconds = json.loads(line)
        if not (child := os.fork()):  # fork, because a new interpreter takes a second to start
            signal.setitimer(signal.ITIMER_REAL, seconds)
            same = verify(expression(gold), expression(prediction), timeout_seconds=None)
            os._exit(not same)
        print(os.waitpid(child, 0)[1] == 0, flush=True)


def score_answer(prediction, golds: Golds, task="qa", options=(), punctuation="space") -> dict:
    """Returns em, f1 and cem. For math and choices all three are the same 0 or 1, for a summary the
    mean ROUGE.
    """
    if task == "math":
        score = float(math_equal(prediction, golds))
    elif task == "summary":
        score = summary_scores(prediction, golds)["rouge"]
    elif task == "choice":
        score = float(same_choice(prediction, golds, options))
    else:
        metrics = {"em": exact_match, "f1": f1_score, "cem": cover_exact_match}
        return {name: metric(prediction, golds, punctuation) for name, metric in metrics.items()}
    return {"em": score, "f1": score, "cem": score}

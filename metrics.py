r"""Answer metrics, one function for each.

    exact_match         1 if the normalised prediction equals a normalised gold, else 0
    f1_score            2PR / (P + R),  P = common / predicted tokens,  R = common / gold tokens
    cover_exact_match   1 if the prediction has all gold tokens, at least as often, in any order
    summary_scores      ROUGE: F1 of common words (1), of pairs (2), of the longest subsequence (L)
    choice_letter       the letter of the option that a text chooses
    math_equal          whether two answers are equal as strings, as numbers or by math-verify
    score_answer        em, f1 and cem of an answer, by the metric of its task

`golds` is one gold answer or a list of them; the gold with the best score counts. A missing answer
(None or "") scores 0. There are five normalisations; do not compare scores of different ones:
    "plain"        punctuation becomes a blank: "Spider-Man" is "spider man" (R1-Searcher's eq. 4)
    "space"        as "plain", but the texts "true" and "false", in any case, become "yes" and "no"
                   (code of R1-Searcher, ARENA)
    "hotpotqa"     as "space", and F1 is 0 if one text is yes, no or noanswer and the other differs
                   (UR²'s code; of HotpotQA's scorer it has only this rule)
    "delete"       ASCII punctuation is removed: "Spider-Man" is "spiderman" (R-Search, Search-R1,
                   When to Search)
    "underscore"   as "delete", but "_" becomes a blank: "x_y-z" is "x yz" (ARENA appendix D.1)
Left out: model judges; algebra and ROUGE, which the packages math-verify and rouge-score do (the
extras `math` and `rouge`).
"""

import importlib.util
import re
import signal
import string
import unicodedata
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache

from errors import say_once

# ---------------------------------------------------------------------------------- open answers
_BLANKS = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))  # "_" becomes a blank too
PUNCTUATION = {  # style -> translation table
    "space": _BLANKS,
    "hotpotqa": _BLANKS,
    "plain": _BLANKS,
    "delete": str.maketrans("", "", string.punctuation),  # keeps ’: O’Hara and O'Hara differ
    "underscore": str.maketrans("_", " ", string.punctuation.replace("_", "")),
}
Golds = str | list[str]


@lru_cache(maxsize=4096)  # the same golds and answers are compared again and again
def normalize_answer(text: str, punctuation: str = "space") -> str:
    """Returns the text in lower case, without punctuation and articles, with single blanks. Under
    "space" and "hotpotqa" the text "true" becomes "yes" and the text "false" becomes "no".

    >>> normalize_answer("The A.B. Smith"), normalize_answer("The A.B. Smith", "delete")
    ('b smith', 'ab smith')
    """
    lowered = text.lower()
    # "true" is replaced only if it is the whole text: otherwise the EM of R1-Searcher's published
    # predictions on HotpotQA would be 58.2, not 58.0 as in its paper.
    if punctuation in ("space", "hotpotqa"):
        lowered = {"true": "yes", "false": "no"}.get(lowered, lowered)
    plain = lowered.translate(PUNCTUATION[punctuation])
    words = re.sub(r"\b(a|an|the)\b", " ", plain).split()
    # Trap: the gold "A" would lose its article and become "", which every prediction contains
    # (CEM 1). So a text of which nothing would be left is kept: "A" becomes "a".
    return " ".join(words) or lowered.strip()


# Scripts without blanks between words: Thai, Lao, Burmese, Khmer; Japanese and Chinese. Punctuation
# is left out, vowel signs are not.
_UNSPACED = (
    r"\u0e01-\u0e3a\u0e40-\u0e4e\u0e50-\u0e59\u0e81-\u0edf\u1000-\u1049\u1050-\u109d"
    r"\u1780-\u17d3\u17d7\u17e0-\u17e9\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa"
    r"\u30fc-\u312f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
    r"\U00020000-\U0003ffff"
)
_RUN = re.compile(f"[{_UNSPACED}]")
# At each character U: the pair that begins there, or a single U; else a word of another script.
_TERMS = r"(?=([U]{2}|(?<![U])[U]|[^\WU]+))(?:[U]|[^\WU]+)".replace("U", _UNSPACED)
_PIECES = r"\s*(?:[U]{1,2}|[^\sU]+)".replace("U", _UNSPACED)


def tokenize(text: str) -> list[str]:
    """Splits a text into words for a search index: tokenize("Sao_1, x") is ["sao_1", "x"]. Scripts
    without blanks give the pairs of neighbouring characters: tokenize("東京都 x") is ["東京",
    "京都", "x"]. A letter and its accent become one character (NFC).
    """
    text = text.lower()
    if text.isascii() or not _RUN.search(text := unicodedata.normalize("NFC", text)):
        return re.findall(r"\w+", text)
    return re.findall(_TERMS, text)


def stretches(text: str, words: int, step: int) -> list[str]:
    """Returns the parts of `words` words that begin `step` words apart: stretches("a b c", 2, 1) is
    ["a b", "b c", "c"]. In scripts without blanks, two characters count as a word.
    """
    pieces = re.findall(_PIECES, text)
    parts = ("".join(pieces[n : n + words]) for n in range(0, len(pieces), step))
    return [" ".join(part.split()) for part in parts]


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
    R = 1). f1_score("yes it is", "yes") is 0.5, but 0 with "hotpotqa": there no text but itself
    shares anything with yes, no or noanswer.
    """

    def f1(predicted: str, gold: str) -> float:
        ruled = punctuation == "hotpotqa" and predicted != gold
        if ruled and {predicted, gold} & {"yes", "no", "noanswer"}:
            return 0.0
        predicted, gold = predicted.split(), gold.split()
        common = (Counter(predicted) & Counter(gold)).total()
        return 2 * common / max(1, len(predicted) + len(gold))

    return _best(f1, prediction, golds, punctuation)


def cover_exact_match(prediction: str | None, golds: Golds, punctuation="space") -> float:
    """Returns 1 if the prediction contains every gold token (at least as often as the gold), else
    0: "in Lyon, France" contains "Lyon", but "Parisian" does not contain "Paris".
    """
    return _best(
        lambda p, g: float(Counter(p.split()) >= Counter(g.split())), prediction, golds, punctuation
    )


@cache
def _rouge_scorer():
    from rouge_score.rouge_scorer import RougeScorer  # the extra `rouge`

    return RougeScorer(["rouge1", "rouge2", "rougeL"])


def summary_scores(prediction: str | None, golds: Golds) -> dict[str, float]:
    """Returns ROUGE-1, ROUGE-2 and ROUGE-L as F1, each against its best gold, and their mean as
    `rouge`. There is no stemming, and articles are kept.

    Worked: "the cat sat down" and "the cat lay down" have 3 of 4 words in common (0.75), 1 of 3
    pairs, "the cat" (0.3333), and the subsequence "the cat down", 3 of 4 words (0.75). The mean is
    0.6111.
    """
    scores = _rouge_scorer().score_multi(_as_list(golds), prediction or "")
    numbers = {name: score.fmeasure for name, score in scores.items()}
    return numbers | {"rouge": sum(numbers.values()) / 3}


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
# As Qwen, DeepSeek (wide bars), Llama and Gemma write them
SPECIAL_TOKEN = r"<[|｜][^|｜<>]*[|｜]>|</s>|<eos>|<end_of_turn>"
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
MATH_SECONDS = 3  # time limit of math-verify for each step of a comparison
MAX_MATH = 500  # characters; a longer prediction is compared as a string

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
        return _math_verify(left, right)
    if x.denominator == y.denominator == 1:  # by the tolerance below, 1000001 would equal 1000000
        return x == y
    return abs(x - y) * 10**6 <= max(abs(x), abs(y))  # 0.333333 equals 1/3


def has_math_verify() -> bool:
    return importlib.util.find_spec("math_verify") is not None


@lru_cache(maxsize=4096)
def _math_verify(prediction: str, gold: str) -> bool:
    """Asks math-verify, which gives up after MATH_SECONDS: sympy would need hours for some answers.
    Its alarm works only in the main thread. It rings once, and what it raises can get lost (in a
    callback of the garbage collector); so another one follows, which repeats until it is heard.
    """
    if not has_math_verify():
        say_once(
            "math-verify is missing: answers that are not numbers are compared as strings (pip "
            "install math-verify)"
        )
        return False
    from math_verify import LatexExtractionConfig, parse, verify  # the extra `math`

    before = signal.signal(signal.SIGVTALRM, _ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, 5 * MATH_SECONDS, 0.1)  # seconds of CPU time
    try:
        expressions = [
            parse(
                f"${text}$",
                [LatexExtractionConfig()],
                extraction_mode="first_match",
                parsing_timeout=MATH_SECONDS,
            )
            for text in (gold, prediction)
        ]
        return verify(*expressions, timeout_seconds=MATH_SECONDS)
    except Endless:
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Endless(BaseException):
    """Ends a comparison. It is no Exception, because sympy catches those."""


def _ring(*_):
    raise Endless


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

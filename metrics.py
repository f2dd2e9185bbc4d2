r"""Does this answer match? One function per answer metric, and nothing of the project below it.

    exact_match         1 if the normalised prediction equals a normalised gold, else 0
    f1_score            2PR / (P + R),  P = common tokens / predicted tokens,  R = common tokens /
                        gold tokens
    cover_exact_match   1 if every gold token stands in the prediction (as a bag: "France Lyon"
                        covers "Lyon, France")
    math_equal          same string, else same number, else same expression (the last needs sympy)
    choice_letter       the one option that a text chooses
    rouge               F1 of common words (1), common pairs of neighbours (2), the longest common
                        subsequence (L)
    score_answer        em, f1 and cem of an answer under the metric of its task

`golds` is one gold or a list; the best one counts. A missing answer (None or "") scores 0. Left
out: model judges.

Two normalisations are in use, and numbers under one cannot be compared with numbers under the
other:
    "space"    punctuation becomes a blank: "Spider-Man" is "spider man"    (R1-Searcher, UR²,
               ARENA)
    "delete"   punctuation is removed: "Spider-Man" is "spiderman"          (SQuAD-style: R-Search,
               When to Search)
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import operator
import queue
import re
import string
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

# ------------------------------------------------------------------------------------- open answers

_TO_SPACE = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))  # "_" is punctuation too
_TO_NOTHING = str.maketrans(
    "", "", string.punctuation
)  # ASCII only: in this style O’Hara is not O'Hara
_VERDICTS = {"yes", "no", "noanswer"}


def tokenize(text: str) -> list[str]:
    """The words of a text, as retrieval counts them."""
    return re.findall(r"\w+", text.lower())


def normalize_answer(text: str, punctuation: str = "space") -> str:
    """Lower case, no punctuation, no articles, single blanks; in the "space" style True and False
    are yes and no.

    >>> normalize_answer("The A.B. Smith"), normalize_answer("The A.B. Smith", "delete"), normalize_answer("True")
    ('b smith', 'ab smith', 'yes')
    """
    if punctuation not in ("space", "delete"):
        raise ValueError(f"punctuation is 'space' or 'delete', not {punctuation!r}")
    lowered = text.lower()
    if (
        punctuation == "space"
    ):  # the whole text, blanks included: read " False " as no and a published 58.0 becomes 58.2
        lowered = {"true": "yes", "false": "no"}.get(lowered, lowered)
    plain = lowered.translate(_TO_SPACE if punctuation == "space" else _TO_NOTHING)
    words = re.sub(r"\b(a|an|the)\b", " ", plain).split()
    # Trap: "A" and "The The" would become "", which equals "." and is covered by every prediction.
    # They stay as they are.
    return " ".join(words) or lowered.strip()


def _best(score, prediction: str | None, golds: str | list[str], punctuation: str) -> float:
    """The best score over the golds; 0 without a prediction."""
    if not prediction or not prediction.strip():
        return 0.0
    golds = [golds] if isinstance(golds, str) else golds
    normal = normalize_answer(prediction, punctuation)
    return max(
        (score(normal, normalize_answer(gold, punctuation)) for gold in golds if gold), default=0.0
    )


def exact_match(
    prediction: str | None, golds: str | list[str], punctuation: str = "space"
) -> float:
    """1 if prediction and gold are the same after normalisation.

    >>> exact_match("The Beatles!", ["Beatles"])
    1.0
    """
    return _best(lambda p, g: float(p == g), prediction, golds, punctuation)


def f1_score(prediction: str | None, golds: str | list[str], punctuation: str = "space") -> float:
    """F1 of the two bags of tokens. A yes/no question is all or nothing: "yes it is" against "yes"
    is 0.

    >>> round(f1_score("Paris, France", "Paris"), 4)       # P = 1/2, R = 1
    0.6667
    """
    return _best(_f1, prediction, golds, punctuation)


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and (prediction in _VERDICTS or gold in _VERDICTS):
        return 0.0
    predicted, wanted = Counter(prediction.split()), Counter(gold.split())
    common = (predicted & wanted).total()
    # 2PR / (P + R) with P = common / |predicted| and R = common / |wanted|
    return 2 * common / (predicted.total() + wanted.total())


def cover_exact_match(
    prediction: str | None, golds: str | list[str], punctuation: str = "space"
) -> float:
    """1 if the prediction holds every gold token. Tokens, not a substring: "Parisian" does not
    cover "Paris".

    >>> cover_exact_match("no, they are not", "no"), cover_exact_match("Parisian", "Paris")
    (1.0, 0.0)
    """
    return _best(
        lambda p, g: float(not Counter(g.split()) - Counter(p.split())),
        prediction,
        golds,
        punctuation,
    )


# ---------------------------------------------------------------------------------------- summaries


def rouge(prediction: str | None, golds: str | list[str]) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L as F1, each against its best gold. Lower-case words, no
    stemming, articles kept.

        P = common / predicted,  R = common / gold,  F1 = 2PR / (P + R) = 2 · common / (predicted +
        gold)

    "the cat sat down" against "the cat lay down": words 3 of 4 and 4 (0.75); pairs "the cat" of 3
    and 3 (0.3333); the longest common subsequence "the cat down" is 3 of 4 and 4 (0.75).

    >>> {name: round(score, 4) for name, score in rouge("The cat sat down.", "the cat lay down").items()}
    {'rouge1': 0.75, 'rouge2': 0.3333, 'rougeL': 0.75}
    """
    golds = [golds] if isinstance(golds, str) else golds
    scores = [_rouge(_words(prediction or ""), _words(gold)) for gold in golds]
    return {
        name: max((score[name] for score in scores), default=0.0)
        for name in ("rouge1", "rouge2", "rougeL")
    }


def summary_scores(prediction: str | None, golds: str | list[str]) -> dict[str, float]:
    """The three, and as `rouge` their mean: in place of em, f1 and cem, as no summary is equal to
    its reference.
    """
    return {**rouge(prediction, golds), "rouge": mean_rouge(prediction, golds)}


def mean_rouge(prediction: str | None, golds: str | list[str]) -> float:
    """The mean of the three: what ARENA pays for a summary.

    >>> round(mean_rouge("The cat sat down.", "the cat lay down"), 4)     # (0.75 + 0.3333 + 0.75) / 3
    0.6111
    """
    scores = rouge(prediction, golds).values()
    return sum(scores) / len(scores)


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _rouge(predicted: list[str], gold: list[str]) -> dict[str, float]:
    pairs, gold_pairs = list(pairwise(predicted)), list(pairwise(gold))
    return {
        "rouge1": _overlap_f1(
            (Counter(predicted) & Counter(gold)).total(), len(predicted), len(gold)
        ),
        "rouge2": _overlap_f1(
            (Counter(pairs) & Counter(gold_pairs)).total(), len(pairs), len(gold_pairs)
        ),
        "rougeL": _overlap_f1(_common_subsequence(predicted, gold), len(predicted), len(gold)),
    }


def _overlap_f1(common: int, predicted: int, gold: int) -> float:
    return 2 * common / (predicted + gold) if common else 0.0


def _common_subsequence(left: list[str], right: list[str]) -> int:
    """Length of the longest common subsequence: row by row, best[j] for the left words so far and
    right[:j].
    """
    best = [0] * (len(right) + 1)
    for word in left:
        previous = best
        best = [0]
        for j, other in enumerate(right):
            best.append(previous[j] + 1 if word == other else max(best[j], previous[j + 1]))
    return best[-1]


# -------------------------------------------------------------------------------- boxes and letters


@dataclass(frozen=True)
class Span:
    """A piece of text with its place: text[start:end] includes the tags, `content` is what stands
    between them.
    """

    start: int
    end: int
    content: str


# "\{" and "\}" are characters of an answer, not braces; "\\boxed{" (escaped once too often) is a
# \boxed{ all the same.
_BRACES = re.compile(r"(?P<box>\\boxed\s*\{)|\\(?!\\boxed).|[{}]", re.DOTALL)


def find_boxed(text: str) -> list[Span]:
    r"""Every \boxed{...} with balanced braces. find_boxed(r"\boxed{\frac{1}{2}}")[0].content ==
    r"\frac{1}{2}".

    One that is never closed is no answer and hides no other; of boxes inside each other the
    outermost counts.
    """
    spans: list[Span] = []
    open_braces: list[re.Match] = []
    for brace in _BRACES.finditer(text):
        if brace.group() == "}":
            begin = open_braces.pop() if open_braces else None
            if begin and begin["box"]:
                while spans and spans[-1].start > begin.start():  # a box inside this one
                    spans.pop()
                spans.append(
                    Span(begin.start(), brace.end(), text[begin.end() : brace.start()].strip())
                )
        elif brace["box"] or brace.group() == "{":
            open_braces.append(brace)
    return spans


def last_boxed(text: str | None) -> str | None:
    r"""Content of the last \boxed{...}; None if there is none.

    >>> last_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    boxed = find_boxed(text or "")
    return boxed[-1].content if boxed else None


_SAID = re.compile(r"correct (?:answer|option|choice) is\s*:?\s*([^\n]*)", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]*\|>|</s>")
_WRAPPING = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\b|[{}$*\"'`]")


def choice_letter(text: str | None, options=()) -> str | None:
    r"""The letter that a text chooses: the last "the correct answer is X", else \boxed{X}, else the
    text itself.

    X is a letter ("B", "(B)", "B. Oak") or the whole text of exactly one option; two letters or
    none: None.

    >>> choice_letter("The correct answer is: (B)."), choice_letter("oak", ["elm", "Oak"])
    ('B', 'B')
    >>> choice_letter("The correct answer is both of them", ["elm", "oak"]) is None
    True
    """
    text = _SPECIAL_TOKEN.sub("", text or "")  # a decoded response ends in its EOS token
    said = _SAID.findall(text)
    chosen = said[-1] if said else last_boxed(text)
    chosen = _WRAPPING.sub("", text if chosen is None else chosen).strip(" :\n")
    chosen = re.sub(r"^(option|choice|letter)\s+", "", chosen, flags=re.IGNORECASE)
    same = [
        chr(65 + i)
        for i, option in enumerate(options)
        if normalize_answer(option) == normalize_answer(chosen)
    ]
    letter = _leading_letter(chosen)
    if letter and options and ord(letter) - 65 >= len(options):
        letter = None
    return letter or (same[0] if len(same) == 1 else None)


def same_choice(text: str | None, golds: str | list[str], options=()) -> bool:
    """Does a text choose the letter that one of the golds names?

    >>> same_choice("The correct answer is (B).", ["oak"], ["elm", "oak"]), same_choice("both", "B", ["elm", "oak"])
    (True, False)
    """
    golds, letter = [golds] if isinstance(golds, str) else golds, choice_letter(text, options)
    return letter is not None and letter in {choice_letter(gold, options) for gold in golds}


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


# --------------------------------------------------------------------------------------------- math

SYMBOLIC_SECONDS = 3.0  # per comparison
MAX_MATH = 2000  # characters; a longer answer is compared as a string
_TOLERANCE = (
    1e-6  # relative; for decimals of numbers that have no finite one. Two integers must be equal.
)

_GREEK = {
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "theta",
    "lambda",
    "mu",
    "phi",
    "varphi",
    "rho",
    "sigma",
    "omega",
}
_FUNCTIONS = {
    "sqrt": math.sqrt,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "ln": math.log,
    "exp": math.exp,
}
_CONSTANTS = {"pi": math.pi, "e": math.e, "oo": math.inf}
_UNIT_WORDS = (
    r"(?:square |cubic"
    r" )?(?:units?|cm|mm|km|m|kg|g|inch(?:es)?|feet|foot|ft|yards?|miles?|mph|met(?:er|re)s?|grams?"
    r"|seconds?|minutes?|hours?|days?|weeks?|months?|years?|degrees?|dollars?|cents?|lit(?:er|re)s?)(?:\^?[23])?"
)
_REWRITES = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\boxed\{(.*)\}$", r"\1"),
        (
            r"\\(?:left|right|displaystyle|limits|Bigl?|Bigr?|bigl?|bigr?)(?![A-Za-z])|(?<!\\)\\[!,;:]|~|\\?\$",
            "",
        ),
        (r"(?<!\\)\\ |\\q?quad(?![a-z])", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\^\{?\\circ\}?|\\degree|°", ""),
        (r"\\?%|\\text\{\s*percent\s*\}|\bpercent\b", "%"),
        (r"\{,\}", ","),
        (r"\\(?:text|mathrm|mbox)\{\s*(?:and|or)\s*\}|\b(?:and|or)\b", ","),
        (
            r"(?<=[\w}\)])\s*\\(?:text|mathrm|mbox|textrm)\{[^{}]*\}(?:\^\{?[23]\}?)?$",
            "",
        ),  # a unit behind a value
        (r"\\(?:text|mathrm|mbox|textrm|textbf|mathbf|operatorname)\{([^{}]*)\}", r"\1"),
        (rf"(?<=\d)\s*{_UNIT_WORDS}$", ""),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
        (r"^[A-Za-z]\s*\\in(?![a-z])\s*", ""),
        (r"^\(([A-Z])\)$", r"\1"),  # \text{(B)}
    )
]
_UNICODE = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": "*",
        "·": "*",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "∪": r"\cup ",
        "²": "^2",
        "³": "^3",
        "√": r"\sqrt ",
    }
)


def math_equal(prediction: str | None, gold: str | list[str]) -> bool:
    r"""Do two answers name the same mathematical object? Same string, else same number, else (with
    sympy) same expression.

    >>> math_equal(r"\frac12", "0.5"), math_equal("x = 3,250", "3250"), math_equal(r"50\%", "0.5"), math_equal("(1,2)", "(2,1)")
    (True, True, True, False)
    """
    if prediction is None or not str(prediction).strip():
        return False
    golds = [gold] if isinstance(gold, str) else gold
    if len(str(prediction)) > MAX_MATH:
        return str(prediction) in golds
    try:
        return any(_same(normalize_math(str(prediction)), normalize_math(str(g))) for g in golds)
    except RecursionError:  # a model can write a thousand brackets
        return False


def normalize_math(text: str) -> str:
    r"""One spelling for what is written in many: \dfrac, \left, units, currency, degrees, "1,000",
    a closing full stop.
    """
    text = " ".join(text.translate(_UNICODE).split()).rstrip(". ")
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text).strip()
    if not re.search(r"[(\[{]", text):  # in brackets 1,000 is a pair
        text = re.sub(
            r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])",
            lambda match: match.group().replace(",", ""),
            text,
        )
    return text


def _same(left: str, right: str) -> bool:
    solid, other_solid = left.replace(" ", ""), right.replace(" ", "")
    if solid == other_solid:
        return True
    if (
        len(solid) > 1 and solid.isalpha() and solid.casefold() == other_solid.casefold()
    ):  # "Even" is "even"; x is not X
        return True
    (kind, parts), (other_kind, other_parts) = _split(left), _split(right)
    if kind or other_kind:
        return kind == other_kind and _same_parts(kind, parts, other_parts)
    if "=" in left or "=" in right:
        return _same_equation(left, right)
    return _same_value(left, right)


def _split(text: str) -> tuple[str, list[str]]:
    """(kind, parts): a tuple "()", an interval "(]", a set "{}", a matrix, a bare list ",", a union
    "U", or none of them "".
    """
    if matrix := re.fullmatch(r"\\begin\{[pbv]?matrix\}(.*)\\end\{[pbv]?matrix\}", text, re.DOTALL):
        rows = [row.split("&") for row in re.split(r"\\\\", matrix.group(1)) if row.strip()]
        return f"matrix{[len(row) for row in rows]}", [cell.strip() for row in rows for cell in row]
    if r"\pm" in text:
        return ",", [text.replace(r"\pm", "+"), text.replace(r"\pm", "-")]
    if len(pieces := _split_outside(text, r"\\cup(?![a-z])")) > 1:
        return "U", pieces
    if len(pieces := _split_outside(text, ",")) > 1:
        return ",", pieces
    inner = text.replace(r"\{", "{").replace(r"\}", "}")
    if len(inner) > 1 and inner[0] in "([{" and inner[-1] in ")]}":
        pieces = _split_outside(inner[1:-1], ",")
        if len(pieces) > 1 or inner[0] == "{":
            return inner[0] + inner[-1], pieces
    return "", []


def _split_outside(text: str, separator: str) -> list[str]:
    """Split where no bracket is open."""
    pieces, start, depth = [], 0, 0
    for match in re.finditer(rf"{separator}|[(\[{{]|[)\]}}]", text):
        if match.group() in "([{":
            depth += 1
        elif match.group() in ")]}":
            depth -= 1
        elif depth == 0:
            pieces.append(text[start : match.start()].strip())
            start = match.end()
    return [*pieces, text[start:].strip()]


def _same_parts(kind: str, parts: list[str], other_parts: list[str]) -> bool:
    if len(parts) != len(other_parts):
        return False
    if kind not in (",", "{}", "U"):
        return all(map(_same, parts, other_parts))
    left = list(other_parts)  # the order of a set, of roots in a list, of a union means nothing
    for part in parts:
        found = next((other for other in left if _same(part, other)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _same_equation(left: str, right: str) -> bool:
    """ "x = 5" is 5; two equations are the same if lhs − rhs is, up to its sign."""
    (name, _, value), (other_name, _, other_value) = left.partition("="), right.partition("=")
    name, other_name, value, other_value = (
        piece.strip() for piece in (name, other_name, value, other_value)
    )
    if not value or not other_value:  # one of them is no equation
        named = re.fullmatch(r"\\?[A-Za-z]\w{0,6}(?:\([A-Za-z]\))?", name if value else other_name)
        return bool(named) and _same(value or name, other_value or other_name)
    if name == other_name:
        return _same(value, other_value)
    difference, other = f"({name})-({value})", f"({other_name})-({other_value})"
    return _same_value(difference, other) or _same_value(difference, f"-({other})")


def _same_value(left: str, right: str) -> bool:
    expressions = to_expression(left.replace("%", "")), to_expression(right.replace("%", ""))
    if None in expressions:
        return False
    x, y = map(evaluate, expressions)
    if x is None or y is None:
        return symbolic_equal(*expressions)
    if ("%" in left) != ("%" in right) and _same_number(
        x / 100 if "%" in left else x, y / 100 if "%" in right else y
    ):
        return True
    return _same_number(x, y)


def _same_number(x: Fraction | float, y: Fraction | float) -> bool:
    if isinstance(x, Fraction) and isinstance(y, Fraction) and x.denominator == y.denominator == 1:
        return x == y  # 1000000 and 1000001 are within any tolerance
    return math.isclose(x, y, rel_tol=_TOLERANCE, abs_tol=1e-12)


def to_expression(text: str) -> str | None:
    r"""LaTeX or plain notation as a Python expression of numbers, known names and single letters;
    None if it is none.

    Only these tokens get through, so that the text, which a model wrote, may be parsed and handed
    to sympy.

    >>> to_expression(r"2x\sqrt{\frac{1}{3}}")
    '2*x*sqrt(((1)/(3)))'
    """
    if len(text) > 300 or re.fullmatch(r"[A-Za-z]{2,}", text):  # a word is compared as a word
        return None
    text = re.sub(
        r"(?<![\w.}])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", r"(\1+(\2)/(\3))", text
    )  # mixed number: 1\frac{1}{2}
    before = None
    while before != text:  # innermost braces first
        before = text
        text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\sqrt\s*\[([^][{}]*)\]\s*\{([^{}]*)\}", r"((\2)^(1/(\1)))", text)
        text = re.sub(r"\\sqrt\s*\{([^{}]*)\}", r" sqrt(\1)", text)
        text = re.sub(r"\^\s*\{([^{}]*)\}", r"^(\1)", text)
    text = (
        re.sub(r"\\(?:cdot|times)(?![a-z])", "*", text)
        .replace(r"\div", "/")
        .replace(r"\infty", " oo ")
    )
    text = re.sub(r"\\([a-z]+)", r" \1 ", text).replace("**", "^")
    tokens = re.findall(r"\d+\.?\d*|\.\d+|[A-Za-z]+|[-+*/^()]|\S", text)
    return _join_tokens(tokens)


def _join_tokens(tokens: list[str]) -> str | None:
    """The tokens as one expression, with "*" where a product is only implied; None if one of them
    is unknown.
    """
    known = {*_FUNCTIONS, *_CONSTANTS, *_GREEK}
    pieces: list[str] = []
    for token in tokens:
        if token in known or re.fullmatch(r"\d+\.?\d*|\.\d+|[-+*/^()]", token):
            pieces.append(re.sub(r"^0+(?=\d)", "", token))  # Python does not read 05
        elif re.fullmatch(r"[A-Za-z]{1,3}", token):
            pieces += token  # xy is x times y
        else:
            return None
    joined, previous = "", "("
    for token in pieces:
        product = previous not in "+-*/^(" and token not in "+-*/^)"
        if previous in _FUNCTIONS:
            product = False
            if token != "(":  # "sin x y" can be read in two ways
                return None
        if product and token[0] in "0123456789." and previous != ")":  # so can "2 3"
            return None
        joined += ("*" if product else "") + token.replace("^", "**")
        previous = token
    return joined


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def evaluate(expression: str) -> Fraction | float | None:
    """The value of an expression without letters, exact where it is rational; None if it has
    none.
    """
    try:
        value = _value(ast.parse(expression, mode="eval").body, expression)
        return None if isinstance(value, complex) or value != value else value
    except (
        SyntaxError,
        ValueError,
        TypeError,
        ArithmeticError,
        KeyError,
        RecursionError,
        MemoryError,
    ):
        return None


def _value(node: ast.AST, source: str) -> Fraction | float:
    if isinstance(node, ast.Constant):
        return Fraction(ast.get_source_segment(source, node))  # from its text: 0.1 is 1/10
    if isinstance(node, ast.Name):
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Call):
        return _FUNCTIONS[node.func.id](_value(node.args[0], source))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, source))
    if not isinstance(node, ast.BinOp):
        raise ValueError("no number")
    left, right = _value(node.left, source), _value(node.right, source)
    if isinstance(node.op, ast.Pow):
        # Trap: an exact power of a power never ends. A float overflows, and that is an answer.
        exact = (
            isinstance(right, Fraction)
            and right.denominator == 1
            and abs(right) <= 64
            and abs(left) < 1e6
        )
        return left**right if exact else float(left) ** float(right)
    return _OPERATORS[type(node.op)](left, right)


# --------------------------------------------------------------------------------------- any answer


def score_answer(
    prediction: str | None,
    golds: list[str],
    task: str = "qa",
    options=(),
    punctuation: str = "space",
) -> dict:
    r"""em, f1 and cem of one answer. A math or choice answer that is right counts 1 under each, a
    summary has its mean ROUGE.

    >>> score_answer("Kelmouth, Norland", ["Kelmouth"])["cem"], score_answer("0.5", [r"\frac12"], "math")["em"]
    (1.0, 1.0)
    """
    names = ("em", "f1", "cem")
    if task == "math":
        return dict.fromkeys(names, float(math_equal(prediction, golds)))
    if task == "summary":
        return dict.fromkeys(names, mean_rouge(prediction, golds))
    if task == "choice":
        return dict.fromkeys(names, float(same_choice(prediction, golds, options)))
    metrics = (exact_match, f1_score, cover_exact_match)
    return {
        name: float(metric(prediction, golds, punctuation))
        for name, metric in zip(names, metrics, strict=True)
    }


# -------------------------------------------------------------------------------- symbolic equality


def has_sympy() -> bool:
    return importlib.util.find_spec("sympy") is not None


@lru_cache(maxsize=4096)  # the trajectories of a group repeat their answers
def symbolic_equal(left: str, right: str) -> bool:
    """Is left − right zero? Asked of sympy in a process of its own; False without sympy or after
    SYMBOLIC_SECONDS.

    A process, because simplify can run for hours, a signal works on the main thread only, and a
    thread cannot be killed.
    """
    if re.search(
        r"\*\*\(*-?\d{5,}", left + " " + right
    ):  # x**99999: sympy would need its whole time to give up
        return False
    return has_sympy() and _WORKER.ask(left, right, SYMBOLIC_SECONDS)


class SymbolicWorker:
    """One sympy process, started at the first question, killed and started again when it takes too
    long.
    """

    def __init__(self):
        self.process, self.lock = None, threading.Lock()

    def ask(self, left: str, right: str, seconds: float) -> bool:
        with self.lock:
            try:
                if self.process is None:
                    self._start()
                self.process.stdin.write(json.dumps([left, right]) + "\n")
                self.process.stdin.flush()
                return self.replies.get(timeout=seconds) == "True"
            except (queue.Empty, OSError):
                self.stop()
                return False

    def _start(self) -> None:
        command = [sys.executable, "-c", "import metrics; metrics.serve_symbolic()"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, cwd=Path(__file__).parent, text=True, **pipes)
        self.replies = queue.Queue()
        threading.Thread(
            target=_pump, args=(self.process.stdout, self.replies), daemon=True
        ).start()
        if (
            self.replies.get(timeout=60) != "ready"
        ):  # the import takes a second, more on a busy machine
            raise OSError("the sympy process did not start")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process = None


def _pump(lines, replies: queue.Queue) -> None:
    for line in lines:
        replies.put(line.strip())
    replies.put("")  # the process has ended: nobody needs to wait for it
    lines.close()


_WORKER = SymbolicWorker()


def serve_symbolic() -> None:
    """The other side: one JSON pair of expressions per line in, True or False out, until stdin
    closes.
    """
    import sympy

    print("ready", flush=True)
    for line in sys.stdin:
        try:
            # Every name is given: sympify would read N, S, O, Q as its own functions.
            names = {name: sympy.Symbol(name) for name in re.findall("[A-Za-z]+", line)}
            names |= {"e": sympy.E, "i": sympy.I, "pi": sympy.pi, "oo": sympy.oo, "ln": sympy.log}
            names |= {name: getattr(sympy, name) for name in ("sqrt", "sin", "cos", "tan", "exp")}
            left, right = (
                sympy.sympify(side, locals=names, rational=True) for side in json.loads(line)
            )
            print(sympy.simplify(left - right) == 0, flush=True)
        except Exception:  # whatever sympy cannot read is not equal
            print(False, flush=True)


def main() -> None:
    print(
        f"{'prediction':<20}{'gold':<14}{'EM':>5}{'F1':>7}{'cover':>7}{'EM, punctuation deleted':>26}"
    )
    answers = (
        ("A Kelmouth", "Kelmouth"),
        ("Kelmouth, Norland", "Kelmouth"),
        ("Spider-Man", "spider man"),
        ("yes it is", "yes"),
    )
    for prediction, gold in answers:
        em, f1, cover = (
            metric(prediction, gold) for metric in (exact_match, f1_score, cover_exact_match)
        )
        print(
            f"{prediction:<20}{gold:<14}{em:>5.1f}{f1:>7.3f}{cover:>7.1f}{exact_match(prediction, gold, 'delete'):>26.1f}"
        )
    print(
        "\nmath,"
        f" {'with sympy' if has_sympy() else 'without sympy: two expressions with letters are equal as strings only'}"
    )
    answers = (
        (r"\frac12", "0.5"),
        ("9,000", "9000"),
        (r"\sqrt{12}", r"2\sqrt{3}"),
        ("(x-1)(x+1)", "x^2-1"),
        ("(2,1)", "(1,2)"),
    )
    for prediction, gold in answers:
        print(
            f"{prediction:<20}{gold:<14}{'equal' if math_equal(prediction, gold) else 'not equal'}"
        )


if __name__ == "__main__":
    main()

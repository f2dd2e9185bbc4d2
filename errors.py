"""Whatever the user gave that is wrong is one line: what, where, and what to do; never a traceback.

InputError   the line. Every file raises it for a bad file, record, flag or address
run_main     runs a file's `main`: an InputError is printed and ends it with code 2, Ctrl-C with 130
FlagParser   argparse whose complaints are such lines, and name the nearest flag for one that it
             does not know
check_output can this file be written? Better known before the work than after it
setting      a field of a settings record: its default, a sentence, and the bounds of its value

error: train.py: unknown flag --lrr (did you mean --lr?); --help lists them all
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import NoReturn


class InputError(ValueError):
    """Something the user gave is wrong. The message is one line: what, where, and what to do."""


def run_main(main: Callable[[], None]) -> None:
    """Run a file's `main`; what is the user's to mend becomes one line on stderr and exit code 2,
    never a traceback.
    """
    try:
        in_turn(main)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `python data.py FILE | head` is not an error
        sys.stderr.close()


def in_turn(main: Callable[[], None]) -> None:
    """What several processes all find wrong, the first of them says: torchrun ends the others while
    they wait for it.
    """
    try:
        main()
    except Exception:
        if int(os.environ.get("LOCAL_RANK", 0)):
            time.sleep(5)
        raise


def nearest(word: str, known: Iterable[str]) -> str:
    """
    >>> nearest("--lrr", ["--lr", "--seed"])
    ' (did you mean --lr?)'
    """
    match = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {match[0]}?)" if match else ""


class FlagParser(argparse.ArgumentParser):
    """Flags are written in full: an abbreviation would mean another flag as soon as one is
    added.
    """

    def __init__(self, *names, **settings):
        super().__init__(
            *names, allow_abbrev=False, **{k: v for k, v in settings.items() if k != "allow_abbrev"}
        )

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}")

    def parse_args(self, args=None, namespace=None):
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            flags = [option for action in self._actions for option in action.option_strings]
            like = nearest(rest[0].split("=")[0], flags)
            raise InputError(f"{self.prog}: unknown flag {rest[0]}{like}; --help lists them all")
        return known


def boolean(text: str) -> bool:
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def setting(default, help: str, **limits):
    """A field of a settings record.

    limits   least, above, most and below bound a number; one_of holds the names of a choice
    """
    return field(default=default, metadata={"help": help, **limits})


BOUNDS = {  # name of the limit -> (is it kept?, how it is told)
    "least": (lambda value, limit: value >= limit, "at least"),
    "above": (lambda value, limit: value > limit, "above"),
    "most": (lambda value, limit: value <= limit, "at most"),
    "below": (lambda value, limit: value < limit, "below"),
}


def check_value(name: str, value, limits: Mapping) -> None:
    """One setting against the limits that stand beside it in its record."""
    names = limits.get("one_of")
    if names is not None and value not in names:
        known = f"one of {', '.join(names)}{nearest(value, names)}"
        raise InputError(f"--{name} {value}: unknown; {known}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"--{name} {value}: must be a finite number")
    for limit, (kept, told) in BOUNDS.items():
        if limit in limits and not kept(value, limits[limit]):
            raise InputError(f"--{name} {value}: must be {told} {limits[limit]}")


def check_output(path: str | Path, flag: str) -> None:
    """Raise InputError if `path` cannot be written: a folder, or in a place that is none. Nothing
    is left behind.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{flag} {path}: that is a folder: name a file")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if (
        not folder.is_dir()
        or not os.access(folder, os.W_OK)
        or (path.exists() and not os.access(path, os.W_OK))
    ):
        raise InputError(f"{flag} {path}: cannot be written there: name another place")


def main() -> None:
    """Each of these would end a command."""
    parser = FlagParser("train.py")
    parser.add_argument("--lr", type=float)
    for what in (
        lambda: parser.parse_args(["--lrr", "1"]),
        lambda: parser.parse_args(["--lr", "x"]),
        lambda: check_output("/", "--json"),
        lambda: check_output("/dev/null/x", "--out"),
    ):
        try:
            what()
        except InputError as error:
            print(f"error: {error}")


if __name__ == "__main__":
    run_main(main)

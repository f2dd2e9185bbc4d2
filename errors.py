"""Whatever a user gave that is wrong is one line: what, where, what to do; never a traceback."""

import argparse
import difflib
import io
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from operator import ge, gt, le, lt
from pathlib import Path

BOUNDS = {"least": (ge, "at least"), "above": (gt, "above")}  # how a limit is kept, and told
BOUNDS |= {"most": (le, "at most"), "below": (lt, "below")}
# How gloo begins what it says: with the line of its own source that said it.
GLOO = re.compile(r"(Gloo \w+ failed with )?\[\S*/gloo/\S+:\d+\]")
LOST = "another process or machine of this run is gone: look there for why; go on with --resume"

if not sys.stderr.isatty():  # in a file each state of a bar is a line: two a minute will do
    os.environ.setdefault("TQDM_MININTERVAL", "30")


def told_in_one_line(kind: type, error: BaseException, trace) -> None:
    """Ctrl-C while a file still imports what it needs; `run_main` has the rest."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif not int(os.environ.get("LOCAL_RANK", 0)):  # others are ended by their launcher
        print("\ninterrupted", file=sys.stderr)


sys.excepthook = told_in_one_line


class InputError(ValueError):
    """A bad file, record, flag or address, told in one line."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: a scheduler wants the machine back, or docker stops."""


def raise_terminated(*_) -> None:
    raise Terminated("ended by SIGTERM")


def run_main(main: Callable[[], None]) -> None:
    """Run a file's `main`: an InputError is printed and ends it with code 2, Ctrl-C with 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal, or a log, may have no ⟦
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `python data.py FILE | head` is not an error
        sys.stderr.close()
    except Exception as error:
        if int(os.environ.get("LOCAL_RANK", 0)):
            time.sleep(5)  # the first process says it, and torchrun ends the others
        kind = type(error)  # torch is not imported here: a command without it starts faster
        lost = kind.__module__ == "torch.distributed" or (
            kind is RuntimeError and GLOO.match(str(error))
        )
        if not lost and not isinstance(error, InputError):
            raise
        print(f"error: {LOST if lost else error}", file=sys.stderr)
        sys.exit(2)


def nearest(word: str, known: Iterable[str]) -> str:
    """`--lrr` -> " (did you mean --lr?)"; "" where nothing known is near."""
    match = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {match[0]}?)" if match else ""


class FlagParser(argparse.ArgumentParser):
    """argparse whose complaints are an InputError, and name the nearest flag for an unknown one."""

    renamed: Mapping = {}  # flag of an earlier version -> what to write now

    def error(self, message: str):
        raise InputError(f"{self.prog}: {message}")

    def parse_args(self, args=None, namespace=None):
        self.allow_abbrev = False  # "--lr" for "--lr_warmup" would change as soon as --lr is added
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            name = rest[0].split("=")[0]
            if now := self.renamed.get(name.removeprefix("--")):
                self.error(f"{name}: {now}")
            like = nearest(name, self._option_string_actions)
            self.error(f"unknown flag {rest[0]}{like}; --help lists them all")
        return known


def setting(default, help: str, **limits):
    """A field of a settings record. Limits: least, above, most, below, or one_of (names)."""
    return field(default=default, metadata={"help": help, **limits})


def check_value(name: str, value, limits: Mapping) -> None:
    """One setting against the limits that stand beside it in its record."""
    names = limits.get("one_of", [value])
    if value not in names:
        known = ", ".join(names) + nearest(value, names)
        raise InputError(f"--{name} {value}: unknown; one of {known}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"--{name} {value}: must be a finite number")
    for limit, (kept, told) in BOUNDS.items():
        if limit in limits and not kept(value, limits[limit]):
            raise InputError(f"--{name} {value}: must be {told} {limits[limit]}")


def check_output(path: str | Path, flag: str) -> None:
    """Can this file be written? Better known before the work than after it. Leaves nothing."""
    path = Path(path)
    place = path if path.exists() else next(p for p in path.absolute().parents if p.exists())
    if place.is_dir() == path.exists() or not os.access(place, os.W_OK):
        what = "that is a folder" if path.is_dir() else "cannot be written there"
        raise InputError(f"{flag} {path}: {what}: name a file elsewhere")

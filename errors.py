"""Whatever a user gave that is wrong is one line: what, where, what to do; never a traceback."""

import argparse
import difflib
import errno
import functools
import io
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from operator import ge, gt, le, lt
from pathlib import Path
from statistics import median

BOUNDS = {"least": (ge, "at least"), "above": (gt, "above")}  # how a limit is kept, and told
BOUNDS |= {"most": (le, "at most"), "below": (lt, "below")}
# How gloo begins what it says: with the line of its own source that said it.
GLOO = re.compile(r"(Gloo \w+ failed with )?\[\S*/gloo/\S+:\d+\]")
LOST = "another process or machine of this run is gone: look there for why; go on with --resume"
ADVICE = {errno.ENOSPC: "make room on its disk", errno.ENAMETOOLONG: "give a shorter name"}
# Not in an argument: the character NUL, and "user:password@" of an address, scheme or not.
FORBIDDEN = re.compile(r"\0|(?<=://)[^/?#\s]*@|^[^:/?#\s]+:[^/?#\s]*@")

SPINS = "10000"  # turns of a loop that a thread of torch's waits before it sleeps


@functools.cache
def prepare_command() -> None:
    """Does what must come before a command imports anything else; importing a file does nothing.

    Ctrl-C during those imports is one line. Progress bars need no lock between processes: a
    process that is killed while it holds one stops all others. And torch's threads wait for each
    other at the end of every operation. By default they spin for milliseconds, and beside as many
    busy programs as there are cores a run keeps between a fourth and a twentieth of its speed; if
    they sleep at once, a run on a quiet machine is a third slower. With this spin a quiet run loses
    nothing, and a run beside busy programs keeps a third of its speed. No digit depends on it. A
    user's own setting of either variable wins.
    """
    sys.excepthook = report_interrupt
    if not sys.stderr.isatty():  # in a file each state of a bar is a line: two a minute will do
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    from tqdm import tqdm  # it reads its environment when it is imported

    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0


def report_interrupt(kind: type, error: BaseException, trace) -> None:
    """Reports Ctrl-C while a file still imports what it needs; `run_main` reports later ones."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif os.environ.get("LOCAL_RANK", "0") == "0":  # others are ended by their launcher
        print("\ninterrupted", file=sys.stderr)


class InputError(ValueError):
    """A bad file, record, flag or address, told in one line."""


class Terminated(KeyboardInterrupt):
    """Ends a run because of the signal whose number it carries: SIGTERM of a scheduler or of
    `docker stop`, SIGHUP of a terminal that was closed, SIGUSR1 of Slurm, SIGINT of Ctrl-C.
    """


def raise_terminated(number: int, *_) -> None:
    raise Terminated(number)


def rank_of(name: str, default: int = 0) -> int:
    """Returns the number that a launcher wrote into this environment variable; the default is also
    the smallest one that it may have written (a rank counts from 0, a world's size from 1).
    """
    text = os.environ.get(name, str(default))
    if text.isdecimal() and int(text) >= default:
        return int(text)
    raise InputError(f"{name}={text} in the environment: unset it, or give a number from {default}")


def run_main(main: Callable[[], None]) -> None:
    """Run a file's `main`: an InputError is printed and ends it with code 2, Ctrl-C with 130."""
    prepare_command()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal, or a log, may have no ⟦
            stream.reconfigure(errors="backslashreplace")
    try:
        rank_of("LOCAL_RANK")
        try:
            main()
        finally:  # a full disk is noticed here: at its own exit Python would print two odd lines
            print(end="", flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `python data.py FILE | head` is not an error
        sys.stderr.close()
    except Exception as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(5)  # the first process says it, and torchrun ends the others
        if advice := ADVICE.get(getattr(error, "errno", None)):
            error = InputError(f"{error}: {advice}")
            sys.stdout = None  # Python's exit would try again to write what is left in its buffer
        kind = type(error)  # torch is not imported here: a command without it starts faster
        gloo = kind is RuntimeError and GLOO.match(str(error))
        lost = gloo or kind.__module__ == "torch.distributed"
        if not lost and not isinstance(error, InputError):
            raise
        print(f"error: {LOST if lost else error}", file=sys.stderr)
        sys.exit(2)


def slow_step(seconds: list[float]) -> str | None:
    """Returns a line about the newest step if it is the first that takes five times as long as the
    first five do (their median). slow_step([1, 1, 1, 1, 1, 6]) names step 5.
    """
    usual = median(seconds[:5])
    slow = [step for step, its in enumerate(seconds) if step >= 5 and its > 5 * usual]
    if slow != [len(seconds) - 1]:
        return None
    took = f"step {slow[0]} took {seconds[-1]:.2g} s, the first five {usual:.2g} s each"
    return f"{took}: is something else using this machine?"


def nearest(word: str, known: Iterable[str]) -> str:
    """`--lrr` -> " (did you mean --lr?)"; "" where nothing known is near."""
    match = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {match[0]}?)" if match else ""


class FlagParser(argparse.ArgumentParser):
    """argparse whose complaints are an InputError, and name the nearest flag for an unknown one."""

    def error(self, message: str):
        raise InputError(f"{self.prog}: {message}")

    def parse_args(self, args=None, namespace=None):
        self.allow_abbrev = False  # "--l" for "--lr" would change as soon as --lora_rank is added
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            name = rest[0].split("=")[0]
            like = nearest(name, self._option_string_actions)
            self.error(f"unknown flag {name}{like}; --help lists them all")
        for text in map(str, vars(known).values()):
            if (shown := FORBIDDEN.sub("", text)) != text:
                why = "a user name or password in an address, and the character NUL, are not taken"
                self.error(f"{shown!r}: {why}: leave them out")
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

"""Reports errors of the user's input in one line (what, where, what to do), not as a traceback."""

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

BOUNDS = {"least": (ge, "at least"), "above": (gt, "above")}  # the comparison and its words
BOUNDS |= {"most": (le, "at most"), "below": (lt, "below")}
# Messages of gloo begin with the source line that raised them.
GLOO = re.compile(r"(Gloo \w+ failed with )?\[\S*/gloo/\S+:\d+\]")
LOST = "another process or machine of this run is gone: look there for why; go on with --resume"
ADVICE = {errno.ENOSPC: "make room on its disk", errno.ENAMETOOLONG: "give a shorter name"}
# Arguments may contain neither the character NUL nor "user:password@", with or without a scheme.
FORBIDDEN = re.compile(r"\0|(?<=://)[^/?#\s]*@|^[^:/?#\s]+:[^/?#\s]*@")

SPINS = "10000"  # turns of a loop that a thread of torch's waits before it sleeps


@functools.cache
def prepare_command() -> None:
    """Prepares a command, before it imports anything else; importing a file does nothing.

    Ctrl-C during those imports prints one line. Progress bars get no lock between processes: a
    process that is killed while it holds one stops all others. And torch's threads wait for each
    other at the end of every operation. By default they spin for milliseconds, and beside as many
    busy programs as there are cores a run keeps between a fourth and a twentieth of its speed; if
    they sleep at once, a run on a quiet machine is a third slower. With this spin a quiet run loses
    nothing, and a run beside busy programs keeps a third of its speed. No digit depends on it. A
    user's own setting of either variable wins.
    """
    sys.excepthook = report_interrupt
    if not sys.stderr.isatty():  # in a file each update of a bar is a line: two a minute suffice
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    from tqdm import tqdm  # not earlier, because it reads the environment when it is imported

    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0


def report_interrupt(kind: type, error: BaseException, trace) -> None:
    """Reports Ctrl-C during the imports of a command; `run_main` reports it afterwards."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif os.environ.get("LOCAL_RANK", "0") == "0":  # the launcher ends the other processes
        print("\ninterrupted", file=sys.stderr)


class InputError(ValueError):
    """A bad file, record, flag or address, described in one line."""


class Terminated(KeyboardInterrupt):
    """Ends a run because of a signal, whose number it carries: SIGTERM from a scheduler or `docker
    stop`, SIGHUP from a closed terminal, SIGUSR1 from Slurm, SIGINT from Ctrl-C.
    """


def raise_terminated(number: int, *_) -> None:
    raise Terminated(number)


def rank_of(name: str, default: int = 0) -> int:
    """Returns the number that a launcher wrote into this environment variable. The default is also
    the minimum (a rank counts from 0, a world's size from 1).
    """
    text = os.environ.get(name, str(default))
    if text.isdecimal() and int(text) >= default:
        return int(text)
    raise InputError(f"{name}={text} in the environment: unset it, or give {default} or more")


def run_main(main: Callable[[], None]) -> None:
    """Runs a file's `main`: an InputError is printed and ends it with code 2, Ctrl-C with 130."""
    prepare_command()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal, or a log, may have no ⟦
            stream.reconfigure(errors="backslashreplace")
    try:
        rank_of("LOCAL_RANK")
        try:
            main()
        finally:  # reports a full disk here: at exit Python would print two obscure lines
            print(end="", flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `python data.py FILE | head` is not an error
        sys.stderr.close()
    except Exception as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(5)  # the first process reports the error, and torchrun ends the others
        if advice := ADVICE.get(getattr(error, "errno", None)):
            error = InputError(f"{error}: {advice}")
            sys.stdout = None  # at exit Python would try to write the rest of the buffer again
        kind = type(error)  # not compared with torch's class: commands without torch start faster
        gloo = kind is RuntimeError and GLOO.match(str(error))
        lost = gloo or kind.__module__ == "torch.distributed"
        if not lost and not isinstance(error, InputError):
            raise
        print(f"error: {LOST if lost else error}", file=sys.stderr)
        sys.exit(2)


def slow_step(seconds: list[float]) -> str | None:
    """Returns a warning if the newest step is the first to take more than five times the median of
    the first five: slow_step([1, 1, 1, 1, 1, 6]) names step 5.
    """
    usual = median(seconds[:5])
    slow = [step for step, taken in enumerate(seconds) if step >= 5 and taken > 5 * usual]
    if slow != [len(seconds) - 1]:
        return None
    return (
        f"step {slow[0]} took {seconds[-1]:.2g} s, the first five {usual:.2g} s each: is "
        "something else using this machine?"
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns " (did you mean --lr?)" for `--lrr`, or "" if no known word is similar."""
    match = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {match[0]}?)" if match else ""


class FlagParser(argparse.ArgumentParser):
    """An argparse parser that raises InputError and suggests a flag for an unknown one. --help
    shows the flags in `most_used`; --help all, and a parser without such a list, shows every flag.
    """

    most_used = ()
    show_all = False

    def format_help(self) -> str:
        for action in self._actions:
            if self.most_used and not self.show_all and action.dest not in self.most_used:
                action.help = argparse.SUPPRESS
        return super().format_help()

    def error(self, message: str):
        raise InputError(f"{self.prog}: {message}")

    def parse_args(self, args=None, namespace=None):
        self.allow_abbrev = False  # "--l" for "--lr" would change as soon as --lora_rank is added
        self.show_all = "all" in (sys.argv if args is None else args)
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            name = rest[0].split("=")[0]
            hint = nearest(name, self._option_string_actions)
            self.error(f"unknown flag {name}{hint}; --help all lists every flag")
        for text in map(str, vars(known).values()):
            if (shown := FORBIDDEN.sub("", text)) != text:
                self.error(
                    f"{shown!r}: a user name or password in an address, or the character NUL, is "
                    "not accepted: leave it out"
                )
        return known


def setting(default, help: str, **limits):
    """Declares a field of a settings record. Limits: least, above, most, below, one_of (names)."""
    return field(default=default, metadata={"help": help, **limits})


def check_value(name: str, value, limits: Mapping) -> None:
    """Checks a setting against the limits in its record."""
    names = limits.get("one_of", [value])
    if value not in names:
        known = ", ".join(names) + nearest(value, names)
        raise InputError(f"--{name} {value}: unknown; one of {known}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"--{name} {value}: must be a finite number")
    for limit, (holds, words) in BOUNDS.items():
        if limit in limits and not holds(value, limits[limit]):
            raise InputError(f"--{name} {value}: must be {words} {limits[limit]}")


def check_output(path: str | Path, flag: str) -> None:
    """Checks, before the work, that this file can be written; creates nothing."""
    path = Path(path)
    place = path if path.exists() else next(p for p in path.absolute().parents if p.exists())
    if place.is_dir() == path.exists() or not os.access(place, os.W_OK):
        reason = "that is a folder" if path.is_dir() else "cannot be written there"
        raise InputError(f"{flag} {path}: {reason}: name a file elsewhere")

"""Reports an error in one line, not as a traceback, and reads the flags of the commands."""

import argparse
import difflib
import functools
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

# This file is imported before torch, and so prepares the process of a command.
#
# Torch's threads wait for each other at the end of every operation. By default they spin for
# milliseconds while they wait. If as many other programs are busy as there are cores, a run then
# keeps only between a fourth and a twentieth of its speed. If the threads sleep at once instead, a
# run on a quiet machine is a third slower. If they spin SPINS times, a run on a quiet machine loses
# nothing, and a run beside busy programs keeps a third of its speed. The results do not depend on
# SPINS. If the user has set OMP_WAIT_POLICY or GOMP_SPINCOUNT, that value is used.
SPINS = "10000"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
if not sys.stderr.isatty():  # in a file each update is a line, so two a minute suffice
    os.environ.setdefault("TQDM_MININTERVAL", "30")
# isort: split
from tqdm import tqdm  # noqa: E402, it reads the environment when it is imported

# A process that is killed while it holds tqdm's lock between processes would stop all others.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0


class InputError(ValueError):
    """Raised for what the user can repair, such as a bad file or flag; its message is one line."""


class Terminated(KeyboardInterrupt):
    """Raised to end a run after a signal; its argument is the signal's number. SIGTERM comes from a
    scheduler or `docker stop`, SIGHUP from a closed terminal, SIGUSR1 from Slurm, SIGINT from
    Ctrl-C.
    """


def rank_of(name: str, default: int = 0) -> int:
    """Returns the number that a launcher wrote into this environment variable, or the default."""
    return int(os.environ.get(name, default))


def run_main(main: Callable[[], None]) -> None:
    """Runs a file's `main`. An error is printed in one line, and the exit code is 2; --traceback
    shows where the error was raised. After Ctrl-C the exit code is 130.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding may lack ⟦, which we print
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `python -m papers | head` is not an error
        sys.stderr.close()
    except Exception as error:
        if "--traceback" in sys.argv:
            raise
        if rank_of("LOCAL_RANK"):
            # If the first process has this error too, it reports it now, and torchrun ends all.
            time.sleep(5)
        print(f"error: {in_one_line(error)}", file=sys.stderr)
        sys.exit(2)


def in_one_line(error: Exception) -> str:
    """Returns an InputError's or the system's message; of other errors also the type and place."""
    if isinstance(error, InputError | OSError):
        return str(error)
    # A syntax error is not where it was raised, in Python's own files.
    frames = traceback.extract_tb(error.__traceback__)
    place = error if isinstance(error, SyntaxError) else frames[-1]
    text = traceback.format_exception_only(error)[-1].strip()
    return f"{text} ({place.filename}, line {place.lineno}; --traceback shows the calls)"


@functools.cache
def say_once(note: str) -> None:
    """Prints a note on stderr: once, and only by the first of several processes."""
    if rank_of("RANK") == 0:
        print(note, file=sys.stderr)


def bar(parts, title: str):
    """Returns a tqdm bar over parts of a step. The first process shows it from the fifth second on:
    of a step of ten seconds, sampling or the update takes at least five. It shows it only on a
    terminal: writing into a pipe whose reader has ended would stop the step.
    """
    return tqdm(parts, title, leave=False, delay=5, disable=rank_of("RANK") > 0 or None)


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns " (did you mean --lr?)" for `--lrr`, or "" if no known word is similar."""
    match = difflib.get_close_matches(word, known, 1)
    return f" (did you mean {match[0]}?)" if match else ""


class FlagParser(argparse.ArgumentParser):
    """An argparse parser that raises InputError and suggests a flag for an unknown one."""

    def error(self, message: str):
        raise InputError(f"{self.prog}: {message}")

    def parse_args(self, args=None):
        self.allow_abbrev = False  # a new flag could make an abbreviation ambiguous
        words = sys.argv[1:] if args is None else args
        known, rest = self.parse_known_args([word for word in words if word != "--traceback"])
        if rest:
            name = rest[0].split("=")[0]
            hint = nearest(name, self._option_string_actions)
            self.error(f"unknown flag {name}{hint}; --help lists every flag")
        return known


def check_output(path: str | Path, flag: str) -> None:
    """Raises an InputError if this file cannot be written. It creates nothing, so a command can
    call it before its work.
    """
    path = Path(path).absolute()
    place = next(place for place in (path, *path.parents) if place.exists())
    if place.is_dir() == path.exists() or not os.access(place, os.W_OK):
        raise InputError(f"{flag} {path}: cannot be written there: give another path")

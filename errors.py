"""Reports errors of the user's input in one line (what, where, what to do), not as a traceback."""

import argparse
import difflib
import errno
import functools
import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

# Matches an error of gloo, through which processes on CPUs exchange tensors. The message begins
# with [source file:line], perhaps after "Gloo ... failed with".
GLOO = re.compile(r"(Gloo \w+ failed with )?\[\S*/gloo/\S+:\d+\]")
LOST = "another process or machine of this run is gone: its output says why; go on with --resume"
ADVICE = {errno.ENOSPC: "make room on its disk", errno.ENAMETOOLONG: "give a shorter name"}
# No argument may contain the character NUL, begin with "user:password@", or have "user@" or
# "user:password@" after "://".
FORBIDDEN = re.compile(r"\0|(?<=://)[^/?#\s]*@|^[^:/?#\s]+:[^/?#\s]*@")

SPINS = "10000"  # iterations that a waiting thread of torch spins before it sleeps


@functools.cache
def prepare_command() -> None:
    """Prepares the process of a command. train.py, eval.py, ask.py and lab/ call this before they
    import torch; for the other commands, only `run_main` calls it.

    Ctrl-C during later imports prints one line. Progress bars get no lock between processes,
    because a process that is killed while it holds the lock would stop all others.

    Torch's threads wait for each other at the end of every operation. By default they spin for
    milliseconds while they wait. If as many other programs are busy as there are cores, a run then
    keeps only between a fourth and a twentieth of its speed. If the threads sleep at once instead,
    a run on a quiet machine is a third slower. If they spin SPINS times, a run on a quiet machine
    loses nothing, and a run beside busy programs keeps a third of its speed. The results do not
    depend on SPINS. If the user has set OMP_WAIT_POLICY or GOMP_SPINCOUNT, that value is used.
    """
    sys.excepthook = report_interrupt
    if not sys.stderr.isatty():  # in a file each update is a line, so two a minute suffice
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    from tqdm import tqdm  # not earlier, because it reads the environment when it is imported

    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0


def report_interrupt(kind: type, error: BaseException, trace) -> None:
    """Reports a Ctrl-C during the imports of a command; `run_main` reports one that comes later."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif os.environ.get("LOCAL_RANK", "0") == "0":  # one process of each machine prints
        print("\ninterrupted", file=sys.stderr)


class InputError(ValueError):
    """Raised for what the user can repair, such as a bad file or flag; its message is one line."""


class Terminated(KeyboardInterrupt):
    """Raised to end a run after a signal; its argument is the signal's number. SIGTERM comes from a
    scheduler or `docker stop`, SIGHUP from a closed terminal, SIGUSR1 from Slurm, SIGINT from
    Ctrl-C.
    """


def raise_terminated(number: int, *_) -> None:
    raise Terminated(number)


def rank_of(name: str, default: int = 0) -> int:
    """Returns the number that a launcher wrote into this environment variable, or the default. The
    default is also the minimum: 0 for the rank of a process, 1 for the number of processes.
    """
    text = os.environ.get(name, str(default))
    if text.isdecimal() and int(text) >= default:
        return int(text)
    raise InputError(f"{name}={text} in the environment: unset it, or give {default} or more")


def run_main(main: Callable[[], None]) -> None:
    """Runs a file's `main`. After an InputError, a full disk, a file name that is too long or the
    loss of another process, it prints one line and ends the process with exit code 2. After Ctrl-C
    the exit code is 130.
    """
    prepare_command()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding may lack ⟦, which we print
            stream.reconfigure(errors="backslashreplace")
    try:
        rank_of("LOCAL_RANK")
        try:
            main()
        finally:  # flush here: at exit, Python would report a full disk in two obscure lines
            print(end="", flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `python data.py FILE | head` is not an error
        sys.stderr.close()
    except Exception as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # If the first process has this error too, it reports it now, and torchrun ends all.
            time.sleep(5)
        if advice := ADVICE.get(getattr(error, "errno", None)):
            error = InputError(f"{error}: {advice}")
            sys.stdout = None  # at exit Python would try to write the rest of the buffer again
        kind = type(error)  # compared by module name, so that this file need not import torch
        gloo = kind is RuntimeError and GLOO.match(str(error))
        lost = gloo or kind.__module__ == "torch.distributed"
        if not lost and not isinstance(error, InputError):
            raise
        print(f"error: {LOST if lost else error}", file=sys.stderr)
        sys.exit(2)


@functools.cache
def say_once(note: str) -> None:
    """Prints a note on stderr: once, and only by the first of several processes."""
    if os.environ.get("RANK", "0") == "0":
        print(note, file=sys.stderr)


def bar(parts, title: str):
    """Returns a tqdm bar over parts of a step. The first process shows it from the fifth second on:
    of a step of ten seconds, sampling or the update takes at least five. It shows it only on a
    terminal: writing into a pipe whose reader has ended would stop the step.
    """
    from tqdm import tqdm  # not earlier, as in `prepare_command`

    return tqdm(parts, title, leave=False, delay=5, disable=rank_of("RANK") > 0 or None)


def slow_step(seconds: list[float]) -> str | None:
    """Returns a warning if the newest step is the first after step 4 to take more than five times
    the median of steps 0 to 4. Worked: slow_step([1, 1, 1, 1, 1, 6]) warns of step 5.
    """
    usual = median(seconds[:5])
    slow = [step for step, taken in enumerate(seconds) if step >= 5 and taken > 5 * usual]
    if slow != [len(seconds) - 1]:
        return None
    return (
        f"step {slow[0]} took {seconds[-1]:.2g} s, the first five {usual:.2g} s (median): is "
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
        self.allow_abbrev = False  # a new flag could make an abbreviation ambiguous
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


def check_output(path: str | Path, flag: str) -> None:
    """Raises an InputError if this file cannot be written. It creates nothing, so a command can
    call it before its work.
    """
    path = Path(path)
    place = path if path.exists() else next(p for p in path.absolute().parents if p.exists())
    if place.is_dir() == path.exists() or not os.access(place, os.W_OK):
        reason = "that is a folder" if path.is_dir() else "cannot be written there"
        raise InputError(f"{flag} {path}: {reason}: give another path")

"""Runs tests with the functions of another file in the place of ours, for lab/exercise.py.

    python tests/referee.py FILE MODULE FUNCTIONS TESTS CHOSEN UNUSED

FUNCTIONS of MODULE get the code of those in FILE; then the CHOSEN ones of tests/test_TESTS.py run.
UNUSED names modules that this file imports for other tests. Prints one line, and exits with 1 if a
test fails.
"""

import gc
import os
import re
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
REVERSED = re.compile(r"assert [\w.]+ == (?!pytest)\w+\(")  # the expected value is on the left


class Referee:
    """A plugin of pytest that gives the originals the code of the file's functions; `failures` has
    a sentence about each test that fails.
    """

    def __init__(self, file: str, module: str, functions: list[str]):
        self.file, self.module, self.functions = file, module, functions
        self.passed, self.failures = 0, []

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.failures.append(shown(str(report.longrepr).splitlines()[-1]))

    def pytest_runtest_setup(self) -> None:
        self.pair, own = None, vars(sys.modules[self.file])
        theirs = vars(sys.modules[self.module])
        for path in self.functions:
            owner, _, name = path.rpartition(".")
            old = getattr(theirs[owner], name) if owner else theirs[name]
            old.__code__ = own[name].__code__  # wherever it was imported
        theirs |= own | theirs  # what else the file defines

    def pytest_assertrepr_compare(self, op, left, right) -> None:
        self.pair = (left, right) if op == "==" else None

    def pytest_runtest_makereport(self, item, call) -> None:
        if not call.excinfo:
            self.passed += call.when == "call"
            return
        steps, told = call.excinfo.traceback, f"fails: {shown(call.excinfo.exconly())}"
        line, statement = item.location[1] + 1, ""
        for step in steps:
            if step.path == item.path:
                line, statement = step.lineno + 1, str(step.statement)
            if step.name in ("assert_close", "assert_allclose"):
                self.pair = list(step.locals.values())[:2]
        if self.pair:
            got, expected = self.pair[:: -1 if REVERSED.match(statement.strip()) else 1]
            told = f"expects {shown(expected)} and gets {shown(got)}"
        self.failures.append(f"{item.name} ({item.path.name}, line {line}) {told}")


def shown(value) -> str:
    """Returns a value on one line, its numbers with five digits."""
    text = re.sub(r" ± [\d.e+-]+|approx|tensor|^E +", "", " ".join(str(value).split()))
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.5g}", text)[:120]


def judge(file: str, module: str, functions: str, tests: str, chosen: str, unused: str) -> None:
    """Runs the tests in this process, which is changed for good, and ends it."""
    gc.disable()  # a fifth of the time that imports take
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    os.environ.pop("PYTEST_ADDOPTS", None)
    sys.dont_write_bytecode = True  # a file that changes within a second would not be read again
    for name in unused.split():
        from unittest.mock import MagicMock  # a tenth of a second

        sys.modules.setdefault(name, MagicMock())
    import pytest

    referee = Referee(Path(file).stem, module, functions.split())
    # unraisableexception collects garbage at the end: a second, where torch is loaded.
    plugins = "cacheprovider terminal faulthandler unraisableexception".split()
    options = ["--noconftest", "-c", str(TESTS.parent / "pyproject.toml"), "-k", chosen]
    options += [f"-pno:{name}" for name in plugins]
    ended = pytest.main([file, str(TESTS / f"test_{tests}.py"), *options], [referee])
    failed, count = len(referee.failures), referee.passed + len(referee.failures)
    if ended and not failed:
        sys.exit(f"error: pytest ended with {ended!r}")
    if failed:
        print(f"{referee.failures[0]}; {failed} of {count} tests fail")
    else:
        print(f"all {count} tests pass")
    sys.exit(failed > 0)


if __name__ == "__main__":
    judge(*sys.argv[1:])

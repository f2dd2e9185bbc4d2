"""Runs tests with the functions of another file in the place of ours, for lab/exercise.py.

    python tests/referee.py FILE MODULE FUNCTIONS TESTS CHOSEN

FUNCTIONS of MODULE get the code of those in FILE; then the CHOSEN ones of tests/test_TESTS.py run.
Prints one line, and exits with 1 if a test fails.
"""

import os
import sys
from pathlib import Path
from unittest.mock import MagicMock

TESTS = Path(__file__).resolve().parent


class Referee:
    """A plugin of pytest that gives the originals the code of the file's functions; `failures` has
    a sentence about each test that fails.
    """

    def __init__(self, file: str, module: str, functions: list[str]):
        self.file, self.module, self.functions = file, module, functions
        self.passed, self.failures = 0, []

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.failures.append(str(report.longrepr).splitlines()[-1])

    def pytest_collection_finish(self) -> None:
        if self.failures:  # the file cannot be imported
            return
        own, original = vars(sys.modules[self.file]), vars(sys.modules[self.module])
        for path in self.functions:
            owner, _, name = path.rpartition(".")
            old = getattr(original[owner], name) if owner else original[name]
            try:
                old.__code__ = own[name].__code__  # wherever it was imported
            except (KeyError, AttributeError, ValueError) as error:  # ValueError: a decorator's
                self.failures.append(f"{name} must be a plain function of the file: {error!r}")
        original |= own | original  # what else the file defines

    def pytest_runtest_makereport(self, item, call) -> None:
        if not call.excinfo:
            self.passed += call.when == "call"
            return
        places = [step.lineno + 1 for step in call.excinfo.traceback if step.path == item.path]
        message = " ".join(call.excinfo.exconly().split())[:160]
        where = f"{item.path.name}, line {[item.location[1] + 1, *places][-1]}"
        self.failures.append(f"{item.name} ({where}) fails: {message}")


def judge(file: str, module: str, functions: str, tests: str, chosen: str) -> None:
    """Runs the tests in this process, which is changed for good, and ends it."""
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    os.environ["PYTEST_ADDOPTS"] = ""
    sys.dont_write_bytecode = True  # a file that changes within a second would not be read again
    sys.modules.setdefault("conftest", MagicMock())  # test_retriever imports it, and it loads torch
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

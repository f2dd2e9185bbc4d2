"""Runs tests with functions of another file instead of ours, for lab/exercise.py.

    python tests/referee.py FILE MODULE FUNCTIONS TESTS CHOSEN UNUSED

FUNCTIONS of MODULE get the code of the functions in FILE; then the CHOSEN tests of
tests/test_TESTS.py run. UNUSED names modules that this test file imports for other tests. Prints
one line, and exits with 1 if a test fails.
"""

import gc
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent


class Referee:
    """A plugin of pytest that replaces the code of the original functions by that of the file's
    functions; `failures` has a sentence about each test that fails.
    """

    def __init__(self, file: str, module: str, functions: list[str]):
        self.file, self.module, self.functions = file, module, functions
        self.passed, self.failures = 0, []

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.failures.append(on_one_line(str(report.longrepr).splitlines()[-1]))

    def pytest_runtest_setup(self) -> None:
        new_globals = vars(sys.modules[self.file])
        original_globals = vars(sys.modules[self.module])
        for path in self.functions:
            owner, _, name = path.rpartition(".")
            old = getattr(original_globals[owner], name) if owner else original_globals[name]
            # Modules that have imported the function see the new code too.
            old.__code__ = new_globals[name].__code__
        original_globals |= new_globals | original_globals  # constants and helpers of the file

    def pytest_runtest_makereport(self, item, call) -> None:
        if not call.excinfo:
            self.passed += call.when == "call"
            return
        # Of an assertion, pytest shows the values of both sides.
        error = on_one_line(call.excinfo.exconly())
        place = f"{item.path.name}, line {item.location[1] + 1}"
        self.failures.append(f"{item.name} ({place}) fails: {error}")


def on_one_line(text: str) -> str:
    return " ".join(text.split())[:240]


def judge(file: str, module: str, functions: str, tests: str, chosen: str, unused: str) -> None:
    """Runs the tests in this process, whose functions stay replaced, and ends the process."""
    gc.disable()  # garbage collection takes a fifth of the time of imports
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    os.environ.pop("PYTEST_ADDOPTS", None)
    # With cached bytecode, a file that changes within a second would not be read again.
    sys.dont_write_bytecode = True
    for name in unused.split():
        from unittest.mock import MagicMock  # this import takes a tenth of a second

        sys.modules.setdefault(name, MagicMock())
    import pytest

    referee = Referee(Path(file).stem, module, functions.split())
    # unraisableexception collects garbage at the end, which takes a second if torch is loaded.
    plugins = "cacheprovider terminal faulthandler unraisableexception".split()
    options = ["--noconftest", "-c", str(TESTS.parent / "pyproject.toml"), "-k", chosen]
    options += [f"-pno:{name}" for name in plugins]
    exit_code = pytest.main([file, str(TESTS / f"test_{tests}.py"), *options], [referee])
    failed, count = len(referee.failures), referee.passed + len(referee.failures)
    if exit_code and not failed:
        sys.exit(f"error: pytest ended with {exit_code!r}")
    if failed:
        print(f"{referee.failures[0]}; {failed} of {count} tests fail")
    else:
        print(f"all {count} tests pass")
    sys.exit(failed > 0)


if __name__ == "__main__":
    judge(*sys.argv[1:])

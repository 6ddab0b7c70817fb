"""Import test files in the fork server of pytest's workers, which all collect the same tests.

Imports are half of a collection's time. A worker finds the modules as it is forked, with their
asserts rewritten, and makes the tests alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies

_THREADS_OF_TOKENIZERS = "TOKENIZERS_PARALLELISM"


def import_tests(arguments: Sequence[str]) -> None:
    """Import the test files that pytest collects with these arguments. If one cannot be imported,
    forget all of them: each worker then imports it, and says why it cannot."""
    before = set(sys.modules)
    plain = ("-qqs", "-n0", "-pno:cacheprovider", "-pno:faulthandler", "--collect-only")
    os.environ[_THREADS_OF_TOKENIZERS] = "false"  # of those that files train
    code = pytest.main([*plain, *arguments], plugins=[sys.modules[__name__]])
    del os.environ[_THREADS_OF_TOKENIZERS]
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        _read_constants()
        return
    for name in sys.modules.keys() - before:
        if name.partition(".")[0] == "tests":
            del sys.modules[name]


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return _Imported.from_parent(parent, path=module_path)


class _Imported(pytest.Module):
    """A test file in which no tests are found."""

    def collect(self) -> list[pytest.Item]:
        threads = _threads()
        assert self.obj  # which imports it
        if _threads() > threads:
            print(
                f"{self.path} starts threads where it is imported: no fork has them",
                file=sys.stderr,
            )
            os._exit(1)
        return []


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


@hypothesis.settings(max_examples=100, database=None, derandomize=True)
@hypothesis.given(strategies.integers())
def _read_constants(number: int) -> None:
    """hypothesis reads the constants of all modules where it first draws one of them."""

"""A kernel is compiled once, even by processes that need it at the same time."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from baton_engine.cpu_kernels import openmp
from baton_engine.cpu_kernels.openmp import run_kernel, task_class

SeenBy = task_class([("seen", np.int64)])


def first(pointer: Any) -> None:
    numba.carray(pointer, 1)[0].seen = 1


def second(pointer: Any) -> None:
    numba.carray(pointer, 1)[0].seen = 2


def third(pointer: Any) -> None:
    numba.carray(pointer, 1)[0].seen = 3


def seen_by(kernel: Callable[[Any], None]) -> int:
    task = SeenBy()
    run_kernel(kernel, task)
    return int(task.seen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of compiled kernels."""
    cache = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(cache))
        assert seen_by(first) == 1
        [folder] = cache.iterdir()
        assert [*folder.glob("*/*first*.nbc")]
        yield folder


def test_a_process_waits_for_another_one_that_compiles_the_kernel(folder: Path) -> None:
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(seen_by(second)))
    with open(folder / "second.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        waiting.join(0.2)
        assert found == []
        assert not [*folder.glob("*/*second*")]
    waiting.join()
    assert found == [2]


def test_a_process_that_waited_for_long_compiles_the_kernel_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openmp, "PATIENCE_S", 0.05)
    with open(folder / "third.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert seen_by(third) == 3

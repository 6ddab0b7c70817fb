"""Kernels: functions that numba compiles, on the threads that torch's operators use.

In: a function and its task. Out: nothing; each thread has called the function.

torch's OpenMP library keeps its threads awake for a while after an operator. Threads of another
library would compete with them for the same cores, so kernels run on these.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

# The first field of a task: how many parts of it threads have taken. It has a cache line of its
# own, because every thread reads the other fields all the time.
COUNTER = ("next", np.int64, (16,))
NONE_TAKEN = (0,) * 16
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# How long a process waits for another one that compiles the same kernel, which takes some seconds.
PATIENCE_S = 30.0
POLL_S = 0.02

# Compiles the functions that kernels call.
inlined = numba.njit(nogil=True, error_model="numpy")

# Identifies the sources of all kernels, as this process has imported them.
_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()[:16]


@inlined
def keep_until_here(memory: Any) -> None:
    """Use an array whose address a kernel used. numba frees an array after its last use, and takes
    the address for one: without this call, a kernel would write to freed memory."""
    memory[0] = 0


def run_kernel(function: Callable[[Any], None], task: npt.NDArray[Any]) -> None:
    """Call a kernel on each of torch's threads with a pointer to `task`, an array of one record,
    and wait. On this thread alone if torch has one thread or another OpenMP library."""
    address, argument = _compiled(function, task.dtype), task.ctypes.data
    threads = torch.get_num_threads()
    parallel = _parallel() if threads > 1 else None
    if parallel is None:
        _FUNCTION(address)(argument)
    else:
        parallel(address, argument, threads, 0)


def run_here(function: Callable[[Any], None], task: npt.NDArray[Any]) -> None:
    """The same on the calling thread alone, without Python's lock: for threads beside the steps."""
    _FUNCTION(_compiled(function, task.dtype))(task.ctypes.data)


@functools.cache
def _compiled(function: Callable[[Any], None], task: np.dtype[Any]) -> int:
    """The address of a function of a pointer to a `task`, compiled.

    numba keeps compiled code in NUMBA_CACHE_DIR or the user's cache, and compiles it again in about
    a second if it cannot write there. Other sources have another folder: numba itself looks only at
    the file of the function, and a process that started before an update would store old code there
    as new. Of processes that start together one compiles, and the others read its code.
    """
    signature = numba.types.void(numba.types.CPointer(numba.from_dtype(task)))
    try:
        cache = os.environ.get("NUMBA_CACHE_DIR") or Path.home() / ".cache" / "baton" / "kernels"
        folder = Path(cache) / _SOURCES
        numba.config.CACHE_DIR = str(folder)
        with _locked(folder / f"{function.__name__}.lock"):
            address: int = numba.cfunc(signature, cache=True)(function).address
    except RuntimeError:  # no folder for the cache
        address = numba.cfunc(signature)(function).address
    return address


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock; go on without it if the folder cannot be written, or if another process
    holds it for PATIENCE_S."""
    with ExitStack() as stack:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "w"))
            deadline = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline:
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(POLL_S)
        yield


@functools.cache
def _parallel() -> Any:
    """GNU OpenMP's function that a compiler calls for a parallel region."""
    try:
        paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        return None
    of_torch = str(Path(torch.__file__).parent)
    libraries = sorted(
        (path for path in paths if Path(path).name.startswith("libgomp")),
        key=lambda path: not path.startswith(of_torch),
    )
    if not libraries:
        return None
    parallel = ctypes.CDLL(libraries[0], mode=os.RTLD_NOW | os.RTLD_NOLOAD).GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel

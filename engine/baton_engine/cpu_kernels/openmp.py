"""Kernels: functions that numba compiles, on the threads that torch's operators use.

In: a function and its task. Out: nothing; each thread has called the function.

A task is a kernel's argument: a structure of ctypes with the fields of a record of numpy, as which
the kernel reads it. It takes a tenth of a record's time to fill, and steps of few tokens call many
kernels.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import numba
import numpy as np
import torch

# The first field of a task: how many parts of it threads have taken. It has a cache line of its
# own, because every thread reads the other fields all the time.
COUNTER = ("next", np.int64, (16,))
NONE_TAKEN = (0,) * 16
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# How long a process waits for another one that compiles the same kernel, which takes some seconds.
PATIENCE_S = 30.0
POLL_S = 0.02

# The address of each kernel, and the same as a function. All its tasks have the same record.
_entries: dict[Callable[[Any], None], tuple[int, Callable[[int], None]]] = {}

# Compiles the functions that kernels call.
inlined = numba.njit(nogil=True, error_model="numpy")
# The same, where the compiler would call the function: short ones, for which a call is much.
expanded = numba.njit(nogil=True, error_model="numpy", forceinline=True)

# Identifies the sources of all kernels, as this process has imported them.
_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()[:16]


@inlined
def keep_until_here(memory: Any) -> None:
    """Use an array whose address a kernel used. numba frees an array after its last use, and takes
    the address for one: without this call, a kernel would write to freed memory."""
    memory[0] = 0


class Task(ctypes.Structure):
    """A kernel's argument. Its class has the fields of `record`."""

    record: ClassVar[np.dtype[Any]]


def task_class(columns: Sequence[tuple[Any, ...]]) -> type[Any]:
    """A class of tasks with these fields, as numpy names and types them. All are 0 at first."""
    record = np.dtype([*columns], align=True)
    assert record.names is not None
    assert record.fields is not None
    fields = [(name, _field_type(record.fields[name][0])) for name in record.names]
    found = type("RecordTask", (Task,), {"_fields_": fields, "record": record})
    assert ctypes.sizeof(found) == record.itemsize
    return found


def _field_type(field: np.dtype[Any]) -> Any:
    found = np.ctypeslib.as_ctypes_type(field.base)
    return found if not field.shape else found * field.shape[0]


def run_kernel(function: Callable[[Any], None], task: Task, parts: int | None = None) -> None:
    """Call a kernel on each of torch's threads with a pointer to `task`, and wait. On this thread
    alone if torch has one thread or another OpenMP library, or if there is one part to take."""
    entry = _entry(function, task)
    argument = ctypes.addressof(task)
    threads = 1 if parts == 1 else torch.get_num_threads()
    parallel = _parallel() if threads > 1 else None
    if parallel is None:
        entry[1](argument)
    else:
        parallel(entry[0], argument, threads, 0)


def run_here(function: Callable[[Any], None], task: Task) -> None:
    """The same on the calling thread alone, without Python's lock: for threads beside the steps."""
    _entry(function, task)[1](ctypes.addressof(task))


def _entry(function: Callable[[Any], None], task: Task) -> tuple[int, Callable[[int], None]]:
    """The address of the compiled function, and the function."""
    entry = _entries.get(function)
    if entry is None:
        address = _compiled(function, task.record)
        entry = _entries[function] = address, _FUNCTION(address)
    return entry


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

"""Counts the variants of Triton kernels that a process meets for the first time.

In: a block of code. Out: the names of the kernels that it made triton compile, or load from the
cache on disk. Nothing is counted in triton's interpreter, which compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any


@contextmanager
def counting_variants() -> Iterator[list[str]]:
    found: list[str] = []
    if find_spec("triton") is None:
        yield found
        return
    import triton

    def note(*, fn: Any, **_: Any) -> None:
        found.append(str(getattr(fn, "name", fn)))

    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook
    runtime.jit_post_compile_hook = note
    try:
        yield found
    finally:
        runtime.jit_post_compile_hook = before

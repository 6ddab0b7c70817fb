"""Records launches of Triton kernels, and counts the bytes that they move in the interpreter.

In: calls of functions that launch kernels. Out: the launches in order, each with its grid and its
constants. In the interpreter a launch has the bytes of each element that a program loads or stores;
masked elements are none, and an element that two programs load counts twice. On a GPU it has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from triton.runtime.interpreter import InterpreterBuilder
from triton.runtime.jit import KernelInterface


@dataclass
class Launched:
    kernel: str
    grid: tuple[int, ...]
    constants: dict[str, Any] = field(default_factory=dict)
    loaded: int = 0
    stored: int = 0

    @property
    def moved(self) -> int:
        return self.loaded + self.stored


@contextmanager
def launches() -> Iterator[list[Launched]]:
    """The launches inside the block."""
    found: list[Launched] = []
    launch, load, store = (
        KernelInterface.__getitem__,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def recorded(kernel: Any, grid: Any) -> Any:
        def run(*args: Any, **constants: Any) -> Any:
            found.append(Launched(kernel.__name__, tuple(grid), constants))
            return launch(kernel, grid)(*args, **constants)

        return run

    def counted_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        result = load(self, ptrs, mask, *rest, **more)
        found[-1].loaded += int(mask.data.sum()) * result.data.itemsize
        return result

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found[-1].stored += int(mask.data.sum()) * value.data.itemsize
        return store(self, ptrs, value, mask, *rest)

    with (
        mock.patch.object(KernelInterface, "__getitem__", recorded),
        mock.patch.object(InterpreterBuilder, "create_masked_load", counted_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", counted_store),
    ):
        yield found

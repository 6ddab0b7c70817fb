"""Triton's interpreter without work that changes no result, and with products like a GPU's.

For each launch and for each call of a device function it patches its language again, for each
operation it makes a table of all types, and for each sum and product of integers it computes
whether they overflow, which it then does not look at. Together that is half of its time.

It multiplies matrices by numpy's BLAS, and some give a row other bits at another place, as that for
AMD's Zen 5 does. On a GPU a row of a tile has the same bits at each place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any


def quicken_interpreter() -> None:
    """Quicken triton's interpreter if it was imported, and is the one that this knows."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    parts = ("_LangPatchScope", "_get_np_dtype", "_patch_lang", "interpreter_builder")
    if interpreter is None or not all(hasattr(interpreter, part) for part in parts):
        return
    if interpreter._get_np_dtype.__module__ == __name__:
        return
    interpreter._get_np_dtype = _remember_types(interpreter._get_np_dtype)
    interpreter._patch_lang = _patch_once_per_launch(interpreter)
    # Where `debug` is off, what it finds is dropped.
    builder = interpreter.interpreter_builder
    builder.create_dot = _dot_by_row(builder.create_dot)
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _remember_types(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[tuple[type, str], Any] = {}

    def remembered(kind: Any) -> Any:
        key = type(kind), kind.name
        if key not in known:
            known[key] = numpy_type(kind)
        return known[key]

    return remembered


def _dot_by_row(dot: Callable[..., Any]) -> Callable[..., Any]:
    """A product of matrices as products of each row with the other matrix."""

    def by_row(a: Any, b: Any, d: Any, *options: Any) -> Any:
        rows = replace(a, data=a.data[..., :, None, :])
        columns = replace(b, data=b.data[..., None, :, :])
        sums = replace(d, data=d.data[..., :, None, :])
        found = dot(rows, columns, sums, *options)
        found.data = found.data[..., 0, :]
        return found

    return by_row


def _patch_once_per_launch(interpreter: Any) -> Callable[[FunctionType], Any]:
    """A function sees the language as modules among its globals. A launch patches those that its
    kernel sees, and restores them at its end; its device functions then see these as patched."""
    patch = interpreter._patch_lang
    language = {id(interpreter.tl), id(interpreter.tl.core)}
    patched: set[int] = set()

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]  # it is untyped
        """Patches of a launch, of which there is one at a time."""

        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_once(function: FunctionType) -> Any:
        seen = language & {id(each) for each in function.__globals__.values()}
        scope = Scope()
        if not seen or not seen <= patched:
            scope._changes = patch(function)._changes
            patched.update(seen)
        return scope

    return patch_once

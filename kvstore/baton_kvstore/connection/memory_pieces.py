"""A value that lies in several pieces of memory, in order: views of its bytes, without a copy."""

from __future__ import annotations

from collections.abc import Sequence


def leading(pieces: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return views of the first `count` bytes of the pieces, without empty ones."""
    views = []
    for piece in pieces:
        views.append(piece[:count])
        count -= len(views[-1])
    return [view for view in views if len(view)]


def drop_leading(pending: list[memoryview], count: int) -> None:
    """Remove the first `count` bytes from `pending`, in place."""
    while pending and count >= len(pending[0]):
        count -= len(pending.pop(0))
    if count:
        pending[0] = pending[0][count:]

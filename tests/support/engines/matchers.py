"""A grammar's matcher with a fixed mask."""

from __future__ import annotations

from collections.abc import Sequence


class ListedMatcher:
    """A matcher that allows only `ids`. Its mask of `width` bytes may be shorter or longer than the
    vocabulary."""

    stopped, complete, error = False, False, ""

    def __init__(self, ids: Sequence[int], width: int) -> None:
        self._mask = bytearray(width)
        for id in ids:
            self._mask[id // 8] |= 1 << id % 8

    def copy(self) -> ListedMatcher:
        return self

    def accept(self, ids: Sequence[int]) -> bool:
        return True

    def forced(self) -> tuple[int, ...]:
        return ()

    def mask(self) -> bytes:
        return bytes(self._mask)

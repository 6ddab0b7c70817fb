"""The text that a parser has not read yet.

A parser is a generator that reads a Source from front to back. When it needs more text to decide,
it yields None and resumes after more text arrived or the text ended. Each method decides as soon as
the text so far allows, and by that text alone, so the result does not depend on how the text is
split into deltas. No method scans held text again for each delta, so the time is linear in the
length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]
Texts = Generator[str | None, None, T]  # yields text that was read, or None to wait

MAX_HELD_STRING = 1024  # characters of a string that is read whole: a key or a function name
_SPACE = " \t\r\n"
_SPACES = re.compile(f"[{_SPACE}]+")
_OUTSIDE = re.compile(r'["{}\[\]]')  # outside of a JSON string: quotes and brackets
_INSIDE = re.compile(r'(?:[^"\\\x00-\x1f]|\\.)*+', re.DOTALL)
_SCALAR_END = re.compile(r"[,\]}\s]")


class Source:
    """The unread text of one answer. `ended` is set once no more text will be pushed."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        self._dropped = 0  # characters before `_text`
        self.reasoning: list[tuple[int, int]] = []  # the (start, end) places of reasoning, if noted

    def push(self, text: str) -> None:
        self._dropped += self._at
        self._text = self._text[self._at :] + text if self._at else self._text + text
        self._at = 0

    @property
    def unread(self) -> str:
        return self._text[self._at :]

    @property
    def place(self) -> int:
        """Number of characters read so far."""
        return self._dropped + self._at

    def note_reasoning(self, start: int, end_marker: str | None) -> None:
        """Note that all from `start` to here is reasoning, apart from the marker just read."""
        self.reasoning.append((start, self.place - len(end_marker or "")))

    def put_back(self, text: str) -> None:
        """Make `text`, the last text that was read, unread again."""
        self._dropped -= len(text) - self._at
        self._text, self._at = text + self._text[self._at :], 0

    def take(self, count: int) -> str:
        """Read and return the next `count` characters, or fewer if fewer have arrived."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        return text

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read and return the run of characters that `pattern` matches in the text so far."""
        match = pattern.match(self._text, self._at)
        return self.take(match.end() - self._at) if match else ""

    def over(self) -> Waiting[bool]:
        """Wait for unread text; return True if the text has ended instead."""
        while self._at == len(self._text):
            if self.ended:
                return True
            yield None
        return False

    def skip_space(self) -> Waiting[str]:
        """Read and return white space."""
        space: list[str] = []
        while not (yield from self.over()) and (run := self.run(_SPACES)):
            space.append(run)
        return "".join(space)

    def starts_with(self, *options: str) -> Waiting[str | None]:
        """Read the option that the unread text starts with, if any. No option may be a prefix of
        another."""
        longest = max(map(len, options))
        while True:
            coming = self._text[self._at : self._at + longest]
            for option in options:
                if coming.startswith(option):
                    self._at += len(option)
                    return option
            if self.ended or not any(option.startswith(coming) for option in options):
                return None
            yield None

    def until(self, *markers: str, trim: bool = False) -> Texts[str | None]:
        """Yield the text before the first of `markers`; read that marker and return it, or None if
        the text ends first. `trim` drops the white space before a marker. No marker may be a prefix
        of another."""
        space: list[str] = []  # white space that a marker may follow
        while True:
            match = _found(markers).search(self._text, self._at)
            if match:
                end = match.start()
            else:
                end = len(self._text) if self.ended else _beginning(markers, self._text, self._at)
            text = self._text[self._at : end]
            self._at = end
            kept = text.rstrip(_SPACE) if trim else text
            if kept:
                yield "".join(space) + kept
                space = []
            if len(kept) < len(text):
                space.append(text[len(kept) :])
            if match:
                return self.take(len(match.group()))
            if self.ended:
                if space:
                    yield "".join(space)
                return None
            yield None

    def json_string(self) -> Waiting[str | None]:
        """Read a JSON string and return it with its quotes. Return None and read nothing if no
        complete string follows or it is longer than MAX_HELD_STRING characters."""
        if (yield from self.over()) or self._text[self._at] != '"':
            return None
        while True:
            end = _run_end(self._text, self._at + 1)
            if end - self._at > MAX_HELD_STRING:
                return None
            if self._text.startswith('"', end):
                return self.take(end + 1 - self._at)
            if self.ended or not _may_go_on(self._text, end):
                return None
            yield None

    def json_value(self, *markers: str) -> Texts[bool]:
        """Yield the text of one JSON value as it arrives; return whether the value is complete.

        Only strings and brackets are checked. The value is incomplete if the text ends, a string
        contains a control character, or one of `markers` follows outside of strings. The marker
        stays unread.
        """
        if (yield from self.over()):
            return False
        if self._text[self._at] not in '{["':
            return (yield from self._scalar())
        depth = 0
        while True:
            match = _outside(markers).search(self._text, self._at)
            if self.ended or not markers:
                begun = len(self._text)
            else:
                begun = _beginning(markers, self._text, self._at)
                if match and match.group() not in markers and begun <= match.start():
                    match = None
            piece = match.group() if match else ""
            depth += (piece in ("{", "[")) - (piece in ("}", "]"))
            bracket = piece in ("{", "[", "}", "]")
            end = match.start() + bracket if match else begun
            if end > self._at:
                yield self.take(end - self._at)
            if piece == '"':
                if not (yield from self._string()):
                    return False
            elif piece and not bracket:
                return False  # a marker
            if piece and depth <= 0:
                return True
            if not piece:
                if self.ended:
                    return False
                yield None

    def _string(self) -> Texts[bool]:
        """Yield a JSON string as it arrives; return whether it is complete. A quote is next."""
        yield self.take(1)
        while True:
            end = _run_end(self._text, self._at)
            whole = self._text.startswith('"', end)
            if end + whole > self._at:
                yield self.take(end + whole - self._at)
            if whole or self.ended or not _may_go_on(self._text, self._at):
                return whole
            yield None

    def _scalar(self) -> Texts[bool]:
        """Yield a number, true, false or null; return whether there is one."""
        read = False
        while True:
            match = _SCALAR_END.search(self._text, self._at)
            end = match.start() if match else len(self._text)
            if end > self._at:
                read = True
                yield self.take(end - self._at)
            if match is not None or self.ended:
                return read
            yield None


@lru_cache(256)
def _found(markers: tuple[str, ...]) -> re.Pattern[str]:
    for marker in markers:
        if any(other != marker and other.startswith(marker) for other in markers):
            raise ValueError(f"the marker {marker!r} is a prefix of another of {markers}")
    return re.compile("|".join(map(re.escape, markers)))


@lru_cache(256)
def _outside(markers: tuple[str, ...]) -> re.Pattern[str]:
    if not markers:
        return _OUTSIDE
    return re.compile(f"{_found(markers).pattern}|{_OUTSIDE.pattern}")


@lru_cache(256)
def _at_end(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """A pattern for a proper prefix of a marker at the end of a text, and its maximum length."""
    begun = {marker[:length] for marker in markers for length in range(1, len(marker))}
    pattern = "|".join(map(re.escape, sorted(begun, key=len, reverse=True)))
    return re.compile(f"(?:{pattern})\\Z" if begun else r"(?!)"), max(map(len, begun), default=0)


def _beginning(markers: tuple[str, ...], text: str, start: int) -> int:
    """Index of a proper prefix of a marker at the end of `text`; len(text) if there is none."""
    pattern, longest = _at_end(markers)
    match = pattern.search(text, max(start, len(text) - longest))
    return len(text) if match is None else match.start()


def _run_end(text: str, start: int) -> int:
    """Index at which the inside of a JSON string that starts at `start` ends so far."""
    match = _INSIDE.match(text, start)
    assert match is not None, "an empty run matches too"
    return match.end()


def _may_go_on(text: str, end: int) -> bool:
    """Whether more text may continue a string that ends at `end`, possibly within an escape."""
    return end == len(text) or (end + 1 == len(text) and text[end] == "\\")

"""The text that a parser has not read yet.

A parser is a generator that reads a Source from front to back. It waits where what it reads cannot
be told yet: it yields None, and goes on when there is more text, or when the text has ended. Each
method decides as soon as the text so far allows it, and by that text alone: that is why answers do
not depend on how they were cut. None looks at held text again for each delta, so the time is linear
in the text.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]
Texts = Generator[str | None, None, T]  # yields text that was read, or None to wait

MAX_HELD_STRING = 1024  # characters of a string that is taken whole: keys and functions' names
_SPACE = " \t\r\n"
_SPACES = re.compile(f"[{_SPACE}]+")
_OUTSIDE = re.compile(r'["{}\[\]]')  # of a JSON string: what changes the place in the value
_INSIDE = re.compile(r'(?:[^"\\\x00-\x1f]|\\.)*+', re.DOTALL)
_SCALAR_END = re.compile(r"[,\]}\s]")


class Source:
    """`ended`: no more text comes."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        self._dropped = 0  # characters before `_text`

    def push(self, text: str) -> None:
        self._dropped += self._at
        self._text = self._text[self._at :] + text if self._at else self._text + text
        self._at = 0

    @property
    def unread(self) -> str:
        return self._text[self._at :]

    @property
    def place(self) -> int:
        """How many characters are read. A text that `until` yields ends there, with the white space
        that was trimmed off it."""
        return self._dropped + self._at

    def put_back(self, text: str) -> None:
        """Make what was read last unread again."""
        self._dropped -= len(text) - self._at
        self._text, self._at = text + self._text[self._at :], 0

    def take(self, count: int) -> str:
        """The next `count` characters, or all there are."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        return text

    def run(self, pattern: re.Pattern[str]) -> str:
        """Take what `pattern`, which matches runs of any length, matches of the text so far."""
        match = pattern.match(self._text, self._at)
        return self.take(match.end() - self._at) if match else ""

    def over(self) -> Waiting[bool]:
        """Whether nothing more comes."""
        while self._at == len(self._text):
            if self.ended:
                return True
            yield None
        return False

    def skip_space(self) -> Waiting[str]:
        """Take white space, and return it."""
        space: list[str] = []
        while not (yield from self.over()) and (run := self.run(_SPACES)):
            space.append(run)
        return "".join(space)

    def starts_with(self, *options: str) -> Waiting[str | None]:
        """Take the option that comes next, if one does. No option is the beginning of another."""
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
        """Yield the text before the first of `markers`, take that marker and return it; None if the
        text ends before one. With `trim`, without the white space before a marker. No marker is the
        beginning of another."""
        space: list[str] = []  # read, and not yet known to stand before a marker
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
        """Take a JSON string, its quotes included; None, and nothing taken, if there is none, or
        none of up to MAX_HELD_STRING characters."""
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
        """Yield the text of one JSON value as it comes, and return whether it is whole.

        Only its strings and brackets are looked at. Where it breaks off, at the end of the text,
        at a control character within a string, or before one of `markers` outside of strings, it
        ends.
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
            found = match.group() if match else ""
            depth += (found in ("{", "[")) - (found in ("}", "]"))
            bracket = found in ("{", "[", "}", "]")
            end = match.start() + bracket if match else begun
            if end > self._at:
                yield self.take(end - self._at)
            if found == '"':
                if not (yield from self._string()):
                    return False
            elif found and not bracket:
                return False  # a marker
            if found and depth <= 0:
                return True
            if not found:
                if self.ended:
                    return False
                yield None

    def _string(self) -> Texts[bool]:
        """Yield a JSON string as it comes; return whether it is whole. A quote comes next."""
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
        """A number, true, false or null."""
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
            raise ValueError(f"the marker {marker!r} is the beginning of another of {markers}")
    return re.compile("|".join(map(re.escape, markers)))


@lru_cache(256)
def _outside(markers: tuple[str, ...]) -> re.Pattern[str]:
    if not markers:
        return _OUTSIDE
    return re.compile(f"{_found(markers).pattern}|{_OUTSIDE.pattern}")


@lru_cache(256)
def _at_end(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """What finds the beginning of a marker at a text's end, and how far from there it may stand."""
    begun = {marker[:length] for marker in markers for length in range(1, len(marker))}
    pattern = "|".join(map(re.escape, sorted(begun, key=len, reverse=True)))
    return re.compile(f"(?:{pattern})\\Z" if begun else r"(?!)"), max(map(len, begun), default=0)


def _beginning(markers: tuple[str, ...], text: str, start: int) -> int:
    """Where the beginning of a marker at the end of `text` stands; its end if there is none."""
    pattern, longest = _at_end(markers)
    match = pattern.search(text, max(start, len(text) - longest))
    return len(text) if match is None else match.start()


def _run_end(text: str, start: int) -> int:
    """Where the inside of a JSON string that is read from `start` ends, or breaks off."""
    match = _INSIDE.match(text, start)
    assert match is not None, "an empty run matches too"
    return match.end()


def _may_go_on(text: str, end: int) -> bool:
    """Whether a string that breaks off there may go on: with nothing yet, or half an escape."""
    return end == len(text) or (end + 1 == len(text) and text[end] == "\\")

"""The text that a parser has not read yet.

A parser is a generator that reads a Source from front to back. It waits where what it reads cannot
be told yet: it yields None, and goes on when there is more text, or when the text has ended. Each
method decides as soon as the text so far allows it, and by that text alone: that is why answers do
not depend on how they were cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]
Texts = Generator[str | None, None, T]  # yields text that was read, or None to wait

_SPACE = " \t\r\n"
_OUTSIDE = re.compile(r'["{}\[\]]')  # of a JSON string: what changes the place in the value
_INSIDE = re.compile(r'(?:[^"\\\x00-\x1f]|\\.)*', re.DOTALL)
_SCALAR_END = re.compile(r"[,\]}\s]")


class Source:
    """`ended`: no more text comes."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text if self._at else self._text + text
        self._at = 0

    @property
    def unread(self) -> str:
        return self._text[self._at :]

    def take(self, count: int) -> str:
        """The next `count` characters, or all there are."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        return text

    def over(self) -> Waiting[bool]:
        """Whether nothing more comes."""
        while self._at == len(self._text):
            if self.ended:
                return True
            yield None
        return False

    def skip_space(self) -> Waiting[None]:
        while not (yield from self.over()) and self._text[self._at] in _SPACE:
            self._at += 1

    def starts_with(self, *options: str) -> Waiting[str | None]:
        """Take the option that comes next, if one does. No option is the beginning of another."""
        while True:
            unread = self.unread
            for option in options:
                if unread.startswith(option):
                    self._at += len(option)
                    return option
            if self.ended or not any(option.startswith(unread) for option in options):
                return None
            yield None

    def until(self, *markers: str, trim: bool = False) -> Texts[str | None]:
        """Yield the text before the first of `markers`, take that marker and return it; None if the
        text ends before one. With `trim`, without the white space before a marker. No marker is the
        beginning of another."""
        found, begun = _patterns(markers)
        space = ""  # read, and not yet known to stand before something else than a marker
        while True:
            match = found.search(self._text, self._at)
            end = match.start() if match else len(self._text)
            if match is None and not self.ended:
                end = _beginning(begun, self._text, self._at)
            text = space + self._text[self._at : end]
            self._at = match.end() if match else end
            space = ""
            if trim and (match or not self.ended):
                kept = text.rstrip(_SPACE)
                space, text = text[len(kept) :], kept
            if text:
                yield text
            if match:
                return match.group()
            if self.ended:
                return None
            yield None

    def json_string(self) -> Waiting[str | None]:
        """Take a JSON string, its quotes included; None, and nothing taken, if there is none."""
        if (yield from self.over()) or self._text[self._at] != '"':
            return None
        while True:
            end = _run_end(self._text, self._at + 1)
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
        first = self._text[self._at]
        if first not in '{["':
            return (yield from self._scalar())
        depth = 0
        while True:
            match = _outside(markers).search(self._text, self._at)
            if not self.ended and markers:
                begun = _beginning(_patterns(markers)[1], self._text, self._at)
                if match and match.group() not in markers and begun <= match.start():
                    match = None
            else:
                begun = len(self._text)
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
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """One that finds the markers, and one that finds the beginning of one at a text's end."""
    for marker in markers:
        if any(other != marker and other.startswith(marker) for other in markers):
            raise ValueError(f"the marker {marker!r} is the beginning of another of {markers}")
    begun = {marker[:length] for marker in markers for length in range(1, len(marker))}
    found = "|".join(map(re.escape, markers))
    at_end = "|".join(map(re.escape, sorted(begun, key=len, reverse=True)))
    return re.compile(found), re.compile(f"(?:{at_end})\\Z" if begun else r"(?!)")


@lru_cache(256)
def _outside(markers: tuple[str, ...]) -> re.Pattern[str]:
    if not markers:
        return _OUTSIDE
    return re.compile(f"{'|'.join(map(re.escape, markers))}|{_OUTSIDE.pattern}")


def _beginning(begun: re.Pattern[str], text: str, start: int) -> int:
    """Where the beginning of a marker at the end of `text` stands; its end if there is none."""
    match = begun.search(text, start)
    return len(text) if match is None else match.start()


def _run_end(text: str, start: int) -> int:
    """Where the inside of a JSON string that is read from `start` ends, or breaks off."""
    match = _INSIDE.match(text, start)
    assert match is not None, "an empty run matches too"
    return match.end()


def _may_go_on(text: str, end: int) -> bool:
    """Whether a string that breaks off there may go on: with nothing yet, or half an escape."""
    return text[end:] in ("", "\\")

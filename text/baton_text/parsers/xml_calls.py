"""Calls between tags: content, in which one marker begins each call.

In: that marker, all markers of the family, and a function that reads one call. Out: the family's
parser.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from baton_text.parsers.parser import Parse, Piece, Pieces, Tools, content
from baton_text.parsers.source import Source

# Reads the call with this number; returns whether there was one.
ReadCall = Callable[[Source, Tools, int], Generator[Piece | None, None, bool]]


def parser_of_calls(begin: str, markers: tuple[str, ...], read_call: ReadCall) -> Parse:
    """Return a parser that calls `read_call` after each `begin`, and drops other `markers`."""

    def parse(source: Source, tools: Tools) -> Pieces:
        calls = 0
        while (marker := (yield from content(source, *markers))) is not None:
            if marker == begin:
                calls += yield from read_call(source, tools, calls)

    return parse

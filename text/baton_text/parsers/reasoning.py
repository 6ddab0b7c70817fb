"""Reasoning between two markers: <think>...</think> and its like."""

from __future__ import annotations

from baton_text.parsers.parser import Parse, Pieces, ReasoningParser, Tools, as_pieces
from baton_text.parsers.source import Source


def reasoned(parser: ReasoningParser, begun: bool, rest: Parse) -> Parse:
    """Read reasoning, where there is some, and then the rest. `begun`: see ReasoningParser."""

    def parse(source: Source, tools: Tools) -> Pieces:
        yield from source.skip_space()
        within = (yield from source.starts_with(parser.begin)) is not None
        if within or begun:
            yield from source.skip_space()
            yield from as_pieces("reasoning", source.until(parser.end, trim=True))
            yield from source.skip_space()
        yield from rest(source, tools)

    return parse

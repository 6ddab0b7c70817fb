"""Mistral, in two forms; both parsers read both:

[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]    up to tokenizer version 7
[TOOL_CALLS]name[ARGS]{...}, repeated                   from version 11; [CALL_ID] and an id may
                                                        precede [ARGS]
"""

from __future__ import annotations

import re
from collections.abc import Generator

from baton_text.parsers.json_calls import json_calls, json_form
from baton_text.parsers.parser import CallForm, Piece, Pieces, ToolParser, Tools, as_pieces, content
from baton_text.parsers.source import Source

CALLS, ID, ARGS = MARKERS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME = 256
_NAME = re.compile(r"[\w.\-]+")


def _parse(source: Source, tools: Tools) -> Pieces:
    calls = 0
    while (marker := (yield from content(source, *MARKERS))) is not None:
        if marker == CALLS:
            before = calls
            calls = yield from json_calls(source, calls, *MARKERS)
            if calls == before:
                calls += yield from _named_call(source, calls)
            yield from source.skip_space()


def _named_call(source: Source, number: int) -> Generator[Piece | None, None, bool]:
    """Read name[ARGS]{...}; return whether it is a call. If not, yield the name as content."""
    name = yield from _identifier(source)
    if not name:
        return False
    begun = False
    if len(name) <= MAX_NAME:
        marker = yield from source.starts_with(ID, ARGS)
        if marker == ID:
            yield from _identifier(source)
            marker = yield from source.starts_with(ARGS)
        begun = marker is not None or (
            not (yield from source.over()) and source.unread.startswith("{")
        )
    if not begun:
        yield Piece("content", name)
        return False
    yield Piece("call", name, number)
    yield from source.skip_space()
    yield from as_pieces("arguments", source.json_value(*MARKERS), number)
    return True


def _identifier(source: Source) -> Generator[None, None, str]:
    """Read a name or id; one longer than MAX_NAME is only read in part."""
    name = ""
    while len(name) <= MAX_NAME and not (yield from source.over()) and (run := source.run(_NAME)):
        name += run
    return name


MISTRAL_NAMED = ToolParser(
    name="mistral_v11",
    parse=_parse,
    marks=(CALLS, ARGS),
    reads_special=True,
    short_ids=True,
    form=CallForm(
        before_name=CALLS,
        before_arguments=ARGS,
        after_arguments="",
    ),
)
MISTRAL = ToolParser(
    name="mistral",
    parse=_parse,
    marks=(CALLS,),
    reads_special=True,
    short_ids=True,
    form=json_form(open=f"{CALLS}[", between=", ", close="]"),
)

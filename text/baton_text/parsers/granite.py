"""Granite 3: <|tool_call|>[{"name": ..., "arguments": {...}}, ...]

Some versions write <tool_call> instead, with or without </tool_call>. Granite 4 uses the Hermes
form.
"""

from __future__ import annotations

from baton_text.parsers.json_calls import json_calls, json_form
from baton_text.parsers.parser import Pieces, ToolParser, Tools, content
from baton_text.parsers.source import Source

BEGIN, END = "<|tool_call|>", "</tool_call>"
MARKERS = BEGIN, "<tool_call>", END


def _parse(source: Source, tools: Tools) -> Pieces:
    calls = 0
    while (marker := (yield from content(source, *MARKERS))) is not None:
        if marker != END:
            calls = yield from json_calls(source, calls, *MARKERS)
            yield from source.skip_space()


GRANITE = ToolParser(
    name="granite",
    parse=_parse,
    marks=("<|start_of_role|>", BEGIN),
    reads_special=True,
    form=json_form(
        open=f"{BEGIN}[", between=", ", close="]", also=(("<tool_call>", '[{"name": "'),)
    ),
)

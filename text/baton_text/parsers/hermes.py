"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call> for each call."""

from __future__ import annotations

from baton_text.parsers.json_calls import json_call, json_form
from baton_text.parsers.parser import Pieces, ToolParser, Tools, content
from baton_text.parsers.source import Source

BEGIN, END = "<tool_call>", "</tool_call>"


def _parse(source: Source, tools: Tools) -> Pieces:
    calls = 0
    while (marker := (yield from content(source, BEGIN, END))) is not None:
        if marker == BEGIN:
            calls += yield from json_call(source, calls, END)
            yield from source.skip_space()


HERMES = ToolParser(
    name="hermes",
    parse=_parse,
    marks=(BEGIN, '"arguments"'),
    form=json_form(f"{BEGIN}\n", f"\n{END}", between="\n"),
)

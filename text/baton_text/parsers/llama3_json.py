"""Llama 3 and similar models: the answer is {"name": ..., "parameters": {...}}.

";" or nothing separates several calls. <|python_tag|> may precede them.
"""

from __future__ import annotations

from baton_text.parsers.json_calls import json_call, json_form
from baton_text.parsers.parser import Pieces, ToolParser, Tools, content
from baton_text.parsers.source import Source

TAG = "<|python_tag|>"


def _parse(source: Source, tools: Tools) -> Pieces:
    calls = 0
    before = yield from source.skip_space()
    if (yield from source.starts_with(TAG)):
        before = yield from source.skip_space()
    while True:
        while (yield from json_call(source, calls, TAG, known=tools, before=before)):
            calls += 1
            before = ""
            yield from source.skip_space()
            if (yield from source.starts_with(";")):
                yield from source.skip_space()
        before = ""
        if (yield from content(source, TAG)) is None:
            return


LLAMA3_JSON = ToolParser(
    name="llama3_json",
    parse=_parse,
    marks=('{"name": function name, "parameters": ',),
    reads_special=True,
    form=json_form(arguments="parameters", between="; ", also=((TAG, '{"name": "'),)),
)

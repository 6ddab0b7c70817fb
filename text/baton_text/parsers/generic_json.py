"""Any model: the whole answer is one JSON call or a list of them, possibly in a code fence.

No chat template selects this parser. It reads calls of models of unknown families, and calls that
a grammar enforced because the family's own form is not JSON.
"""

from __future__ import annotations

from baton_text.parsers.json_calls import json_calls, json_form
from baton_text.parsers.parser import Pieces, ToolParser, Tools, all_content
from baton_text.parsers.source import Source

FENCE = "```"
# Neither JSON nor a code block that may hold a call.
_OTHER_START = r"([^\s\[\{`]|`{1,2}[^`]|```([^\s\[\{`j]|j[^s]))"


def _parse(source: Source, tools: Tools) -> Pieces:
    before = yield from source.skip_space()
    fence = yield from source.starts_with(FENCE)
    if fence:
        before += fence + ((yield from source.starts_with("json")) or "")
        before += yield from source.skip_space()
    if (yield from json_calls(source, 0, known=tools, before=before)):
        yield from source.skip_space()
        if fence and (yield from source.starts_with(FENCE)):
            yield from source.skip_space()
    yield from all_content(source, tools)


GENERIC_JSON = ToolParser(
    name="json",
    parse=_parse,
    marks=(),
    form=json_form(
        arguments="parameters", open="[", between=", ", close="]", other_start=_OTHER_START
    ),
)

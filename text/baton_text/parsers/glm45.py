"""GLM 4.5 to 4.7: <tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each
argument, then </tool_call>."""

from __future__ import annotations

from collections.abc import Generator

from baton_text.parsers.json_calls import is_name
from baton_text.parsers.parser import (
    ArgumentForm,
    CallForm,
    Piece,
    ToolParser,
    Tools,
    content,
    whole,
)
from baton_text.parsers.source import Source
from baton_text.parsers.xml_calls import parser_of_calls
from baton_text.parsers.xml_values import Arguments

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_MARKERS = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)


def _read_call(source: Source, tools: Tools, number: int) -> Generator[Piece | None, None, bool]:
    yield from source.skip_space()
    text, marker_after = yield from whole(source.until("\n", *_MARKERS))
    name = text.strip()
    if marker_after not in ("\n", KEY, END) or not is_name(name):
        if text:
            yield Piece("content", text)
        source.put_back(marker_after or "")
        return False
    yield Piece("call", name, number)
    if marker_after != "\n":
        source.put_back(marker_after)
    yield from source.skip_space()
    arguments = Arguments(tools, name, number)
    while (marker := (yield from content(source, *_MARKERS))) not in (BEGIN, END, None):
        if marker == KEY:
            key, marker_after = yield from whole(source.until(*_MARKERS))
            if marker_after == KEY_END:
                yield from source.skip_space()
                marker_after = yield from source.starts_with(VALUE)
            if marker_after != VALUE:
                source.put_back(marker_after or "")
                continue
            key = key.strip()
            value, complete = yield from arguments.value(source, key, VALUE_END)
            if complete:
                yield from arguments.add(key, value)
                yield from source.skip_space()
    if marker is not None:
        yield arguments.close()
    if marker == BEGIN:
        source.put_back(marker)
    yield from source.skip_space()
    return True


GLM45 = ToolParser(
    name="glm45",
    parse=parser_of_calls(BEGIN, _MARKERS, _read_call),
    marks=(BEGIN, KEY, VALUE),
    form=CallForm(
        before_name=BEGIN,
        before_arguments="\n",
        after_arguments=END,
        between="\n",
        arguments=ArgumentForm(
            before_key=KEY,
            after_key=f"{KEY_END}\n{VALUE}",
            after_value=f"{VALUE_END}\n",
            plain_strings=True,
        ),
    ),
)

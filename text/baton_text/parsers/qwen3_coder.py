"""Qwen3-Coder: <tool_call>, <function=NAME>, <parameter=KEY>VALUE</parameter> for each argument,
</function>, </tool_call>. These models sometimes omit <tool_call>."""

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
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_MARKERS = (BEGIN, END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)


def _read_call(source: Source, tools: Tools, number: int) -> Generator[Piece | None, None, bool]:
    name, marker_after = yield from whole(source.until(">", "\n", *_MARKERS))
    if marker_after != ">" or not is_name(name):
        if name:
            yield Piece("content", name)
        source.put_back("" if marker_after in (">", None) else marker_after)
        return False
    yield Piece("call", name, number)
    yield from source.skip_space()
    arguments = Arguments(tools, name, number)
    ends = (BEGIN, END, FUNCTION, FUNCTION_END, None)
    while (marker := (yield from content(source, *_MARKERS))) not in ends:
        if marker == PARAMETER:
            key, marker_after = yield from whole(source.until(">", "\n", *_MARKERS))
            if marker_after != ">":
                source.put_back(marker_after or "")
                continue
            value, complete = yield from arguments.value(source, key, PARAMETER_END)
            if complete:
                yield from arguments.add(key, value.removeprefix("\n").removesuffix("\n"))
                yield from source.skip_space()
    if marker is not None:
        yield arguments.close()
    if marker in (BEGIN, FUNCTION):
        source.put_back(marker)
    yield from source.skip_space()
    return True


QWEN3_CODER = ToolParser(
    name="qwen3_coder",
    parse=parser_of_calls(FUNCTION, _MARKERS, _read_call),
    marks=(BEGIN, FUNCTION, PARAMETER),
    form=CallForm(
        before_name=f"{BEGIN}\n{FUNCTION}",
        before_arguments=">\n",
        after_arguments=f"{FUNCTION_END}\n{END}",
        between="\n",
        arguments=ArgumentForm(
            before_key=PARAMETER,
            after_key=">\n",
            after_value=f"\n{PARAMETER_END}\n",
            plain_strings=True,
        ),
        also=((FUNCTION, ""),),
    ),
)

"""DeepSeek: special tokens enclose each call; the name precedes the arguments.

V3 and R1 write the arguments in a Markdown code block, V3.1 and V3.2-Exp as plain JSON.
"""

from __future__ import annotations

from collections.abc import Generator

from baton_text.parsers.json_calls import arguments_call, is_name
from baton_text.parsers.parser import CallForm, Piece, Pieces, ToolParser, Tools, content, whole
from baton_text.parsers.source import Source

CALLS_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
_JSON, _FENCE = "```json", "```"


def _v31(source: Source, tools: Tools) -> Pieces:
    calls = 0
    while (marker := (yield from content(source, *_MARKERS))) is not None:
        if marker != CALL_BEGIN:
            continue
        text, marker_after = yield from whole(source.until(*_MARKERS))
        if marker_after == SEPARATOR and is_name(text.strip()):
            calls += yield from arguments_call(source, text.strip(), calls, *_MARKERS)
            continue
        if text:
            yield Piece("content", text)
        source.put_back(marker_after or "")


def _v3(source: Source, tools: Tools) -> Pieces:
    calls = 0
    while (marker := (yield from content(source, *_MARKERS))) is not None:
        if marker != CALL_BEGIN:
            continue
        text, marker_after = yield from whole(source.until(*_MARKERS))
        if marker_after == SEPARATOR:  # `text` is the tool's type, which is always "function"
            yield from source.skip_space()
            text, marker_after = yield from whole(source.until("\n", _JSON, *_MARKERS))
            if marker_after is not None and is_name(text.strip()):
                source.put_back(marker_after)
                calls += yield from _block_call(source, text.strip(), calls)
                continue
        if text:
            yield Piece("content", text)
        source.put_back(marker_after or "")


def _block_call(source: Source, name: str, number: int) -> Generator[Piece | None, None, bool]:
    """Read a call's code block after its name; models sometimes omit the fences."""
    space = yield from source.skip_space()
    if (yield from source.starts_with(_JSON)) is not None:
        called = yield from arguments_call(source, name, number, _FENCE, *_MARKERS)
        yield from source.skip_space()
        yield from source.starts_with(_FENCE)
        return called
    if source.ended and _JSON.startswith(source.unread):
        source.take(len(_JSON))  # the answer ends within the opening fence
    else:
        source.put_back(space)
    return (yield from arguments_call(source, name, number, *_MARKERS))


DEEPSEEK_V3 = ToolParser(
    name="deepseek_v3",
    parse=_v3,
    marks=(CALLS_BEGIN, SEPARATOR, _JSON),
    form=CallForm(
        open=CALLS_BEGIN,
        before_name=f"{CALL_BEGIN}function{SEPARATOR}",
        before_arguments=f"\n{_JSON}\n",
        after_arguments=f"\n{_FENCE}{CALL_END}",
        between="\n",
        close=CALLS_END,
        also=((CALL_BEGIN, f"function{SEPARATOR}"),),
    ),
)
DEEPSEEK_V31 = ToolParser(
    name="deepseek_v31",
    parse=_v31,
    marks=(CALLS_BEGIN, SEPARATOR),
    form=CallForm(
        open=CALLS_BEGIN,
        before_name=CALL_BEGIN,
        before_arguments=SEPARATOR,
        after_arguments=CALL_END,
        close=CALLS_END,
        also=((CALL_BEGIN, ""),),
    ),
)

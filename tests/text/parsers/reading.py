"""An answer as it is read at once, and cut into deltas in every way."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from baton_text.parsers.parser import Piece, Reader, ReasoningParser, ToolParser, Tools
from baton_text.parsers.registry import reader

# The functions that the tables' answers call.
TOOLS: Tools = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "near": {"type": "array"},
            "more": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
Answer = dict[str, Any]


def read(
    text: str,
    tool_parser: ToolParser | None = None,
    reasoning_parser: ReasoningParser | None = None,
    *,
    begun: bool = False,
    tools: Tools = TOOLS,
) -> Answer:
    """{"reasoning", "content", "calls": [(name, arguments as text)]}, without what is empty. Each
    way to cut the text must give the same."""

    def new() -> Reader:
        return reader(tools, tool_parser, reasoning_parser, begun=begun)

    whole = _joined(_pieces(new(), [text]))
    assert _joined(_pieces(new(), list(text))) == whole
    for at in range(1, min(len(text), 200)):
        assert _joined(_pieces(new(), [text[:at], text[at:]])) == whole, at
    _same_at_each_place(new, text)
    generator = random.Random(len(text))
    for _ in range(5):
        cuts = sorted(generator.choices(range(len(text) + 1), k=6))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert _joined(_pieces(new(), parts)) == whole
    return whole


def _same_at_each_place(new: Callable[[], Reader], text: str) -> None:
    """What is told after a part of the text follows from that part; nothing told is empty."""
    slow, told = new(), list[Piece]()
    for place, char in enumerate(text, start=1):
        told += slow.push(char)
        if place <= 200:
            assert _joined(new().push(text[:place])) == _joined(told), place
    told += slow.finish()
    calls = [piece.call for piece in told if piece.kind == "call"]
    assert calls == list(range(len(calls))), "calls are numbered as they come"
    assert all(piece.text for piece in told), "no piece is empty"


def _pieces(one: Reader, parts: list[str]) -> list[Piece]:
    return [piece for part in parts for piece in one.push(part)] + one.finish()


def _joined(pieces: list[Piece]) -> Answer:
    answer: Answer = {}
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append((piece.text, ""))
        elif piece.kind == "arguments":
            name, text = calls[piece.call]
            calls[piece.call] = name, text + piece.text
        else:
            answer[piece.kind] = answer.get(piece.kind, "") + piece.text
    return answer | ({"calls": calls} if calls else {})

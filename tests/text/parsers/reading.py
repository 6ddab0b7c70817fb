"""Read an answer in one push and in many splits, which must all give the same result."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from baton_text.parsers.parser import Piece, Reader, ReasoningParser, ToolParser, Tools
from baton_text.parsers.registry import reader

# The functions that the answers in the tests' tables call.
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
    """The parsed answer: {"reasoning", "content", "calls": [(name, arguments as text)]}, without
    empty fields. Asserts that every split of the text gives the same answer."""

    def new() -> Reader:
        return reader(tools, tool_parser, reasoning_parser, begun=begun)

    whole = _joined(_pieces(new(), [text]))
    _same_at_each_place(new, text, whole)
    generator = random.Random(len(text))
    for _ in range(5):
        cuts = sorted(generator.choices(range(len(text) + 1), k=6))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert _joined(_pieces(new(), parts)) == whole
    return whole


def _same_at_each_place(new: Callable[[], Reader], text: str, whole: Answer) -> None:
    """Assert that the pieces after each prefix depend only on that prefix, and those of both halves
    are the whole answer; none is empty."""
    slow, found = new(), list[Piece]()
    for place, char in enumerate(text, start=1):
        found += slow.push(char)
        if place <= 200:
            halves = new()
            before = halves.push(text[:place])
            assert _joined(before) == _joined(found), place
            if place < len(text):
                assert _joined(before + _pieces(halves, [text[place:]])) == whole, place
    found += slow.finish()
    assert _joined(found) == whole
    calls = [piece.call for piece in found if piece.kind == "call"]
    assert calls == list(range(len(calls))), "calls are numbered as they come"
    assert all(piece.text for piece in found), "no piece is empty"


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

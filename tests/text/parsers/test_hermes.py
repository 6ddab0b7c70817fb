"""Answers of Hermes and Qwen, as their chat templates write them."""

from __future__ import annotations

import pytest

from baton_text.parsers.hermes import HERMES
from tests.text.parsers.reading import Answer, read

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARIS = ("weather", '{"city": "Paris"}')
ANSWERS: dict[str, tuple[str, Answer]] = {
    "text alone": ("It is sunny.\n", {"content": "It is sunny.\n"}),
    "one call": (CALL, {"calls": [PARIS]}),
    "two calls": (f"{CALL}\n{CALL}", {"calls": [PARIS, PARIS]}),
    "text before": (f"Let me see.\n\n{CALL}", {"content": "Let me see.", "calls": [PARIS]}),
    "text behind": (f"{CALL}\nDone.", {"content": "Done.", "calls": [PARIS]}),
    "no line ends": (CALL.replace("\n", ""), {"calls": [PARIS]}),
    "arguments first": (
        '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>',
        {"calls": [PARIS]},
    ),
    "no arguments": ('<tool_call>{"name": "now"}</tool_call>', {"calls": [("now", "{}")]}),
    "markers and escapes in a text": (
        '<tool_call>{"name": "weather", "arguments": {"city": "\\"</tool_call>\\\\"}}</tool_call>',
        {"calls": [("weather", '{"city": "\\"</tool_call>\\\\"}')]},
    ),
    "nested arguments": (
        '<tool_call>{"name": "weather", "arguments": {"more": {"a": [1, {"b": "}"}]}}}</tool_call>',
        {"calls": [("weather", '{"more": {"a": [1, {"b": "}"}]}}')]},
    ),
    "broken off in the arguments": (
        CALL[:60],
        {"calls": [("weather", '{"city": "Paris"'[: 60 - CALL.index('{"city')])]},
    ),
    "broken off before the name": ('<tool_call>\n{"na', {"content": '{"na'}),
    "not JSON": ("<tool_call>weather in Paris</tool_call>", {"content": "weather in Paris"}),
    "arguments without an end": (
        '<tool_call>{"name": "weather", "arguments": {"days": 3</tool_call>Well.',
        {"content": "Well.", "calls": [("weather", '{"days": 3')]},
    ),
    "the beginning of a marker": ("a < b <tool_", {"content": "a < b <tool_"}),
    "a marker of nothing": ("a</tool_call>b", {"content": "ab"}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str) -> None:
    text, answer = ANSWERS[name]
    assert read(text, HERMES) == answer

"""Answers of Qwen3-Coder, as its chat template writes them."""

from __future__ import annotations

import pytest

from baton_text.parsers.qwen3_coder import QWEN3_CODER
from baton_text.parsers.registry import REASONING_PARSERS
from tests.text.parsers.reading import Answer, read


def function(name: str, *arguments: tuple[str, str]) -> str:
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<function={name}>\n{pairs}</function>"


def call(name: str, *arguments: tuple[str, str]) -> str:
    return f"<tool_call>\n{function(name, *arguments)}\n</tool_call>"


ONE = call("weather", ("city", "Paris"))
TWO = call("weather", ("city", "Paris"), ("days", "3"))
PARIS = ("weather", '{"city": "Paris"}')
ANSWERS: dict[str, tuple[str, Answer]] = {
    "text alone": ("It is < sunny.\n", {"content": "It is < sunny.\n"}),
    "one call": (ONE, {"calls": [PARIS]}),
    "no line ends": (ONE.replace("\n", ""), {"calls": [PARIS]}),
    "no tool_call before the function": (
        ONE.removeprefix("<tool_call>\n"),
        {"calls": [PARIS]},
    ),
    "a key twice": (
        call("weather", ("city", "Paris"), ("days", "3"), ("city", "Rome")),
        {"calls": [("weather", '{"city": "Paris", "days": 3}')]},
    ),
    "two calls": (f"{ONE}\n{ONE}", {"calls": [PARIS, PARIS]}),
    "two functions in one call": (
        f"<tool_call>\n{function('now')}\n{function('now')}\n</tool_call>",
        {"calls": [("now", "{}")] * 2},
    ),
    "text before": (f"Let me see.\n\n{ONE}", {"content": "Let me see.", "calls": [PARIS]}),
    "text behind": (f"{ONE}\nDone.", {"content": "Done.", "calls": [PARIS]}),
    "no arguments": (call("now"), {"calls": [("now", "{}")]}),
    "values of each type": (
        call(
            *("weather", ("city", "3"), ("days", "3"), ("metric", "True")),
            *(("near", '["a", 1]'), ("more", '{"a": {"b": null}}'), ("other", "None")),
        ),
        {
            "calls": [
                (
                    "weather",
                    '{"city": "3", "days": 3, "metric": true, "near": ["a", 1],'
                    ' "more": {"a": {"b": null}}, "other": null}',
                )
            ]
        },
    ),
    "markers, quotes and line ends in a text": (
        call("weather", ("city", '\n"a"\\\n</function></tool_call><parameter=x>\n')),
        {
            "calls": [
                ("weather", '{"city": "\\n\\"a\\"\\\\\\n</function></tool_call><parameter=x>\\n"}')
            ]
        },
    ),
    "markers in a JSON string": (
        call("weather", ("near", '["</parameter>", "\\"</parameter>"]'), ("city", '["</parameter')),
        {
            "calls": [
                (
                    "weather",
                    '{"near": ["</parameter>", "\\"</parameter>"], "city": "[\\"</parameter"}',
                )
            ]
        },
    ),
    "a JSON string without an end": (
        call("weather", ("near", '["a'), ("city", "Paris")),
        {"calls": [("weather", '{"near": "[\\"a", "city": "Paris"}')]},
    ),
    "broken off in a value": (TWO[: TWO.index("3")], {"calls": [("weather", PARIS[1][:-1])]}),
    "broken off in a key": (ONE[: ONE.index("ty>")], {"calls": [("weather", "")]}),
    "broken off in the name": (ONE[: ONE.index("ther")], {"content": "wea"}),
    "a function without an end": (
        ONE.replace("</function>\n", ""),
        {"calls": [PARIS]},
    ),
    "a call without an end": (
        ONE.replace("</function>\n</tool_call>", "") + ONE,
        {"calls": [PARIS, PARIS]},
    ),
    "a key without an end": (
        "<tool_call><function=weather><parameter=days\n<parameter=city>Paris</parameter>"
        "</function></tool_call>",
        {"calls": [PARIS]},
    ),
    "no name": ("<tool_call><function=></function></tool_call>Well.", {"content": "Well."}),
    "a name without an end": ("<function=weather in\nParis", {"content": "weather in\nParis"}),
    "another family's call": (
        '<tool_call>\n{"name": "weather"}\n</tool_call>',
        {"content": '{"name": "weather"}'},
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str) -> None:
    text, answer = ANSWERS[name]
    assert read(text, QWEN3_CODER) == answer


def test_reasoning_before_a_call() -> None:
    parser = REASONING_PARSERS["qwen3"]
    answer = {"reasoning": "Hm.", "content": "So:", "calls": [PARIS]}
    assert read(f"Hm.\n</think>\n\nSo:\n{ONE}", QWEN3_CODER, parser, begun=True) == answer
    answer = {"reasoning": "Hm.", "calls": [PARIS]}
    assert read(f"<think>\nHm.\n{ONE}", QWEN3_CODER, parser) == answer

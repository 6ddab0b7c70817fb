"""Answers of GLM 4.5 to 4.7, as their chat templates write them."""

from __future__ import annotations

import pytest

from baton_text.parsers.glm45 import GLM45
from baton_text.parsers.registry import REASONING_PARSERS
from tests.text.parsers.reading import Answer, read


def call(name: str, *arguments: tuple[str, str], line: str = "\n") -> str:
    pairs = "".join(
        f"{line}<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>"
        for key, value in arguments
    )
    return f"<tool_call>{name}{pairs}{line}</tool_call>"


ONE = call("weather", ("city", "Paris"))
TWO = call("weather", ("city", "Paris"), ("days", "3"))
PARIS = ("weather", '{"city": "Paris"}')
ANSWERS: dict[str, tuple[str, Answer]] = {
    "text alone": ("It is sunny.\n", {"content": "It is sunny.\n"}),
    "one call": (ONE, {"calls": [PARIS]}),
    "no line ends": (call("weather", ("city", "Paris"), line=""), {"calls": [PARIS]}),
    "a key twice": (
        call("weather", ("city", "Paris"), ("days", "3"), ("city", "Rome")),
        {"calls": [("weather", '{"city": "Paris", "days": 3}')]},
    ),
    "two calls": (f"{ONE}\n{ONE}", {"calls": [PARIS, PARIS]}),
    "text before": (f"\nLet me see.\n{ONE}", {"content": "\nLet me see.", "calls": [PARIS]}),
    "text behind": (f"{ONE}\nDone.", {"content": "Done.", "calls": [PARIS]}),
    "no arguments": (call("now"), {"calls": [("now", "{}")]}),
    "no arguments and no line end": (call("now", line=""), {"calls": [("now", "{}")]}),
    "values of each type": (
        call(
            *("weather", ("city", "3"), ("days", " 3 "), ("metric", "true")),
            *(("near", '["a", 1]'), ("more", '{"a": {"b": null}}'), ("other", "x y")),
        ),
        {
            "calls": [
                (
                    "weather",
                    '{"city": "3", "days": 3, "metric": true, "near": ["a", 1],'
                    ' "more": {"a": {"b": null}}, "other": "x y"}',
                )
            ]
        },
    ),
    "markers, quotes and line ends in a text": (
        call("weather", ("city", ' "a"\n</tool_call><arg_key>\\ ')),
        {"calls": [("weather", '{"city": " \\"a\\"\\n</tool_call><arg_key>\\\\ "}')]},
    ),
    "no JSON where JSON is asked for": (
        call("weather", ("days", "three"), ("near", "[1,"), ("more", "NaN")),
        {"calls": [("weather", '{"days": "three", "near": "[1,", "more": "NaN"}')]},
    ),
    "a marker in a JSON string": (
        call("weather", ("near", '["</arg_value>"]'), ("city", "Paris")),
        {"calls": [("weather", '{"near": ["</arg_value>"], "city": "Paris"}')]},
    ),
    "broken off in a value": (TWO[: TWO.index("3")], {"calls": [("weather", PARIS[1][:-1])]}),
    "broken off in a key": (ONE[: ONE.index("ty<")], {"calls": [("weather", "")]}),
    "broken off in the name": (ONE[: ONE.index("ther")], {"content": "wea"}),
    "broken off before the end": (
        ONE[:-3],
        {"content": "</tool_ca", "calls": [("weather", PARIS[1][:-1])]},
    ),
    "a call without an end": (ONE.removesuffix("\n</tool_call>") + ONE, {"calls": [PARIS, PARIS]}),
    "a key without a value": (
        "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_key>city</arg_key>"
        "<arg_value>Paris</arg_value></tool_call>",
        {"calls": [PARIS]},
    ),
    "text between the arguments": (
        "<tool_call>weather\nwell<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        {"content": "well", "calls": [PARIS]},
    ),
    "no name": ("<tool_call></tool_call>Well.", {"content": "Well."}),
    "another family's call": (
        '<tool_call>\n{"name": "weather"}\n</tool_call>',
        {"content": '{"name": "weather"}'},
    ),
    "markers of nothing": ("a</arg_value>b<arg_key>c", {"content": "abc"}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str) -> None:
    text, answer = ANSWERS[name]
    assert read(text, GLM45) == answer


def test_reasoning_before_a_call() -> None:
    answer = {"reasoning": "Hm.", "content": "So:", "calls": [PARIS]}
    assert read(f"\n<think>Hm.</think>\nSo:\n{ONE}", GLM45, REASONING_PARSERS["glm45"]) == answer

"""Answers of DeepSeek's V3 and R1, and of V3.1 and V3.2-Exp, as their chat templates write them."""

from __future__ import annotations

import pytest

from baton_text.parsers.deepseek import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    SEPARATOR,
)
from baton_text.parsers.registry import REASONING_PARSERS
from tests.text.parsers.reading import Answer, read

ARGUMENTS = '{"city": "Paris"}'
PARIS = ("weather", ARGUMENTS)


def v3(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def v31(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"


def calls(*each: str, between: str = "") -> str:
    return f"{CALLS_BEGIN}{between.join(each)}{CALLS_END}"


ONE_V3, ONE_V31 = calls(v3("weather", ARGUMENTS)), calls(v31("weather", ARGUMENTS))
ESCAPED = f'{{"city": "\\"{CALL_END}\\\\ ```"}}'
NESTED = '{"more": {"a": [1, {"b": "}"}]}}'
V3: dict[str, tuple[str, Answer]] = {
    "text alone": ("It is sunny.\n", {"content": "It is sunny.\n"}),
    "one call": (ONE_V3, {"calls": [PARIS]}),
    "two calls": (
        calls(v3("weather", ARGUMENTS), v3("now", "{}"), between="\n"),
        {"calls": [PARIS, ("now", "{}")]},
    ),
    "text before": (f"Let me see.\n\n{ONE_V3}", {"content": "Let me see.", "calls": [PARIS]}),
    "text behind": (f"{ONE_V3}\nDone.", {"content": "Done.", "calls": [PARIS]}),
    "empty arguments": (calls(v3("now", "")), {"calls": [("now", "{}")]}),
    "no arguments": (
        calls(f"{CALL_BEGIN}function{SEPARATOR}now{CALL_END}"),
        {"calls": [("now", "{}")]},
    ),
    "no block": (
        calls(f"{CALL_BEGIN}function{SEPARATOR}weather\n{ARGUMENTS}{CALL_END}"),
        {"calls": [PARIS]},
    ),
    "a block on the name's line": (
        calls(f"{CALL_BEGIN}function{SEPARATOR}weather```json{ARGUMENTS}```{CALL_END}"),
        {"calls": [PARIS]},
    ),
    "markers and escapes in a text": (
        calls(v3("weather", ESCAPED)),
        {"calls": [("weather", ESCAPED)]},
    ),
    "nested arguments": (calls(v3("weather", NESTED)), {"calls": [("weather", NESTED)]}),
    "broken off in the arguments": (
        ONE_V3[: ONE_V3.index("Paris")],
        {"calls": [("weather", '{"city": "')]},
    ),
    "broken off behind the name": (
        ONE_V3[: ONE_V3.index("json")],
        {"calls": [("weather", "")]},
    ),
    "broken off in the name": (ONE_V3[: ONE_V3.index("ther")], {"content": "wea"}),
    "broken off in a marker": (f"Well {CALLS_BEGIN[:4]}", {"content": f"Well {CALLS_BEGIN[:4]}"}),
    "arguments without an end": (
        ONE_V3.replace("}\n```", "") + "Well.",
        {"content": "Well.", "calls": [("weather", ARGUMENTS[:-1])]},
    ),
    "no name": (calls(v3("", ARGUMENTS)), {"content": f"```json\n{ARGUMENTS}\n```"}),
    "not JSON": (
        calls(f"{CALL_BEGIN}function{SEPARATOR}weather\nin Paris{CALL_END}"),
        {"content": "weather\nin Paris"},
    ),
    "a block of no JSON": (
        calls(v3("weather", "in Paris")),
        {"content": "weather\nin Paris\n```"},
    ),
    "no separator": (f"{CALLS_BEGIN}{CALL_BEGIN}weather{CALL_END}.", {"content": "weather."}),
}
V31: dict[str, tuple[str, Answer]] = {
    "text alone": ("It is sunny.\n", {"content": "It is sunny.\n"}),
    "one call": (ONE_V31, {"calls": [PARIS]}),
    "two calls": (
        calls(v31("weather", ARGUMENTS), v31("now", "{}")),
        {"calls": [PARIS, ("now", "{}")]},
    ),
    "text before": (f"Let me see.\n\n{ONE_V31}", {"content": "Let me see.", "calls": [PARIS]}),
    "text behind": (f"{ONE_V31}\nDone.", {"content": "Done.", "calls": [PARIS]}),
    "no arguments": (calls(v31("now", "")), {"calls": [("now", "{}")]}),
    "markers and escapes in a text": (
        calls(v31("weather", ESCAPED)),
        {"calls": [("weather", ESCAPED)]},
    ),
    "nested arguments": (calls(v31("weather", NESTED)), {"calls": [("weather", NESTED)]}),
    "broken off in the arguments": (
        ONE_V31[: ONE_V31.index("Paris")],
        {"calls": [("weather", '{"city": "')]},
    ),
    "broken off behind the name": (
        ONE_V31[: ONE_V31.index(ARGUMENTS)],
        {"calls": [("weather", "")]},
    ),
    "broken off in the name": (ONE_V31[: ONE_V31.index("ther")], {"content": "wea"}),
    "arguments without an end": (
        ONE_V31.replace("}", "") + "Well.",
        {"content": "Well.", "calls": [("weather", ARGUMENTS[:-1])]},
    ),
    "no name": (calls(v31("", ARGUMENTS)), {"content": ARGUMENTS}),
    "not JSON": (calls(v31("weather", " in Paris")), {"content": "weather in Paris"}),
    "a name of two words": (calls(v31("the weather", "{}")), {"content": "the weather{}"}),
}


@pytest.mark.parametrize("name", V3)
def test_answers_of_v3(name: str) -> None:
    text, answer = V3[name]
    assert read(text, DEEPSEEK_V3) == answer


@pytest.mark.parametrize("name", V31)
def test_answers_of_v31(name: str) -> None:
    text, answer = V31[name]
    assert read(text, DEEPSEEK_V31) == answer


def test_reasoning_before_a_call() -> None:
    parser = REASONING_PARSERS["deepseek_r1"]
    answer = {"reasoning": "Hm.", "content": "So:", "calls": [PARIS]}
    assert read(f"Hm.\n</think>\nSo:{ONE_V3}", DEEPSEEK_V3, parser, begun=True) == answer
    assert read(f"<think>Hm.</think>So:{ONE_V31}", DEEPSEEK_V31, parser) == answer

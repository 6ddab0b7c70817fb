"""Answers of the families whose calls are JSON, as their chat templates write them."""

from __future__ import annotations

import json

import pytest

from baton_text.parsers.parser import ToolParser
from baton_text.parsers.registry import TOOL_PARSERS
from tests.text.parsers.reading import Answer, read

Answers = dict[str, tuple[str, Answer]]
PARIS = ("weather", '{"city": "Paris"}')
NOW = ("now", "{}")
ODD = '{"city": "\\"}]</tool_call>[TOOL_CALLS]\\\\", "more": {"a": [1, {"b": "}"}]}}'


def named(name: str, arguments: str, key: str) -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


CALL = named(*PARIS, "parameters")
GENERIC: Answers = {
    "text alone": ("It is sunny.\n", {"content": "It is sunny.\n"}),
    "one call": (CALL, {"calls": [PARIS]}),
    "arguments by their other name": (named(*PARIS, "arguments"), {"calls": [PARIS]}),
    "a list": (f"[{CALL}, {named(*NOW, 'parameters')}]", {"calls": [PARIS, NOW]}),
    "a list over lines": (f"\n[\n  {CALL} ,\n{CALL}\n]\n", {"calls": [PARIS, PARIS]}),
    "within a fence": (f"```json\n{CALL}\n```\n", {"calls": [PARIS]}),
    "within a fence of no language": (f"```\n[{CALL}]```", {"calls": [PARIS]}),
    "text before": (f"So: {CALL}", {"content": f"So: {CALL}"}),
    "text behind": (f"{CALL}\nDone.", {"content": "Done.", "calls": [PARIS]}),
    "no arguments": ('{"name": "now"}', {"calls": [NOW]}),
    "arguments first": (
        '{"arguments": {"city": "Paris"}, "name": "weather"}',
        {"calls": [PARIS]},
    ),
    "nested values, and brackets in texts": (
        named("weather", ODD, "parameters"),
        {"calls": [("weather", ODD)]},
    ),
    "an unknown function": (
        ' {"name": "rain", "parameters": {}}',
        {"content": ' {"name": "rain", "parameters": {}}'},
    ),
    "an unknown function in a list": (
        f'[{CALL}, {{"name": "rain"}}]',
        {"calls": [PARIS], "content": '{"name": "rain"}]'},
    ),
    "another object": ('{"city": "Paris"}', {"content": '{"city": "Paris"}'}),
    "other lists": ("[1, 2]", {"content": "[1, 2]"}),
    "an empty list": ("```json\n[]\n```", {"content": "```json\n[]\n```"}),
    "broken off in the arguments": (CALL[:-5], {"calls": [("weather", '{"city": "Par')]}),
    "broken off before the name": ('[{"na', {"content": '[{"na'}),
    "a very long key": (f'{{"{"a" * 2000}": 1}}', {"content": f'{{"{"a" * 2000}": 1}}'}),
    "white space alone": (" \n", {"content": " \n"}),
}
LLAMA: Answers = {
    "text alone": ("It is {sunny}.", {"content": "It is {sunny}."}),
    "one call": (CALL, {"calls": [PARIS]}),
    "behind the tag": (f"<|python_tag|>{CALL}", {"calls": [PARIS]}),
    "two calls": (f"{CALL}; {named(*NOW, 'parameters')}", {"calls": [PARIS, NOW]}),
    "two calls side by side": (f"\n{CALL}{CALL}", {"calls": [PARIS, PARIS]}),
    "text before": (f"So: {CALL}", {"content": f"So: {CALL}"}),
    "text before the tag": (f"So: <|python_tag|>{CALL}", {"content": "So:", "calls": [PARIS]}),
    "text behind": (f"{CALL} Done.", {"content": "Done.", "calls": [PARIS]}),
    "no arguments": ('{"name": "now"}', {"calls": [NOW]}),
    "arguments first": ('{"parameters": {"city": "Paris"}, "name": "weather"}', {"calls": [PARIS]}),
    "with its type": (
        '{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}',
        {"calls": [PARIS]},
    ),
    "nested values, and markers in texts": (
        named("weather", ODD.replace("[TOOL_CALLS]", "<|python_tag|>; "), "parameters"),
        {"calls": [("weather", ODD.replace("[TOOL_CALLS]", "<|python_tag|>; "))]},
    ),
    "an unknown function": (
        '{"name": "rain", "parameters": {}}',
        {"content": '{"name": "rain", "parameters": {}}'},
    ),
    "code behind the tag": ("<|python_tag|>print(1)", {"content": "print(1)"}),
    "broken off in the arguments": (CALL[:-5], {"calls": [("weather", '{"city": "Par')]}),
    "broken off before the name": ('<|python_tag|>{"name', {"content": '{"name'}),
    "the beginning of a tag": ("a <|pyth", {"content": "a <|pyth"}),
}
LISTED = f"[TOOL_CALLS][{named(*PARIS, 'arguments')}]"
NAMED = '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}'
MISTRAL: Answers = {
    "text alone": ("a[1] = [TOOL_]", {"content": "a[1] = [TOOL_]"}),
    "one call": (LISTED, {"calls": [PARIS]}),
    "two calls, with ids and spaces": (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}, '
        '{"name": "now", "arguments": {}, "id": "VvvODy9mU"}]',
        {"calls": [PARIS, NOW]},
    ),
    "text before and behind": (
        f"So:\n{LISTED}\nDone.",
        {"content": "So:Done.", "calls": [PARIS]},
    ),
    "no arguments": ('[TOOL_CALLS][{"name": "now"}]', {"calls": [NOW]}),
    "arguments first": (
        '[TOOL_CALLS][{"arguments": {"city": "Paris"}, "name": "weather"}]',
        {"calls": [PARIS]},
    ),
    "nested values, and markers in texts": (
        f"[TOOL_CALLS][{named('weather', ODD, 'arguments')}]",
        {"calls": [("weather", ODD)]},
    ),
    "an unknown function": (LISTED.replace("weather", "rain"), {"calls": [("rain", PARIS[1])]}),
    "broken off in the arguments": (LISTED[:-6], {"calls": [("weather", '{"city": "Par')]}),
    "broken off before the name": ('[TOOL_CALLS][{"na', {"content": '[{"na'}),
    "not JSON": ("[TOOL_CALLS]?", {"content": "?"}),
    "a call by name": (NAMED, {"calls": [PARIS]}),
    "two calls by name": (
        f"So: {NAMED}[TOOL_CALLS]now[ARGS]{{}}",
        {
            "content": "So:",
            "calls": [PARIS, NOW],
        },
    ),
    "a call by name, with an id": (
        NAMED.replace("[ARGS]", "[CALL_ID]VvvODy9mT[ARGS]"),
        {"calls": [PARIS]},
    ),
    "a call by name, without a marker": (NAMED.replace("[ARGS]", ""), {"calls": [PARIS]}),
    "nested values and markers in texts, by name": (
        f"[TOOL_CALLS]weather[ARGS]{ODD} ",
        {"calls": [("weather", ODD)]},
    ),
    "arguments without an end, by name": (
        '[TOOL_CALLS]weather[ARGS]{"days": 3[TOOL_CALLS]now[ARGS]{}',
        {"calls": [("weather", '{"days": 3'), NOW]},
    ),
    "broken off within a name": ("[TOOL_CALLS]wea", {"content": "wea"}),
    "broken off behind an id": ("[TOOL_CALLS]now[CALL_ID]Vvv", {"content": "now"}),
    "a name that is too long": (
        f"[TOOL_CALLS]{'a' * 300}[ARGS]{{}}",
        {"content": "a" * 300 + "{}"},
    ),
}
MANY = f"<|tool_call|>[{named(*PARIS, 'arguments')}]"
GRANITE: Answers = {
    "text alone": ("a <|tool> b", {"content": "a <|tool> b"}),
    "one call": (MANY, {"calls": [PARIS]}),
    "its other marker": (MANY.replace("|", ""), {"calls": [PARIS]}),
    "its other marker, with an end": (
        MANY.replace("|", "") + "</tool_call>\nDone.",
        {"content": "Done.", "calls": [PARIS]},
    ),
    "two calls": (
        f"<|tool_call|> [{named(*PARIS, 'arguments')}, {named(*NOW, 'arguments')}]",
        {"calls": [PARIS, NOW]},
    ),
    "two lists": (f"{MANY}\n{MANY}", {"calls": [PARIS, PARIS]}),
    "an object": (f"<|tool_call|>{named(*PARIS, 'arguments')}", {"calls": [PARIS]}),
    "text before": (f"Let me see.\n\n{MANY}", {"content": "Let me see.", "calls": [PARIS]}),
    "text behind": (f"{MANY} Done.", {"content": "Done.", "calls": [PARIS]}),
    "no arguments": ('<|tool_call|>[{"name": "now"}]', {"calls": [NOW]}),
    "arguments first": (
        '<|tool_call|>[{"arguments": {"city": "Paris"}, "name": "weather"}]',
        {"calls": [PARIS]},
    ),
    "nested values, and markers in texts": (
        f"<|tool_call|>[{named('weather', ODD, 'arguments')}]",
        {"calls": [("weather", ODD)]},
    ),
    "an unknown function": (MANY.replace("weather", "rain"), {"calls": [("rain", PARIS[1])]}),
    "broken off in the arguments": (MANY[:-6], {"calls": [("weather", '{"city": "Par')]}),
    "broken off before the name": ('<|tool_call|>[{"na', {"content": '[{"na'}),
    "not JSON": ("<|tool_call|>weather in Paris", {"content": "weather in Paris"}),
}
FAMILIES = {"json": GENERIC, "llama3_json": LLAMA, "mistral": MISTRAL, "granite": GRANITE}
CASES = [(family, case) for family, answers in FAMILIES.items() for case in answers]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_answers(family: str, case: str) -> None:
    text, answer = FAMILIES[family][case]
    assert read(text, TOOL_PARSERS[family]) == answer


def test_both_parsers_of_mistral_read_both_forms() -> None:
    other: ToolParser = TOOL_PARSERS["mistral_v11"]
    for text, answer in MISTRAL.values():
        assert read(text, other) == answer


def test_the_odd_arguments_are_json() -> None:
    assert json.loads(ODD)["more"] == {"a": [1, {"b": "}"}]}

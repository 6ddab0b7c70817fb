"""Hostile schemas, tools, regexes and grammars: each compiles or is refused with a message, in
bounded time and memory."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from baton_text.artifacts import byte_artifacts
from baton_text.grammars.answer_grammar import CallRules, answer_grammar
from baton_text.grammars.constraints import Kind, grammar_of
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammars import Grammars
from baton_text.grammars.limits import MAX_RULES
from baton_text.parsers.registry import TOOL_PARSERS
from baton_text.parsers.xml_values import types_of
from baton_text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_artifacts(byte_artifacts())
MAX_CPU_S = 10.0
MAX_BYTES = 400 << 20


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def of_property(**schema: Any) -> Any:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


BRANCHES = [{"$ref": "#/$defs/a"}] * 200
SCHEMAS: Mapping[str, Any] = {
    "nested 60": nested(30),
    "nested 10,000": nested(10_000),
    "1 MB": of_property(enum=[f"{n:0100}" for n in range(10_000)]),
    "200 KB of choices": of_property(enum=[f"{n:020}" for n in range(8_000)]),
    "2,000 properties": {"type": "object", "properties": {f"p{n}": {} for n in range(2_000)}},
    "2,000 references": {
        "type": "object",
        "properties": {f"p{n}": {"$ref": "#/$defs/a"} for n in range(2_000)},
        "$defs": {"a": {"enum": ["x" * 50_000]}},
    },
    "itself": {"$ref": "#"},
    "a cycle of references": {
        **of_property(**{"$ref": "#/$defs/a"}),
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "a reference that branches": {
        **of_property(**{"$ref": "#/$defs/a"}),
        "$defs": {"a": {"anyOf": [*BRANCHES, {"type": "string"}]}},
    },
    "recursive": {
        **of_property(**{"$ref": "#/$defs/a"}),
        "$defs": {"a": of_property(type="array", items={"$ref": "#/$defs/a"})},
    },
    "a chain of 2,000 references": {
        **of_property(**{"$ref": "#/$defs/d0"}),
        "$defs": {
            **{f"d{n}": of_property(**{"$ref": f"#/$defs/d{n + 1}"}) for n in range(2_000)},
            "d2000": {"type": "string"},
        },
    },
    "a chain of 200 references": {
        **of_property(**{"$ref": "#/$defs/d0"}),
        "$defs": {
            **{f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(200)},
            "d200": {"type": "string"},
        },
    },
    "doubled 20 times": {
        **of_property(**{"$ref": "#/$defs/d0"}),
        "$defs": {
            **{f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(20)},
            "d20": {"type": "string"},
        },
    },
    "many items": of_property(type="array", items={"type": "string"}, minItems=1_000_000),
    "a long string": of_property(type="string", minLength=10**9, maxLength=10**9),
    "a nested quantifier": of_property(type="string", pattern="^(a+)+$"),
    "a multiplied quantifier": of_property(type="string", pattern="^((a{1,500}){1,500}){1,500}$"),
    "not a schema": {"type": 5, "properties": []},
}
REGEXES = {
    "nested quantifiers": "((a*)*)*b",
    "a multiplied quantifier": "((x{1,1000}){1,1000}){1,1000}",
    "ambiguous": "(a|a|a)*(a|aa)*c",
    "a distant look back": "(a|b)*a(a|b){200}",
    "brackets": "(" * 50_000 + ")" * 50_000,
    "unclosed": "(a",
    "1 MB": "ab?" * 350_000,
}
CHAIN = ["start: r0", *(f"r{n}: r{n + 1}" for n in range(5_000)), 'r5000: "a"']
GRAMMARS = {
    "a chain of 5,000 rules": "\n".join(CHAIN),
    "a chain in an inline schema": "start: %json "
    + json.dumps(SCHEMAS["a chain of 2,000 references"]),
    "a chain in a list of grammars": json.dumps({"grammars": [{"lark_grammar": "\n".join(CHAIN)}]}),
    "a list of 5,000 grammars": json.dumps(
        {
            "grammars": [
                *({"name": f"n{n}", "lark_grammar": f"start: @n{n + 1}"} for n in range(5_000)),
                {"name": "n5000", "lark_grammar": 'start: "a"'},
            ]
        }
    ),
    "left recursive": 'start: start "a" | "a"',
    "empty loop": "start: (a*)*\na: b*\nb: ",
    "ambiguous": 'start: start start | "a"',
    "EBNF of brackets": "root ::= " + "(" * 8_000 + '"a"' + ")" * 8_000,
}
FAMILIES = ("hermes", "qwen3_coder", "pythonic", "gpt_oss")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER)


class Bounds:
    """Checks CPU time and memory of a `with` block."""

    def __enter__(self) -> None:
        self._process = psutil.Process()
        self._bytes = self._process.memory_info().rss
        self._began = time.process_time()

    def __exit__(self, *_: object) -> None:
        assert time.process_time() - self._began < MAX_CPU_S
        assert self._process.memory_info().rss - self._bytes < MAX_BYTES


def compile_or_refuse(grammars: Grammars, kind: Kind, value: Any) -> None:
    try:
        text = grammar_of(kind, value, TOKENIZER)
        grammars.check(text)
    except GrammarError:
        return
    matcher = grammars.matcher(text)
    for byte in b'{"a": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa':
        matcher.mask()
        if not matcher.accept([byte]):
            return


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_hostile_schema_takes_bounded_time_and_memory(name: str, grammars: Grammars) -> None:
    with Bounds():
        compile_or_refuse(grammars, "json", SCHEMAS[name])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_hostile_strict_function_takes_bounded_time_and_memory(
    name: str, family: str, grammars: Grammars
) -> None:
    rules = CallRules(TOOL_PARSERS[family], {"f": SCHEMAS[name]}, strict=frozenset({"f"}))
    with Bounds():
        try:
            text = answer_grammar(TOKENIZER, calls=rules)
            assert text is not None
            grammars.check(text)
        except GrammarError:
            return


@pytest.mark.parametrize("name", REGEXES)
def test_a_hostile_regex_takes_bounded_time_and_memory(name: str, grammars: Grammars) -> None:
    with Bounds():
        compile_or_refuse(grammars, "regex", REGEXES[name])


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_hostile_grammar_takes_bounded_time_and_memory(name: str, grammars: Grammars) -> None:
    with Bounds():
        compile_or_refuse(grammars, "grammar", GRAMMARS[name])


@pytest.mark.parametrize("name", SCHEMAS)
def test_types_of_a_hostile_schema_are_read_in_linear_time(name: str) -> None:
    schema = SCHEMAS[name]
    properties = schema.get("properties")
    with Bounds():
        for each in properties.values() if isinstance(properties, dict) else ():
            types_of(each, schema)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("grammar", GRAMMARS["a chain of 5,000 rules"], f"the limit is {MAX_RULES}"),
        ("grammar", GRAMMARS["a list of 5,000 grammars"], f"the limit is {MAX_RULES}"),
        ("grammar", GRAMMARS["a chain in an inline schema"], "nesting levels together"),
        ("json", SCHEMAS["a chain of 2,000 references"], "nesting levels together"),
    ],
    ids=["rules", "grammars", "inline", "schema"],
)
def test_the_refusal_of_a_chain_states_the_limit(kind: Kind, value: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        grammar_of(kind, value, TOKENIZER)


def test_a_chain_of_rules_up_to_the_limit_compiles_in_a_thread(grammars: Grammars) -> None:
    """A thread has less stack than the main thread has on some systems."""
    most = MAX_RULES - 5
    rules = ["start: r0", *(f"r{n}: r{n + 1}" for n in range(most)), f'r{most}: "a"']
    with ThreadPoolExecutor(1) as thread:
        thread.submit(grammars.check, grammar_of("grammar", "\n".join(rules), TOKENIZER)).result()
        schema = SCHEMAS["a chain of 200 references"]
        thread.submit(grammars.check, grammar_of("json", schema, TOKENIZER)).result()

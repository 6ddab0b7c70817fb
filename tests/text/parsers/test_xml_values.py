"""How the text of an argument becomes JSON by its schema."""

from __future__ import annotations

from typing import Any

import pytest

from baton_text.parsers.xml_values import Arguments

VALUES: dict[str, tuple[Any, str, str]] = {
    "a string": ({"type": "string"}, "null", '"null"'),
    "a string with white space": ({"type": "string"}, ' \u00fc"\n', '" \u00fc\\"\\n"'),
    "an integer": ({"type": "integer"}, "12", "12"),
    "a large integer": ({"type": "integer"}, "9" * 5000, f'"{"9" * 5000}"'),
    "a number": ({"type": "number"}, "-1.5e3", "-1.5e3"),
    "no number": ({"type": "number"}, "Infinity", '"Infinity"'),
    "a Python value": ({"type": "boolean"}, "False", "false"),
    "an array": ({"type": "array"}, '\n[1, "a"]\n', '[1, "a"]'),
    "nested too deep": ({"type": "array"}, "[" * 100_000, f'"{"[" * 100_000}"'),
    "null or a string": ({"type": ["string", "null"]}, "null", "null"),
    "any of null and a string": (
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "nulls",
        '"nulls"',
    ),
    "a choice of strings": ({"enum": ["1", "2"]}, "1", '"1"'),
    "one string": ({"const": "1"}, "1", '"1"'),
    "a choice of numbers": ({"enum": [1, 2]}, "1", "1"),
    "a definition": ({"$ref": "#/$defs/code"}, "1", '"1"'),
    "a definition of itself": ({"$ref": "#/$defs/loop"}, "1", "1"),
    "an unknown definition": ({"$ref": "#/$defs/none"}, "1", "1"),
    "no type": ({}, "x", '"x"'),
    "no schema": (None, "[1]", "[1]"),
    "a schema of another kind": (True, "[1]", "[1]"),
}
DEFINITIONS = {"code": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    schema, text, value = VALUES[name]
    tools = {"f": {"properties": {"a": schema} if schema is not None else {}, "$defs": DEFINITIONS}}
    arguments = Arguments(tools, "f", 0)
    pieces = [*arguments.add("a", text), arguments.close()]
    assert "".join(piece.text for piece in pieces) == f'{{"a": {value}}}'


def test_values_of_an_unknown_function_are_read_without_a_schema() -> None:
    arguments = Arguments({}, "g", 2)
    pieces = [*arguments.add("a", "1"), *arguments.add('"b"', "x"), arguments.close()]
    assert "".join(piece.text for piece in pieces) == '{"a": 1, "\\"b\\"": "x"}'
    assert {(piece.kind, piece.call) for piece in pieces} == {("arguments", 2)}

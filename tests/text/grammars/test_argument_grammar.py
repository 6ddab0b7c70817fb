"""Arguments that a family writes one by one: what their grammar accepts is read back and matches
the function's schema, and a schema that cannot be enforced is refused by name."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import jsonschema_rs
import pytest

from baton_text.artifacts import byte_artifacts
from baton_text.grammars.answer_grammar import CallRules, answer_grammar
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammars import Grammars
from baton_text.parsers.parser import ToolParser
from baton_text.parsers.registry import TOOL_PARSERS
from baton_text.tokenizer import Tokenizer
from tests.text.parsers.reading import read

TOKENIZER = Tokenizer.from_artifacts(byte_artifacts())
GRAMMARS = Grammars(TOKENIZER)
ONE_BY_ONE = [name for name, one in TOOL_PARSERS.items() if one.form and one.form.arguments]
PLAIN = ["qwen3_coder", "glm45"]
TEXT = {"type": "string"}
DEFS = {"$defs": {"line": {"type": "string", "maxLength": 3}, "size": {"type": "integer"}}}
# The schema of one argument, the argument as plain text, and its value; None if it is refused.
VALUES: list[tuple[Any, str, Any]] = [
    (TEXT, "Oslo", "Oslo"),
    (TEXT, "", ""),
    (TEXT, '\n"a" \\ {5} é\n', '\n"a" \\ {5} é\n'),
    (TEXT, "null", "null"),
    ({**TEXT, "maxLength": 3}, "abc", "abc"),
    ({**TEXT, "maxLength": 3}, "abcd", None),
    ({**TEXT, "minLength": 2}, "a", None),
    ({**TEXT, "minLength": 2}, "ab", "ab"),
    ({**TEXT, "pattern": "^[a-z]+$"}, "abc", "abc"),
    ({**TEXT, "pattern": "^[a-z]+$"}, "ab1", None),
    ({**TEXT, "pattern": "[0-9]"}, "ab1c", "ab1c"),
    ({**TEXT, "pattern": "[0-9]"}, "abc", None),
    ({**TEXT, "pattern": r"a/b\$"}, "xa/b$y", "xa/b$y"),
    ({**TEXT, "format": "date"}, "2024-02-29", "2024-02-29"),
    ({**TEXT, "format": "date"}, "2023-02-29", None),
    ({"enum": ["a", "a b"]}, "a b", "a b"),
    ({"enum": ["a", "a b"]}, "b", None),
    ({"const": "x"}, "x", "x"),
    ({"enum": ["a", 1]}, '"a"', "a"),
    ({"enum": ["a", 1]}, "1", 1),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "text", "text"),
    ({"type": ["string", "null"], "enum": ["a", None]}, "null", None),
    ({"type": ["string", "integer"]}, "5", "5"),
    ({"anyOf": [{**TEXT, "maxLength": 2}, {"type": "null"}]}, "ab", "ab"),
    ({"anyOf": [{**TEXT, "maxLength": 2}, {"type": "null"}]}, "abc", None),
    ({"$ref": "#/$defs/line"}, "abc", "abc"),
    ({"$ref": "#/$defs/line"}, "abcd", None),
    ({"$ref": "#/$defs/size"}, "-12", -12),
    ({"type": "integer", "maximum": 9}, "10", None),
    ({"type": "boolean"}, "true", True),
    ({"type": "array", "items": TEXT}, '["</parameter>", "</arg_value>"]', ...),
    ({"type": "array", "items": {"$ref": "#/$defs/size"}}, "[1, 2]", [1, 2]),
    ({"type": "object", "properties": {"a": TEXT}}, '{"a": "}"}', {"a": "}"}),
    (True, '{"a": [null]}', {"a": [None]}),
]


def schema_of(value: Any, required: bool = True) -> dict[str, Any]:
    properties = {"first": {"type": "boolean"}, "it": value}
    return {
        **DEFS,
        "type": "object",
        "properties": properties,
        "required": ["it"] if required else [],
        "additionalProperties": False,
    }


@lru_cache
def grammar(name: str, schema: str, strict: bool = True) -> str:
    rules = CallRules(
        TOOL_PARSERS[name], {"f": json.loads(schema)}, strict=frozenset({"f"} if strict else ())
    )
    text = answer_grammar(TOKENIZER, calls=rules, content=None)
    assert text is not None
    GRAMMARS.check(text)
    return text


def call(parser: ToolParser, arguments: list[tuple[str, str]]) -> str:
    form = parser.form
    assert form is not None
    assert form.arguments is not None
    one = form.arguments
    inner = one.between.join(
        f"{one.before_key}{key}{one.after_key}{value}{one.after_value}" for key, value in arguments
    )
    head = f"{form.open}{form.before_name}f{form.before_arguments}"
    return f"{head}{inner}{form.after_arguments}{form.close}"


def accepts(text: str, answer: str) -> bool:
    matcher = GRAMMARS.matcher(text)
    return matcher.accept(answer.encode()) and matcher.complete


@pytest.mark.parametrize(("schema", "written", "value"), VALUES)
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_value_is_accepted_if_it_is_read_as_a_match(
    name: str, schema: Any, written: str, value: Any
) -> None:
    parser, whole = TOOL_PARSERS[name], schema_of(schema)
    text = grammar(name, json.dumps(whole))
    answer = call(parser, [("it", written)])
    [(_, arguments)] = read(answer, parser, tools={"f": whole})["calls"]
    found = json.loads(arguments)["it"]
    matches = jsonschema_rs.is_valid(whole, {"it": found}, validate_formats=True)
    assert accepts(text, answer) == matches
    if value is not ... and matches:
        assert found == value
    assert matches or value is None


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("required", [True, False])
def test_arguments_come_in_the_schemas_order_and_optional_ones_may_be_left_out(
    name: str, required: bool
) -> None:
    parser, whole = TOOL_PARSERS[name], schema_of({"type": "integer"}, required)
    text = grammar(name, json.dumps(whole))
    first, it = ("first", "true"), ("it", "5")
    assert accepts(text, call(parser, [first, it]))
    assert accepts(text, call(parser, [it]))
    assert accepts(text, call(parser, [first])) == accepts(text, call(parser, [])) != required
    for wrong in ([it, first], [it, it], [("other", "1"), it]):
        assert not accepts(text, call(parser, wrong)), wrong


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_arguments_of_a_function_that_is_not_strict_are_free(name: str) -> None:
    tools = {"f": schema_of({"type": "integer"}), "g": {}}
    rules = CallRules(TOOL_PARSERS[name], tools, strict=frozenset({"g"}))
    text = answer_grammar(TOKENIZER, calls=rules)
    assert text is not None
    assert accepts(text, call(TOOL_PARSERS[name], [("other", '["a"]'), ("first", "5")]))
    assert accepts(text, call(TOOL_PARSERS[name], []))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"minProperties": 1}, "^f: `minProperties` cannot be enforced for the arguments"),
    ({"anyOf": [{}, {}]}, "^f: `anyOf` cannot be enforced for the arguments"),
    ({"required": ["gone"]}, "^f: the required argument 'gone' is not in `properties`"),
    ({"properties": {"a b": {}}}, "^f: the model's calls cannot have an argument named 'a b'"),
    ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, "^f: properties.a: the .ref"),
    ({"properties": {"a": {"type": "integer", "not": {}}}}, "^f: .*not"),
    ({"properties": {"a": False}, "required": ["a"]}, "^f: "),
]
REFUSED_TEXTS: list[tuple[dict[str, Any], str]] = [
    ({**TEXT, "format": "uuid"}, "^f: properties.it: `format` cannot be enforced for a string"),
    ({**TEXT, "enum": ["</parameter></arg_value>"]}, "no string of `enum` can be written"),
    ({**TEXT, "enum": ["a"], "maxLength": 3}, "`maxLength` cannot be enforced beside `enum`"),
    ({"oneOf": [{**TEXT, "maxLength": 1}, {**TEXT, "minLength": 3}]}, "oneOf"),
    ({"anyOf": [TEXT, {"type": "null"}], "maxLength": 2}, "`anyOf` cannot be enforced beside"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_arguments_that_cannot_be_enforced_are_refused_by_name(
    name: str, schema: dict[str, Any], message: str
) -> None:
    with pytest.raises(GrammarError, match=message):
        grammar(name, json.dumps({"type": "object", **schema}))


@pytest.mark.parametrize(("schema", "message"), REFUSED_TEXTS)
@pytest.mark.parametrize("name", PLAIN)
def test_plain_strings_that_cannot_be_enforced_are_refused_by_name(
    name: str, schema: dict[str, Any], message: str
) -> None:
    with pytest.raises(GrammarError, match=message):
        grammar(name, json.dumps(schema_of(schema)))

"""Schemas as a grammar enforces them: what is accepted, what is refused and where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton_text.artifacts import BYTE_VOCAB_SIZE, byte_artifacts
from baton_text.grammars.constraints import grammar_of
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammars import Grammars
from baton_text.grammars.json_schema import (
    ANNOTATIONS,
    CONDITIONS,
    ENFORCED_FORMATS,
    REFUSED_FORMATS,
)
from baton_text.grammars.limits import MAX_PATTERNS
from baton_text.tokenizer import Tokenizer

GRAMMARS = Grammars(Tokenizer.from_artifacts(byte_artifacts()), BYTE_VOCAB_SIZE)
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
STEERING = {"key_separator": " => ", "item_separator": "; ", "lenient": True, "coerce_one_of": True}


def compiled(schema: Any) -> str:
    grammar = grammar_of("json", schema)
    GRAMMARS.check(grammar)
    return grammar


def accepts(schema: Any, text: str) -> bool:
    matcher = GRAMMARS.matcher(compiled(schema))
    return matcher.accept(text.encode()) and matcher.complete


def refusal(schema: Any) -> str:
    with pytest.raises(GrammarError) as refused:
        compiled(schema)
    return str(refused.value)


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


FREE: list[dict[str, Any]] = [
    *({key: "anything"} for key in ANNOTATIONS),
    {"propertyNames": {"type": "string"}},
    {"propertyNames": True},
    {"propertyNames": {"type": ["string", "null"], "minLength": 0, "title": "a key"}},
    {"uniqueItems": False},
    {"uniqueItems": True, "maxItems": 1},
    {"uniqueItems": True, "type": "object"},
    {"minItems": 0, "minLength": 0, "minProperties": 0},
    {"contains": {"type": "null"}, "minContains": 0},
    {"minContains": 3, "maxContains": 1},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": [], "b": ["b"]}},
    {"dependentRequired": {"a": ["b"]}, "required": ["b"], "properties": {"b": {}}},
    {"dependentSchemas": {"a": True, "b": {"type": "object"}}},
    {"dependencies": {"a": [], "b": {}}},
    {"not": False},
    {"not": {"not": {}}},
    {"not": {"enum": [], "type": "string"}},
    {"if": {"type": "string"}},
    {"then": False, "else": False},
    {"if": {"type": "string"}, "then": True, "else": {"title": "else"}},
    {"unevaluatedProperties": True},
    {"unevaluatedItems": {}},
    {"unevaluatedProperties": False, "additionalProperties": {"type": "null"}},
    {"additionalItems": False},
    {"format": "path", "type": "string"},
    {"format": "password"},
    {"format": "binary"},
    {"format": "byte"},
    {"format": "int32", "type": "integer"},
    {"format": "double", "type": "number"},
    {"format": "made-up"},
    {"format": "regex", "type": "integer"},
    {"$dynamicAnchor": "node"},
    {"exclusiveMinimum": False, "minimum": 1},
    {"maxLength": 3.0},
    {"nullable": True, "discriminator": {"propertyName": "a"}, "x-order": 3},
]


@pytest.mark.parametrize("schema", FREE, ids=json.dumps)
def test_keywords_that_restrict_nothing_are_accepted(schema: dict[str, Any]) -> None:
    compiled(schema)
    compiled(closed(a=schema))
    compiled({"$ref": "#/$defs/a", "$defs": {"a": schema}})


PLACES = [
    ({"not": {}}, "`not`"),
    ({"not": {"type": "string"}}, "`not`"),
    ({"if": {"type": "string"}, "then": {"minLength": 1}}, "`if`"),
    ({"contains": {"type": "string"}}, "`contains`"),
    ({"uniqueItems": True}, "`uniqueItems`"),
    ({"propertyNames": {"maxLength": 3}}, "`propertyNames`"),
    ({"dependentRequired": {"a": ["b"]}}, "`dependentRequired`"),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, "`dependentSchemas`"),
    ({"dependencies": {"a": ["b"]}}, "`dependencies`"),
    ({"unevaluatedProperties": False, "allOf": [{}]}, "`unevaluatedProperties`"),
    ({"unevaluatedItems": False, "anyOf": [{}]}, "`unevaluatedItems`"),
    ({"$dynamicRef": "#node"}, "`$dynamicRef`"),
    *(({"format": form}, form) for form in REFUSED_FORMATS),
    ({"type": "text"}, "'text'"),
    ({"type": []}, "type must be"),
    ({"enum": []}, "enum must be"),
    ({"minLength": -1}, "minLength must be an integer of at least 0, not -1"),
    ({"minimum": "1"}, "minimum must be a number, not '1'"),
    ({"multipleOf": 0}, "multipleOf"),
    ({"required": "a"}, "required must be a list of strings"),
    ({"pattern": 3}, "pattern must be a string"),
    ({"pattern": "(a"}, "unclosed group"),
    ({"pattern": "(?=a)"}, "look-around"),
    ({"exclusiveMinimum": True}, "exclusiveMinimum must be a number, not True"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "no value matches"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, "no value matches"),
    ({"type": "string", "enum": [1, 2]}, "no value matches"),
    ({"type": "string", "pattern": "^a$", "minLength": 2}, "no text matches"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no value matches"),
    ({"type": "object", "required": ["x"], "additionalProperties": False}, "'x'"),
    ({"type": "array", "minItems": 2, "maxItems": 1}, "no value matches"),
    ({"type": "array", "minItems": 1, "items": False}, "no value matches"),
    ({"$ref": "#/$defs/missing"}, "/$defs/missing"),
    ({"$ref": "http://localhost/other"}, "http://localhost/other"),
    ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "overlap"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "`oneOf`"),
    (
        {"type": "object", "properties": {"a": {}}, "minProperties": 1},
        "beside optional `properties`",
    ),
]


@pytest.mark.parametrize(("schema", "reason"), PLACES, ids=str)
def test_a_refusal_is_one_sentence_that_names_the_keyword_and_the_place(
    schema: dict[str, Any], reason: str
) -> None:
    for place, whole in (
        ("", schema),
        ("properties.a: ", closed(a=schema)),
        ("properties.a.items: ", closed(a={"type": "array", "items": schema, "minItems": 1})),
        ("properties.a.allOf[1]: ", closed(a={"allOf": [{}, schema]})),
    ):
        if "$defs/missing" in reason and place:
            continue
        message = refusal(whole)
        assert reason in message
        assert message.startswith(place) or "allOf" in place, (message, place)
        assert not any(raw in message for raw in ("\n", "<", "NoExtension"))


def test_the_place_of_an_error_may_be_in_a_definition() -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": closed(b={"not": {}})}}
    assert refusal(schema) == "$defs.a.properties.b: `not` cannot be enforced"


def test_a_key_of_the_grammar_library_is_an_unknown_keyword_at_every_level() -> None:
    """It still is a property's name, and a key of a const."""
    steered = {"x-guidance": STEERING}
    inner = {**closed(q=DIGIT), **steered}
    schema = {**closed(p={"$ref": "#/$defs/a"}), **steered, "$defs": {"a": inner}}
    assert accepts(schema, '{"p":{"q":1}}')
    assert not GRAMMARS.matcher(compiled(schema)).accept(b'{"p" =>')
    assert "`not`" in refusal({**steered, "not": {}})
    assert "`oneOf`" in refusal({**steered, "oneOf": [{"type": "number"}, {"type": "integer"}]})
    assert accepts(closed(**{"x-guidance": DIGIT}), '{"x-guidance":1}')
    assert accepts({"const": steered}, json.dumps(steered, separators=(",", ":")))


@pytest.mark.parametrize(
    "grammar",
    [
        "start: %json SCHEMA",
        'start: "%json {}" %json SCHEMA\n',
        '{"grammars": [{"json_schema": SCHEMA}]}',
        '{"grammars": [{"lark_grammar": "start: @a"}, {"name": "a", "json_schema": SCHEMA}]}',
    ],
)
def test_a_key_of_the_grammar_library_steers_no_schema_within_a_grammar(grammar: str) -> None:
    def within(schema: Any) -> str:
        steered = json.dumps({**schema, "x-guidance": STEERING})
        return grammar_of("grammar", grammar.replace("SCHEMA", steered))

    matcher = GRAMMARS.matcher(within(closed(p=DIGIT)))
    before = "%json {}" if '"%json' in grammar else ""
    assert matcher.accept(f'{before}{{"p":1}}'.encode())
    assert matcher.complete
    with pytest.raises(GrammarError, match="`not`"):
        within({"not": {}})


def test_a_key_of_the_grammar_library_steers_no_structural_tag() -> None:
    structure = {"begin": "<f>", "schema": {**closed(p=DIGIT), "x-guidance": STEERING}, "end": "."}
    grammar = grammar_of("structural_tag", {"structures": [structure], "triggers": ["<f"]})
    matcher = GRAMMARS.matcher(grammar)
    assert matcher.accept(b'<f>{"p":1}.')


SCORE = {**closed(score=DIGIT), "patternProperties": {"^score$": {"type": "integer"}}}


def test_a_pattern_for_few_names_becomes_properties() -> None:
    assert accepts(SCORE, '{"score": 1}')
    assert not GRAMMARS.matcher(compiled(SCORE)).accept(b'{"score": 1,')
    low = {"type": "integer", "maximum": 7}
    both = {**closed(ab={"minimum": 5}), "patternProperties": {"^ab?$": low}}
    assert accepts(both, '{"ab":6,"a":1}')
    assert not accepts(both, '{"ab":4}')
    assert not accepts(both, '{"ab":8}')
    overlapping = {
        "type": "object",
        "patternProperties": {"^[ab]$": DIGIT, "^[bc]$": {"enum": [1, "c"]}},
        "additionalProperties": False,
    }
    assert accepts(overlapping, '{"a":5,"b":1,"c":"c"}')
    assert not accepts(overlapping, '{"b":5}')


@pytest.mark.parametrize(
    "keywords",
    [
        {"patternProperties": {"^[ab]$": {"type": "boolean"}}, "minProperties": 3},
        {"patternProperties": {"^(x|yy)$": {}}, "properties": {"x": {}}, "minProperties": 3},
        {"properties": {"a": {}, "b": False}, "minProperties": 2},
        {"patternProperties": {"^a$": {}, "^[ab]$": {}}, "minProperties": 3, "maxProperties": 5},
    ],
)
def test_more_properties_than_there_are_names_is_refused(keywords: dict[str, Any]) -> None:
    schema = {"type": "object", "additionalProperties": False, **keywords}
    assert "different keys" in refusal(schema)


def test_as_many_properties_as_there_are_names_are_all_required() -> None:
    keywords = {"patternProperties": {"^[ab]$": DIGIT}, "minProperties": 2, "maxProperties": 2}
    schema = {"type": "object", "additionalProperties": False, **keywords}
    assert accepts(schema, '{"a":1,"b":2}')
    assert not accepts(schema, '{"a":1}')


@pytest.mark.parametrize("pattern", [r"[^\s\S]", r"^a[^\w\W]$", r"x[^\d\D]+"])
def test_a_pattern_that_no_name_matches_leaves_no_key_to_begin(pattern: str) -> None:
    schema = {**closed(p=DIGIT), "patternProperties": {pattern: {}}}
    assert accepts(schema, '{"p":1}')
    assert not GRAMMARS.matcher(compiled(schema)).accept(b'{"p":1,')


def test_the_number_of_patterns_is_bounded() -> None:
    patterns: dict[str, Any] = {f"^{number}_.*$": {} for number in range(MAX_PATTERNS + 1)}
    assert "65 patternProperties; the limit is 64" in refusal({"patternProperties": patterns})


SELF: dict[str, dict[str, Any]] = {
    "itself": {"$ref": "#"},
    "required": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "items": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "each option": {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]},
    "two definitions": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
}


@pytest.mark.parametrize("name", SELF)
def test_a_schema_that_needs_itself_is_refused(name: str) -> None:
    assert "no finite value" in refusal(SELF[name])


def test_an_option_that_needs_itself_is_never_begun() -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#/$defs/e"}}, "required": ["a"]}
    schema = {"anyOf": [DIGIT, {"$ref": "#/$defs/e"}], "$defs": {"e": endless}}
    matcher = GRAMMARS.matcher(compiled(schema))
    assert not matcher.accept(b"{")
    optional = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert accepts(optional, '{"next":{"next":{}}}')


def test_a_reference_may_point_into_an_unknown_keyword() -> None:
    schema = {
        "$ref": "#/components/schemas/day",
        "components": {"schemas": {"day": {"type": "string", "format": "date", "example": "x"}}},
    }
    assert accepts(schema, '"2024-02-29"')
    assert not accepts(schema, '"2023-02-29"')


def test_the_page_lists_every_keyword_and_format() -> None:
    page = (Path(__file__).parents[3] / "docs" / "structured-output.md").read_text()
    table = page.partition("### Keywords")[2].partition("\n## ")[0]
    for name in (*ANNOTATIONS, *CONDITIONS, *REFUSED_FORMATS, *ENFORCED_FORMATS):
        assert f"`{name}`" in table, name


def test_every_condition_is_refused_by_name_or_accepted() -> None:
    named = " ".join(reason for _, reason in PLACES)
    alone = {"then", "else", "minContains", "maxContains"}
    assert {key for key in CONDITIONS if f"`{key}`" not in named} == alone

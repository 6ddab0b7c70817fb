"""Grammars: what compiles, what matches, what may follow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton_text.artifacts import BYTE_EOS_ID, BYTE_VOCAB_SIZE, byte_artifacts
from baton_text.grammars.client_schema import schema_of
from baton_text.grammars.constraints import Kind, grammar_of
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammars import COMPILED_KEPT, Grammars
from baton_text.grammars.limits import MAX_EBNF_BYTES, MAX_GRAMMAR_BYTES
from baton_text.grammars.matcher import Matcher
from baton_text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<call=f>", "schema": PERSON, "end": "</call>"}],
    "triggers": ["<call"],
}
OLDER = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$ref": "#/definitions/a",
    "$id": "http://a/b",
    "definitions": {"a": {}},
}
NESTED: dict[str, Any] = {}
for _ in range(100):
    NESTED = {"properties": {"a": NESTED}}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Tokenizer.from_artifacts(byte_artifacts()), BYTE_VOCAB_SIZE)


def allowed(matcher: Matcher) -> set[int]:
    mask = matcher.mask()
    return {id for id in range(8 * len(mask)) if mask[id // 8] >> id % 8 & 1}


@pytest.mark.parametrize(
    ("kind", "value", "matching", "other"),
    [
        ("json", PERSON, '{"name": "Ann", "age": 3}', '{"name": "Ann"}'),
        ("json", json.dumps(PERSON), '{"name":"","age":-1}', '{"age":3,"name":"Ann"}'),
        ("json", True, '[1, {"a": null}]', "[1,"),
        ("json_object", None, '{"a": [1, 2]}', "[1]"),
        ("regex", r"\d{3}-[a-z]+", "123-ab", "12-ab"),
        ("choice", ["yes", "no", 'say "maybe"\n'], 'say "maybe"\n', "ye"),
        ("grammar", 'start: ("a" | "b")+', "abba", "abc"),
        ("grammar", 'root ::= "x" [0-9]+', "x12", "x"),
        ("structural_tag", TAG, 'so <call=f>{"name":"A","age":1}</call> done', "<call=f>{}</call>"),
        ("structural_tag", TAG, "no call at all", "<call=g>"),
    ],
)
def test_a_text_matches_or_not(
    grammars: Grammars, kind: Kind, value: Any, matching: str, other: str
) -> None:
    grammar = grammar_of(kind, value)
    matcher = grammars.matcher(grammar)
    assert matcher.accept(matching.encode())
    assert matcher.complete
    matcher = grammars.matcher(grammar)
    assert not (matcher.accept(other.encode()) and matcher.complete)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json", {"type": "objekt"}, "objekt"),
        ("json", {"not": {}}, "not"),
        ("json", {"$ref": "#/missing"}, "/missing"),
        ("json", {"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ("json", [1], r"not \[1\]"),
        ("json", False, "no answer matches"),
        ("json", "{", "not valid JSON"),
        ("json", NESTED, "deeper than 64"),
        ("json", {"const": 2**64}, "more than 64 bits"),
        ("json", '{"const": "\\ud800"}', "not valid JSON"),
        ("json", '{"const": NaN}', "not valid JSON"),
        ("json", OLDER, "beside a"),
        ("regex", "(a", "unclosed group"),
        ("regex", "", "non-empty"),
        ("regex", "a" * (MAX_GRAMMAR_BYTES + 1), str(MAX_GRAMMAR_BYTES)),
        ("choice", [], "at least one string"),
        ("choice", ["a", ""], "non-empty"),
        ("choice", ["a"] * 2000, "at most 1024"),
        ("grammar", "start: missing", "missing"),
        ("grammar", "root ::= (", "EBNF"),
        ("grammar", "root ::= " + "x" * MAX_EBNF_BYTES, str(MAX_EBNF_BYTES)),
        ("json", {"enum": ["a" * MAX_GRAMMAR_BYTES]}, str(MAX_GRAMMAR_BYTES)),
        ("choice", ["a" * MAX_GRAMMAR_BYTES, "b"], str(MAX_GRAMMAR_BYTES)),
        ("structural_tag", {"structures": []}, "one structure"),
        ("structural_tag", {**TAG, "triggers": ["<other"]}, "none of the triggers"),
        (
            "structural_tag",
            {"structures": [{"begin": "<call", "schema": False}], "triggers": ["<call"]},
            "no answer matches",
        ),
    ],
)
def test_the_error_says_why_a_grammar_does_not_compile(
    grammars: Grammars, kind: Kind, value: Any, message: str
) -> None:
    with pytest.raises(GrammarError, match=message):
        grammars.check(grammar_of(kind, value))


def test_the_mask_allows_matching_tokens_and_eos_after_a_complete_text(
    grammars: Grammars,
) -> None:
    matcher = grammars.matcher(grammar_of("regex", "ab?"))
    assert allowed(matcher) == {ord("a")}
    assert matcher.accept(b"a")
    assert allowed(matcher) == {ord("b"), BYTE_EOS_ID}
    assert not matcher.stopped
    assert matcher.accept(b"b")
    assert matcher.stopped
    assert allowed(matcher) == {BYTE_EOS_ID}


def test_whitespace_between_json_tokens_is_bounded(grammars: Grammars) -> None:
    matcher = grammars.matcher(grammar_of("json", PERSON))
    assert matcher.accept(b"{ \n")
    assert allowed(matcher) == {ord('"')}


def test_a_matcher_depends_only_on_the_tokens(grammars: Grammars) -> None:
    """Tokens may arrive one by one, all at once, or in a copy of the matcher."""
    text = b'{"name": "Ann", "age'
    steps = grammars.matcher(grammar_of("json", PERSON))
    for place in range(len(text)):
        assert steps.accept(text[place : place + 1])
    again = grammars.matcher(grammar_of("json", PERSON))
    copy = again.copy()
    assert again.accept(text)
    assert copy.accept(text)
    assert steps.mask() == again.mask() == copy.mask()


def test_a_token_that_does_not_match_stops_the_matcher(grammars: Grammars) -> None:
    matcher = grammars.matcher(grammar_of("choice", ["yes", "no"]))
    assert matcher.count_accepted(b"yx") == 1
    assert not matcher.accept(b"yx")
    assert matcher.error
    assert matcher.stopped


def test_the_most_recently_used_grammars_are_cached() -> None:
    grammars = Grammars(Tokenizer.from_artifacts(byte_artifacts()), BYTE_VOCAB_SIZE)
    texts = [grammar_of("regex", f"a{{{count}}}") for count in range(1, COMPILED_KEPT + 2)]
    for text in texts:
        grammars.check(text)
    assert grammars.cached_matcher(texts[0]) is None
    assert grammars.cached_matcher(texts[-1]) is not None
    assert (grammars.compiled, grammars.hits) == (COMPILED_KEPT + 1, 1)
    grammars.check(texts[-1])
    assert grammars.compiled == COMPILED_KEPT + 1


def test_a_grammar_that_compiles_too_slowly_is_refused_each_time() -> None:
    grammars = Grammars(Tokenizer.from_artifacts(byte_artifacts()), max_compile_s=0.0)
    for _ in range(2):
        with pytest.raises(GrammarError, match="limit is 0 s"):
            grammars.check(grammar_of("regex", "[a-z]{3}"))


def test_a_vocabulary_may_be_larger_than_the_tokenizers() -> None:
    grammars = Grammars(Tokenizer.from_artifacts(byte_artifacts()), 1000)
    matcher = grammars.matcher(grammar_of("regex", "(.|\n)*"))
    assert len(matcher.mask()) == 4 * 32
    assert max(allowed(matcher)) == BYTE_EOS_ID


DATES: dict[str, dict[bool, tuple[str, ...]]] = {
    "date": {
        True: ("2024-02-29", "2000-02-29", "0400-02-29", "1999-12-31", "2023-02-28", "2023-11-30"),
        False: ("2023-02-29", "1900-02-29", "2024-02-30", "2023-04-31", "2023-13-01", "23-01-01"),
    },
    "time": {
        True: ("23:59:59Z", "00:00:00.123+01:30", "12:00:00z"),
        False: ("23:59:60Z", "24:00:00Z", "12:00:00", "12:00:00+24:00"),
    },
    "date-time": {
        True: ("2024-02-29T23:59:59Z", "1999-01-01t00:00:00.5-05:00"),
        False: ("2023-02-29T00:00:00Z", "2016-12-31T23:59:60Z", "2024-02-29"),
    },
}


@pytest.mark.parametrize("name", DATES)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "NAME"},
        {"$ref": "#/$defs/format", "$defs": {"format": {"type": "string", "format": "NAME"}}},
        {"type": "string", "format": "NAME", "pattern": "^[0-9]"},
    ],
    ids=["plain", "reference", "pattern"],
)
def test_a_date_or_time_exists(name: str, schema: dict[str, Any], grammars: Grammars) -> None:
    schema = json.loads(json.dumps(schema).replace("NAME", name))
    grammar = grammar_of("json", schema)
    for exists, texts in DATES[name].items():
        for text in texts:
            matcher = grammars.matcher(grammar)
            accepted = matcher.accept(json.dumps(text).encode()) and matcher.complete
            assert accepted == exists, text


def test_a_date_format_within_data_stays() -> None:
    schema = {"const": {"format": "date"}, "properties": {"format": {"type": "string"}}}
    assert schema_of(schema) == schema

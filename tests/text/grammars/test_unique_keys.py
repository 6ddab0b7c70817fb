"""No JSON object that a grammar writes has a key twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from baton_text.artifacts import BYTE_EOS_ID, BYTE_VOCAB_SIZE, byte_artifacts
from baton_text.grammars.answer_grammar import CallRules, answer_grammar
from baton_text.grammars.constraints import Kind, grammar_of
from baton_text.grammars.grammars import Grammars
from baton_text.grammars.matcher import Matcher
from baton_text.parsers.hermes import HERMES
from baton_text.tokenizer import Tokenizer
from tests.support.engines.text_models import json_tokenizer

BYTES = Tokenizer.from_artifacts(byte_artifacts())
GRAMMARS = Grammars(BYTES, BYTE_VOCAB_SIZE)
MAP: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "integer"}}
TAG = {"structures": [{"begin": "<f>", "schema": MAP, "end": "."}], "triggers": ["<f"]}
CONTROL = {"type": "object", "properties": {"a\x01": {"type": "integer"}}, "required": ["a\x01"]}


def named(pattern: str) -> dict[str, Any]:
    return {
        "type": "object",
        "patternProperties": {pattern: {"type": "integer"}},
        "additionalProperties": False,
    }


def allowed(matcher: Matcher) -> set[int]:
    mask = matcher.mask()
    return {id for id in range(8 * len(mask)) if mask[id // 8] >> id % 8 & 1}


def after(kind: Kind, value: Any, text: str) -> str:
    """The bytes that may follow `text`, as characters."""
    matcher = GRAMMARS.matcher(grammar_of(kind, value, BYTES))
    assert matcher.accept(text.encode()), text
    return "".join(map(chr, sorted(id for id in allowed(matcher) if id < 256)))


@pytest.mark.parametrize(
    ("kind", "value", "text", "closes"),
    [
        ("json", MAP, '{"a":1,"a', False),
        ("json", MAP, '{"a":1,"', True),  # an empty key
        ("json", MAP, '{"":1,"', False),
        ("json", MAP, '{"a":1,"ab', True),
        ("json", MAP, '{"a":1, "b" :2,\n"a', False),
        ("json", MAP, '{"a\\"":1,"a\\"', False),
        ("json", MAP, '{"a\\\\":1,"a', True),
        ("json", MAP, '{"\u00e9":1,"\u00e9', False),
        ("json_object", None, '{"a":{"a":1,"b":[{"a":{}},{"b', True),
        ("json_object", None, '{"a":{"a":1,"a', False),
        ("json_object", None, '{"a":{"b":1},"a', False),
        ("json_object", None, '{"a":{"b":1},"b', True),
        ("json_object", None, '{"a":["a","a', True),
        ("json_object", None, '{"a":"{\\"a\\":","b":"{","a', False),
        ("json_object", None, '{"a":"{","b":"},{","c', True),
        ("grammar", 'start: "{" "x" %json {"type": "object"}', '{x{"a":1,"a', False),
        (
            "grammar",
            'start: /[a-z:{" ]*/ ";" %json {"type": "object"}',
            '{"a": {";{"a":1,"a',
            False,
        ),
        ("grammar", 'start: /[^;]*/ ";" %json {"type": "object"}', '{"a":1,"a', True),
        ("structural_tag", TAG, '{"a":1,"a', True),
        ("structural_tag", TAG, 'so {"a": <f>{"b":1,"b', False),
        ("structural_tag", TAG, '<f>{"b":1}.<f>{"b', True),
    ],
)
def test_the_quote_that_would_repeat_a_key_is_not_allowed(
    kind: Kind, value: Any, text: str, closes: bool
) -> None:
    assert ('"' in after(kind, value, text)) == closes


def test_literal_texts_that_look_like_json_are_as_they_were_asked_for() -> None:
    for kind, value in (("choice", ['{"a":1,"a":2}']), ("regex", r'\{"a":1,"a":[0-9]\}')):
        matcher = GRAMMARS.matcher(grammar_of(kind, value))  # type: ignore[arg-type]
        for byte in b'{"a":1,"a":2}':
            assert byte in allowed(matcher)
            assert matcher.accept((byte,))
        assert matcher.complete


@pytest.mark.parametrize(
    ("pattern", "text", "follow"),
    [
        ("^[a-z]{2}_id$", '{"xa_id":1,"xa', ""),
        ("^[a-c]+_id$", '{"a_id":1,"a', "abc"),  # not _, which leads to a_id only
        ("^[a-c]+_id$", '{"a_id":1,"', "abc"),
        ("^([a-c]{4}|x)$", '{"x":1,"', "abc"),
        ("^([a-c]{4}|x)$", '{"aaaa":1,"aaa', "bc"),
    ],
)
def test_a_key_is_not_begun_that_only_a_repeated_key_could_end(
    pattern: str, text: str, follow: str
) -> None:
    assert after("json", named(pattern), text) == follow


def test_a_free_key_is_never_spelt_like_a_declared_one() -> None:
    """In the spelling of \\u0061, `a` would count as another key than the declared one."""
    schema = {**MAP, "properties": {"a": {"type": "null"}}}
    assert "u" not in after("json", schema, '{"\\')
    assert "u" in after("json_object", None, '{"b":"\\')
    assert after("json", CONTROL, '{"a\\') == "u"


def test_when_no_key_is_left_the_matcher_fails_and_allows_only_the_end() -> None:
    schema = named("^[a-e][a-m]$") | {"minProperties": 66}  # 65 names
    matcher = GRAMMARS.matcher(grammar_of("json", schema))
    keys = [a + b for a in "abcde" for b in "abcdefghijklm"]
    text = "{" + "".join(f'"{key}":1,' for key in keys)
    assert matcher.accept(text.encode())
    assert matcher.accept(b'"')
    copy = matcher.copy()
    assert allowed(matcher) == {BYTE_EOS_ID}
    assert (matcher.stopped, matcher.complete) == (True, False)
    assert "has each key already" in matcher.error
    assert allowed(copy) == {BYTE_EOS_ID}, "the state follows from the tokens"


def spelt(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """The ids of tokens that are these pieces."""
    ids = {tokenizer.decode([id]): id for id in range(tokenizer.vocab_size)}
    return [ids[piece] for piece in pieces]


@pytest.fixture(scope="module")
def wide() -> Grammars:
    return Grammars(json_tokenizer())


@pytest.mark.parametrize(
    ("before", "token", "follows"),
    [
        (['{"a":', "1"], ',"a":', False),
        (['{"a":', "1"], ',"b":', True),
        (['{"a":', "1"], ',"a":1}', False),
        (['{"a":', "1", ",", '"', "a"], '":', False),
        (['{"a":', "1", ","], '"', True),
        (['{"a":', "1", ",", '"', "b"], '":', True),
        (['{"a":', '{"a":', "1"], ',"b":', True),
        (['{"a":', '{"b":', "1", "}"], ',"a":', False),
        (['{"a":', "["], '{"a":', True),
        (['{"a":', "[", '{"a":1}', "]"], ',"a":', False),
    ],
)
def test_tokens_with_whole_keys_repeat_none(
    before: list[str], token: str, follows: bool, wide: Grammars
) -> None:
    matcher = wide.matcher(grammar_of("json_object", None))
    assert matcher.accept(spelt(json_tokenizer(), *before))
    [id] = spelt(json_tokenizer(), token)
    assert (id in allowed(matcher)) == follows


def test_arguments_of_calls_have_no_key_twice() -> None:
    for required in (True, False):
        rules = CallRules(HERMES, {"f": MAP}, required=required, parallel=False)
        grammar = answer_grammar(BYTES, calls=rules)
        assert grammar is not None
        matcher = GRAMMARS.matcher(grammar)
        text = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "a'
        assert matcher.accept(text.encode())
        assert ord('"') not in allowed(matcher)
        assert ord("b") in allowed(matcher)


def test_the_state_follows_from_the_tokens_however_they_arrive() -> None:
    text: Sequence[int] = b'{"a":{"b":1,"c":"{\\"b' + b'":"},"b'
    whole = GRAMMARS.matcher(grammar_of("json_object", None))
    whole.accept(text)
    one_by_one = GRAMMARS.matcher(grammar_of("json_object", None))
    for id in text:
        one_by_one = one_by_one.copy()
        one_by_one.accept((id,))
    assert whole.mask() == one_by_one.mask()

"""Bodies as JSON: what is too large, decoding in slices, and what is no JSON object."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_protocol.errors import MalformedBody, TooLarge
from baton_router.openai.fields.errors import SHOWN, show
from baton_router.openai.json_body import MAX_VALUES, SLICE, check_size, decode, decode_object

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text('[]{},:"\\ a\u00e9\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('[]{},"\\a'), inner),
    max_leaves=30,
)
# Quotes, backslashes, escapes of all kinds, characters of one to four bytes.
PIECES = st.sampled_from(
    [
        *("a", "bcdefghijklmn", "\\", '"', "\n", "\u00e9", "\u65e5", "\U0001f600", "\u200d"),
        *("\\u", "\\ud83d", "ud83d", "\\\\", "/", "{", "[", ",", "\x01"),
    ]
)
LONG_TEXT = st.lists(PIECES, max_size=60).map("".join)
LONG_JSON = st.recursive(
    LONG_TEXT | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(LONG_TEXT, inner),
    max_leaves=8,
)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'"text"', b"nul", b"\xff\xfe", b'{"a":NaN}'])
def test_a_body_that_is_not_a_json_object_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedBody):
        decode_object(data)


@pytest.mark.parametrize("text", ["Hi", "\ufeff", "x" * SLICE * 2])
def test_a_byte_order_mark_before_a_body_is_skipped(text: str) -> None:
    data = codecs.BOM_UTF8 + msgspec.json.encode({"prompt": text})
    assert decode_object(data) == decode_object(bytearray(data)) == {"prompt": text}


@pytest.mark.parametrize("data", [codecs.BOM_UTF8, codecs.BOM_UTF8 * 2 + b"{}"])
def test_a_byte_order_mark_alone_or_twice_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedBody):
        decode_object(data)


@given(JSON, st.booleans())
@settings(deadline=None)
def test_values_are_counted_only_outside_of_strings(value: Any, spaced: bool) -> None:
    data = json.dumps(value, ensure_ascii=False, indent=1 if spaced else None).encode()

    def count(value: Any) -> int:
        if isinstance(value, list):
            return 1 + sum(map(count, value)) + max(0, len(value) - 1)
        if isinstance(value, dict):
            return 1 + sum(map(count, value.values())) + max(0, len(value) - 1)
        return 0

    expected = count(value)
    check_size(data, expected)
    if expected:
        with pytest.raises(TooLarge):
            check_size(data, expected - 1)


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.long)])
def test_decoding_in_slices_gives_the_same_strings(count: int) -> None:
    @given(LONG_JSON, st.booleans(), st.integers(1, 40))
    @settings(deadline=None, max_examples=count)
    def check(value: Any, escaped: bool, size: int) -> None:
        data = json.dumps(value, ensure_ascii=escaped).encode()
        assert decode(bytearray(data), size) == value

    check()


@given(st.binary(max_size=60), st.integers(0, 60), st.integers(1, 9))
@settings(deadline=None, max_examples=500)
def test_decoding_in_slices_refuses_the_same_bytes(noise: bytes, at: int, size: int) -> None:
    data = b'{"prompt": "' + b"a\\u00e9\\ud83d\\ude00" * 9 + b'"}'
    data = data[:at] + noise + data[at:]

    def outcome(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None

    assert outcome(lambda: decode(data, size)) == outcome(lambda: msgspec.json.decode(data))


def test_a_million_values_are_too_many_and_a_long_text_is_not() -> None:
    check_size(b"[" + b"1," * (MAX_VALUES - 2) + b"1]")
    with pytest.raises(TooLarge):
        check_size(b"[" + b"1," * MAX_VALUES + b"1]")
    most = 10_000
    check_size(b'{"prompt":"' + b'[{,\\"\\\\' * most + b'"}', most)
    for item in (b"1,", b"[],", b"{},", b'"",', b'{"":[]},'):
        with pytest.raises(TooLarge):
            check_size(b"[" + item * most + b"1]", most)
    for broken in (b"", b'"', b'"\\', b'\\"', b'"\\\\"', b"[" * 9):
        check_size(broken)


@given(JSON)
@settings(deadline=None)
def test_an_offending_value_is_shown_as_the_beginning_of_its_json(value: Any) -> None:
    encoded = msgspec.json.encode(value).decode()
    assert show(value) == (encoded if len(encoded) <= SHOWN else encoded[:SHOWN] + "...")

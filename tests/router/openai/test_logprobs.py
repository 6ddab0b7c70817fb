"""Log-probabilities as JSON: each candidate has its own name, and none is lost."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.request import PositionLogprobs, TokenLogprob
from baton_router.openai.answers import CompletionLogprobs
from baton_router.openai.logprobs import chat_logprobs, completion_logprobs, token_name


def candidate(id: int, raw: bytes, logprob: float = -1.0) -> TokenLogprob:
    """A candidate as nodes send it."""
    return TokenLogprob(id, logprob, text=raw.decode("utf-8", "replace"), raw=raw)


def by_name_of(logprobs: CompletionLogprobs) -> dict[str, float]:
    """The candidates of the only position, by name."""
    [by_name] = logprobs.top_logprobs
    assert by_name is not None
    return by_name


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b" the", " the"),
        ("\u20ac".encode(), "\u20ac"),
        (b"\xe2", r"bytes:\xe2"),
        (b"\xe2\x82", r"bytes:\xe2\x82"),
        (b"\x82\xac and", r"bytes:\x82\xac\x20\x61\x6e\x64"),
        ("\ufffd".encode(), "\ufffd"),  # the character itself, which some vocabularies have
        (b"", "token_id:7"),
    ],
)
def test_a_token_is_named_by_its_text_or_its_bytes(raw: bytes, name: str) -> None:
    assert token_name(candidate(7, raw)) == name
    assert token_name(candidate(7, raw), as_id=True) == "token_id:7"
    [position] = chat_logprobs([PositionLogprobs(candidate(7, raw))], 0).content
    assert (position.token, position.bytes) == (name, list(raw))


def test_parts_of_characters_are_separate_candidates() -> None:
    parts = tuple(candidate(id, bytes([0xE2, 0x80 + id]), -id) for id in range(1, 6))
    logprobs = completion_logprobs([PositionLogprobs(parts[0], parts)], 5, [0])
    assert logprobs.tokens == [r"bytes:\xe2\x81"]
    assert logprobs.top_logprobs == [{rf"bytes:\xe2\x8{id}": -id for id in range(1, 6)}]
    content = chat_logprobs([PositionLogprobs(parts[0], parts)], 5).content[0]
    assert [top.bytes for top in content.top_logprobs] == [list(part.raw) for part in parts]
    assert [top.token for top in content.top_logprobs] == [*by_name_of(logprobs)]


def test_among_ids_with_the_same_text_the_sampled_one_keeps_the_text_as_its_name() -> None:
    top = (candidate(1, b"A", -0.1), candidate(2, b"A", -0.2), candidate(3, b"A", -0.3))
    for sampled, names in [
        (top[0], ["A", "token_id:2", "token_id:3"]),
        (top[2], ["token_id:1", "token_id:2", "A"]),
        (candidate(4, b"A", -0.4), ["token_id:1", "token_id:2", "token_id:3", "A"]),
        (candidate(4, b"B", -0.4), ["A", "token_id:2", "token_id:3", "B"]),
    ]:
        logprobs = completion_logprobs([PositionLogprobs(sampled, top)], 3, [0])
        assert [*by_name_of(logprobs)] == names
        assert by_name_of(logprobs)[logprobs.tokens[0]] == sampled.logprob


def test_named_tokens_follow_the_likeliest_ones_once_each() -> None:
    top = tuple(candidate(id, bytes([64 + id]), -float(id)) for id in (1, 2, 3))
    named = tuple(candidate(id, bytes([64 + id]), -float(id)) for id in (7, 2, 7))
    position = PositionLogprobs(top[0], top, named)
    assert [each.token for each in chat_logprobs([position], 2).content[0].top_logprobs] == [
        *("A", "B", "G"),
    ]
    assert [*by_name_of(completion_logprobs([position], 0, [0]))] == ["G", "B", "A"]
    named_by_id = by_name_of(completion_logprobs([position], 1, [0], as_id=True))
    assert [*named_by_id] == ["token_id:1", "token_id:7", "token_id:2"]


PIECES = st.binary(max_size=3) | st.sampled_from([b"A", b"", b"\xe2", "\ufffd".encode()])


@given(st.lists(PIECES, min_size=1, max_size=8), st.data())
def test_no_candidate_is_lost_for_any_vocabulary(pieces: list[bytes], data: st.DataObject) -> None:
    candidates = tuple(candidate(id, raw, -float(id)) for id, raw in enumerate(pieces))
    sampled = data.draw(st.sampled_from(candidates))
    count = data.draw(st.integers(0, len(candidates)))
    for as_id in (False, True):
        positions = [PositionLogprobs(sampled, candidates)]
        logprobs = completion_logprobs(positions, count, [0], as_id=as_id)
        by_name = by_name_of(logprobs)
        ids = {token.id for token in (*candidates[:count], sampled)}
        assert sorted(by_name.values()) == sorted(-float(id) for id in ids)
        assert by_name[logprobs.tokens[0]] == sampled.logprob
        for name, logprob in by_name.items():
            raw = pieces[int(-logprob)]
            if name.startswith("bytes:"):
                assert codecs.escape_decode(name.removeprefix("bytes:"))[0] == raw
            else:
                assert name in (f"token_id:{int(-logprob)}", raw.decode("utf-8", "replace"))

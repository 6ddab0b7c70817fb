"""Tokenizing in batches: the same ids for everybody, and nobody's trouble but one's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_router.encoding import Encoder
from baton_text.artifacts import byte_artifacts
from baton_text.tokenizer import LONG_TEXT, Tokenizer

TOKENIZER = Tokenizer.from_artifacts(byte_artifacts())


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Whatever is encoded, in batches; "bad" cannot be."""
    seen: list[list[str]] = []
    encode = Tokenizer.encode_batch

    def watched(
        self: Tokenizer, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        seen.append([*texts])
        if "bad" in texts:
            raise TypeError("bad")
        return encode(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_batch", watched)
    return seen


async def together(texts: Sequence[str]) -> list[list[int]]:
    encoder = Encoder(TOKENIZER, special=False)
    return [*await asyncio.gather(*map(encoder.encode, texts))]


@given(st.lists(st.text(max_size=LONG_TEXT // 2), max_size=6))
def test_each_text_gets_its_own_ids(texts: list[str]) -> None:
    alone = [TOKENIZER.encode(text, add_special_tokens=False) for text in texts]
    assert asyncio.run(together(texts)) == alone


async def test_what_comes_in_one_turn_of_the_loop_is_one_batch(batches: list[list[str]]) -> None:
    await together(["a", "b", "c"])
    assert batches == [["a", "b", "c"]]


async def test_a_batch_is_no_larger_than_a_long_text(batches: list[list[str]]) -> None:
    size = LONG_TEXT // 2
    a, b, c = "a" * size, "b" * size, "c" * size
    assert await together([a, b, c]) == [TOKENIZER.encode(text, False) for text in (a, b, c)]
    assert batches[:2] == [[a, b], [c]]


async def test_a_long_text_is_nobody_elses_batch(batches: list[list[str]]) -> None:
    long = "a" * (LONG_TEXT + 1)
    await together(["b", long, "c"])
    assert sorted(batches, key=len) == [[long], ["b", "c"]]


async def test_a_text_that_cannot_be_encoded_fails_alone(batches: list[list[str]]) -> None:
    encoder = Encoder(TOKENIZER, special=False)
    good, bad, other = await asyncio.gather(
        *map(encoder.encode, ("a", "bad", "b")), return_exceptions=True
    )
    assert (good, other) == ([97], [98])
    assert isinstance(bad, TypeError)
    assert batches == [["a", "bad", "b"], ["a"], ["bad"], ["b"]]


async def test_who_leaves_while_it_is_encoded_takes_nobody_along(
    batches: list[list[str]],
) -> None:
    encoder = Encoder(TOKENIZER, special=False)
    left, stays = (asyncio.create_task(encoder.encode(text)) for text in "ab")
    await asyncio.sleep(0)
    left.cancel()
    assert await stays == [98]
    assert left.cancelled()
    assert batches == [["a", "b"]]

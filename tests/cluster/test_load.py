"""The clients of the scaling tests notice what they are there to notice."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from tests.cluster.load import Answer, Load, Shape, accept_none, check_answer
from tests.support.clients.streams import ask
from tests.support.pools.baton_up import Pool

SHAPE = Shape(clients=2, tokens=12)
ERROR = {"code": "rolled_out", "message": "send it again"}


@pytest.fixture(scope="module")
def answer(reference_pool: Pool) -> Answer:
    """As it has to be."""
    question = SHAPE.question(7)
    return Answer(question, ask(reference_pool.url, question.path, question.body))


def check(answer: Answer, reference_pool: Pool, *expected_errors: str) -> None:
    check_answer(answer, [reference_pool.url], expected_errors, accept_none)


def broken_off(answer: Answer, error: dict[str, Any] | None) -> Answer:
    """It ended so, half-way."""
    other = deepcopy(answer)
    other.streamed.error, other.streamed.whole = error, False
    said = other.streamed.result.choices[0]
    said.ids, said.text, said.finish = said.ids[:6], said.text[:6], None
    return other


def test_clients_ask_until_the_load_is_left_and_all_they_got_is_right(reference_pool: Pool) -> None:
    with Load(reference_pool.url, 1000, SHAPE) as load:
        load.wait_tokens(3 * SHAPE.tokens)
    tally = load.check([reference_pool.url])
    assert tally.streams >= 3 * SHAPE.clients
    assert tally.tokens == tally.streams * SHAPE.tokens
    assert load.errors() == []
    assert len(set(load.requests())) == tally.streams


def test_a_right_answer_is_right(answer: Answer, reference_pool: Pool) -> None:
    check(answer, reference_pool)


def test_another_token_is_wrong(answer: Answer, reference_pool: Pool) -> None:
    other = deepcopy(answer)
    other.streamed.result.choices[0].ids[-1] ^= 1
    with pytest.raises(AssertionError, match=other.streamed.request):
        check(other, reference_pool)


def test_a_stream_that_is_cut_is_wrong(answer: Answer, reference_pool: Pool) -> None:
    with pytest.raises(AssertionError, match="cut"):
        check(broken_off(answer, None), reference_pool, "rolled_out")


def test_an_error_is_wrong_unless_it_is_the_stated_one(
    answer: Answer, reference_pool: Pool
) -> None:
    other = broken_off(answer, ERROR)
    check(other, reference_pool, "rolled_out")
    with pytest.raises(AssertionError, match="rolled_out"):
        check(other, reference_pool)


def test_before_a_stated_error_the_tokens_are_right_all_the_same(
    answer: Answer, reference_pool: Pool
) -> None:
    other = broken_off(answer, ERROR)
    other.streamed.result.choices[0].ids[0] ^= 1
    with pytest.raises(AssertionError, match=other.streamed.request):
        check(other, reference_pool, "rolled_out")


def test_pauses_are_measured(reference_pool: Pool) -> None:
    flags = ("--engine", "sim", "--prefill", "0", "--decode", "1", "--sim-decode-ms", "200")
    with Pool(flags) as slow, Load(slow.url, 2000, Shape(clients=1, tokens=6)) as load:
        load.wait_tokens(6)
    tally = load.check([reference_pool.url])
    # A reader that is late for one event sees a shorter pause before the next.
    assert tally.pause_s >= 0.1

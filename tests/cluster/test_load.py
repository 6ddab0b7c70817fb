"""The clients of the scaling tests detect wrong answers, errors and pauses."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from tests.cluster.load import Answer, Load, Shape, check_answer
from tests.support.clients.streams import ask
from tests.support.pools.baton_up import Pool

SHAPE = Shape(clients=2, tokens=12)
ERROR = {"code": "rolled_out", "message": "send it again"}


@pytest.fixture(scope="module")
def answer(reference_pool: Pool) -> Answer:
    """A right answer."""
    question = SHAPE.question(7)
    return Answer(question, ask(reference_pool.url, question.path, question.body))


def check(answer: Answer, reference_pool: Pool, *expected_errors: str) -> None:
    check_answer(answer, [reference_pool.url], expected_errors)


def cut(answer: Answer, error: dict[str, Any] | None) -> Answer:
    """A copy of the answer that ended half-way with this error; None for a cut stream."""
    copy_of_answer = deepcopy(answer)
    copy_of_answer.streamed.error, copy_of_answer.streamed.whole = error, False
    choice = copy_of_answer.streamed.result.choices[0]
    choice.ids, choice.text, choice.finish = choice.ids[:6], choice.text[:6], None
    return copy_of_answer


def test_clients_send_requests_until_the_load_ends_and_all_answers_are_right(
    reference_pool: Pool,
) -> None:
    with Load(reference_pool.url, 1000, SHAPE) as load:
        load.wait_tokens(3 * SHAPE.tokens)
    tally = load.check([reference_pool.url])
    assert tally.streams >= 3 * SHAPE.clients
    assert tally.tokens == tally.streams * SHAPE.tokens
    assert load.errors() == []
    assert len(set(load.requests())) == tally.streams


def test_a_right_answer_is_accepted(answer: Answer, reference_pool: Pool) -> None:
    check(answer, reference_pool)


def test_an_answer_with_another_token_is_refused(answer: Answer, reference_pool: Pool) -> None:
    other = deepcopy(answer)
    other.streamed.result.choices[0].ids[-1] ^= 1
    with pytest.raises(AssertionError, match=other.streamed.request):
        check(other, reference_pool)


def test_a_cut_stream_is_refused(answer: Answer, reference_pool: Pool) -> None:
    with pytest.raises(AssertionError, match="cut"):
        check(cut(answer, None), reference_pool, "rolled_out")


def test_an_error_is_refused_unless_it_is_expected(answer: Answer, reference_pool: Pool) -> None:
    other = cut(answer, ERROR)
    check(other, reference_pool, "rolled_out")
    with pytest.raises(AssertionError, match="rolled_out"):
        check(other, reference_pool)


def test_wrong_tokens_before_an_expected_error_are_refused(
    answer: Answer, reference_pool: Pool
) -> None:
    other = cut(answer, ERROR)
    other.streamed.result.choices[0].ids[0] ^= 1
    with pytest.raises(AssertionError, match=other.streamed.request):
        check(other, reference_pool, "rolled_out")


def test_the_longest_pause_is_measured(reference_pool: Pool) -> None:
    flags = ("--engine", "sim", "--prefill", "0", "--decode", "1", "--sim-decode-ms", "200")
    with Pool(flags) as slow, Load(slow.url, 2000, Shape(clients=1, tokens=6)) as load:
        load.wait_tokens(6)
    tally = load.check([reference_pool.url])
    # A reader that is late for one event sees a shorter pause before the next.
    assert tally.pause_s >= 0.1

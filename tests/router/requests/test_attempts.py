"""The record of one attempt: predicted and measured times."""

from __future__ import annotations

from baton_protocol.ids import Epoch, NodeId
from baton_router.placement.placement import Considered, Placement, PredictionError
from baton_router.requests.attempt import Attempt, FirstTokenTimes
from tests.support.pools.placements import BASIS, placement_on

DECODE, PREFILL = NodeId("decode-0"), NodeId("prefill-0")


def attempt(placement: Placement) -> Attempt:
    """A request's first attempt, placed at 10.0."""
    return Attempt(1, placement, Epoch("e"), BASIS, 10.0)


def considered(prefill: NodeId | None, predicted_ms: float, **parts: float) -> Considered:
    costs = {"queue_ms": 0.0, "compute_ms": 0.0, "fetch_ms": 0.0, "slowdown_ms": 0.0} | parts
    return Considered(
        decode=DECODE,
        prefill=prefill,
        predicted_ms=predicted_ms,
        cached_tokens=8,
        uncached=24,
        **costs,
    )


def test_the_prediction_for_one_node_is_compared_at_its_first_token() -> None:
    first = attempt(placement_on(DECODE))
    error = PredictionError("whole", 0.04, 0.5)
    assert first.note_tokens(10.5, None) == FirstTokenTimes(None, None, error)
    assert first.note_tokens(11.0, 10.5) is None


def test_the_prediction_for_a_pair_is_compared_at_the_decode_node_s_first_token() -> None:
    first = attempt(placement_on(DECODE, PREFILL))
    assert first.note_tokens(10.5, None) is None
    assert first.decoding_at is None
    first.handed_at = 10.5
    error = PredictionError("split", 0.04, 1.0)
    times = first.note_tokens(11.0, 10.5)
    assert times == FirstTokenTimes(None, 0.5, error)
    assert {"first": first.first_at, "decoding": first.decoding_at} == {
        "first": 10.5,
        "decoding": 11.0,
    }


def test_the_expected_time_leaves_out_the_slowdown_of_other_requests() -> None:
    options = (considered(PREFILL, 30.0, compute_ms=30.0), considered(None, 40.0, slowdown_ms=15.0))
    first = attempt(placement_on(DECODE, considered=options))
    assert first.chosen == options[1]
    times = first.note_tokens(11.0, None)
    assert times is not None
    assert times.error == PredictionError("whole", 0.025, 1.0)


def test_a_pair_that_lost_its_prefill_node_reports_no_prediction_error() -> None:
    first = attempt(placement_on(DECODE, PREFILL))
    first.note_end("link", 11.0, PREFILL)
    first.give_up_prefill(12.0)
    assert first.note_tokens(13.0, None) is None
    assert (first.ended, first.blamed, first.decoding_at) == (None, PREFILL, 13.0)


def test_the_pause_lasts_from_the_client_s_last_token_to_the_attempt_s_first() -> None:
    first = attempt(placement_on(DECODE))
    times = first.note_tokens(12.0, 9.0)
    assert times is not None
    assert times.pause_s == 3.0

"""What is remembered of one attempt: the prediction beside what was measured."""

from __future__ import annotations

from baton_protocol.ids import Epoch, NodeId
from baton_router.placement.policy import Considered, Placement, PredictionError
from baton_router.requests.state import Attempt, FirstTokenTimes
from tests.support.pools.placements import BASIS, placement_on

DECODE, PREFILL = NodeId("decode-0"), NodeId("prefill-0")


def attempt(placement: Placement) -> Attempt:
    """The first one, placed at 10.0."""
    return Attempt(1, placement, Epoch("e"), BASIS, 10.0)


def way(prefill: NodeId | None, predicted_ms: float, **parts: float) -> Considered:
    costs = {"queue_ms": 0.0, "compute_ms": 0.0, "fetch_ms": 0.0, "slowdown_ms": 0.0} | parts
    return Considered(
        decode=DECODE,
        prefill=prefill,
        predicted_ms=predicted_ms,
        cached_tokens=8,
        uncached=24,
        **costs,
    )


def test_one_node_s_prediction_is_measured_at_its_first_token() -> None:
    one = attempt(placement_on(DECODE))
    error = PredictionError("whole", 0.04, 0.5)
    assert one.note_tokens(10.5, None) == FirstTokenTimes(None, None, error)
    assert one.note_tokens(11.0, 10.5) is None


def test_a_pair_s_prediction_is_measured_at_the_decode_node_s_own_token() -> None:
    one = attempt(placement_on(DECODE, PREFILL))
    assert one.note_tokens(10.5, None) is None
    assert one.decoding_at is None
    one.handed_at = 10.5
    error = PredictionError("split", 0.04, 1.0)
    times = one.note_tokens(11.0, 10.5)
    assert times == FirstTokenTimes(None, 0.5, error)
    assert {"first": one.first_at, "decoding": one.decoding_at} == {"first": 10.5, "decoding": 11.0}


def test_what_a_way_costs_others_is_not_expected_of_the_request_itself() -> None:
    weighed = (way(PREFILL, 30.0, compute_ms=30.0), way(None, 40.0, slowdown_ms=15.0))
    one = attempt(placement_on(DECODE, considered=weighed))
    assert one.chosen == weighed[1]
    times = one.note_tokens(11.0, None)
    assert times is not None
    assert times.error == PredictionError("whole", 0.025, 1.0)


def test_a_pair_that_lost_its_prefill_node_proves_no_prediction_wrong() -> None:
    one = attempt(placement_on(DECODE, PREFILL))
    one.end("link", 11.0, PREFILL)
    one.give_up_prefill(12.0)
    assert one.note_tokens(13.0, None) is None
    assert (one.ended, one.blamed, one.decoding_at) == (None, PREFILL, 13.0)


def test_a_client_that_had_tokens_waited_from_its_last_one_to_the_first_of_the_attempt() -> None:
    one = attempt(placement_on(DECODE))
    times = one.note_tokens(12.0, 9.0)
    assert times is not None
    assert times.pause_s == 3.0

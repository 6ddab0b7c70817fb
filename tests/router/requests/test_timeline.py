"""What is remembered of one request, by a clock that the test turns."""

from __future__ import annotations

from typing import Any

from baton_protocol.ids import NodeId
from baton_protocol.link import RequestStats
from baton_router.placement.policy import Considered, Placement, PredictionError
from baton_router.requests.timeline import MAX_ATTEMPTS, MAX_WAITS, PlacementBasis, Timeline

KNOWN = PlacementBasis(store_up=True, chunks=4, stored_chunks=2)
DECODE, PREFILL = NodeId("decode-0"), NodeId("prefill-0")


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


def placement(prefill: NodeId | None = None, **changes: Any) -> Placement:
    facts: dict[str, Any] = {
        "decode": DECODE,
        "prefill": prefill,
        "reason": "split" if prefill else "short",
        "explanation": "",
        "predicted_ms": 40.0,
        "uncached": 24,
    }
    return Placement(**(facts | changes))


def test_one_node_s_prediction_is_measured_at_its_first_token() -> None:
    story = Timeline(0.0)
    story.placed(1, placement(), KNOWN, 10.0)
    assert story.spoke(10.05, handed=False) == PredictionError("whole", 0.04, 10.05 - 10.0)
    assert not story.silent


def test_a_pair_s_prediction_is_measured_at_the_decode_node_s_own_token() -> None:
    story = Timeline(0.0)
    story.placed(1, placement(PREFILL), KNOWN, 10.0)
    assert story.spoke(10.5, handed=False) is None
    assert story.silent
    assert story.spoke(11.0, handed=True) == PredictionError("split", 0.04, 1.0)
    (attempt,) = story.attempts
    assert (attempt.first_at, attempt.decoding_at) == (10.5, 11.0)


def test_what_a_way_costs_others_is_not_expected_of_the_request_itself() -> None:
    weighed = (way(PREFILL, 30.0, compute_ms=30.0), way(None, 40.0, slowdown_ms=15.0))
    story = Timeline(0.0)
    story.placed(1, placement(considered=weighed), KNOWN, 0.0)
    assert story.attempts[0].chosen == weighed[1]
    assert story.spoke(1.0, handed=False) == PredictionError("whole", 0.025, 1.0)


def test_a_pair_that_lost_its_prefill_node_proves_no_prediction_wrong() -> None:
    story = Timeline(0.0)
    story.placed(1, placement(PREFILL), KNOWN, 0.0)
    story.lost("link", 1.0, PREFILL)
    story.alone(2.0)
    assert story.silent
    assert story.spoke(3.0, handed=False) is None
    story.over("done", 4.0)
    (attempt,) = story.attempts
    assert (attempt.alone_at, attempt.blamed, attempt.decoding_at) == (2.0, PREFILL, 3.0)
    assert (attempt.ended, attempt.ended_at, story.end) == ("done", 4.0, "done")


def test_a_wait_lasts_until_a_place_is_found_or_its_reason_changes() -> None:
    story = Timeline(0.0)
    for now, why in ((1.0, "nobody"), (2.0, "nobody"), (3.0, "its turn")):
        story.waiting(why, now)
    story.placed(1, placement(), KNOWN, 5.0)
    assert [(w.since, w.until, w.why) for w in story.waits] == [
        (1.0, 3.0, "nobody"),
        (3.0, 5.0, "its turn"),
    ]


def test_an_end_without_a_place_ends_the_wait() -> None:
    story = Timeline(0.0)
    story.waiting("nobody", 1.0)
    story.over("failed", 4.0)
    assert (story.waits[0].until, story.attempts, story.end) == (4.0, [], "failed")


def test_figures_are_the_prefill_node_s_and_then_the_decode_node_s() -> None:
    first, second = RequestStats(computed_tokens=8), RequestStats(computed_tokens=1)
    story = Timeline(0.0)
    story.placed(1, placement(PREFILL), KNOWN, 0.0)
    story.told(first)
    story.told(second)
    assert story.attempts[0].measured == [(PREFILL, first), (DECODE, second)]
    story.placed(2, placement(), KNOWN, 1.0)
    story.told(second)
    assert story.attempts[1].measured == [(DECODE, second)]


def test_many_attempts_and_waits_take_bounded_room_and_the_first_ones_stay() -> None:
    story = Timeline(0.0)
    for number in range(1, 101):
        story.waiting(f"wait {number}", number)
        story.placed(number, placement(), KNOWN, number + 0.5)
        story.lost("refused", number + 0.6, DECODE)
    assert (len(story.attempts), story.left_out) == (MAX_ATTEMPTS, 100 - MAX_ATTEMPTS)
    assert (story.attempts[0].number, story.attempts[-1].number) == (1, 100)
    assert (len(story.waits), story.waits[0].why) == (MAX_WAITS, "wait 1")
    assert story.waits[-1].why == "wait 100"

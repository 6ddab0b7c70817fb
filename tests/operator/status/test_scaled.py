"""Condition Scaled: surplus nodes and their drain."""

from __future__ import annotations

from typing import Any

from baton_operator.api.spec_reader import SpecError
from baton_operator.api.status import PoolStatus
from baton_operator.state.observed import Departure, Observed, ObservedPod
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner import observations as o
from tests.support.planner.observations import DEMO, condition_of, observed, status_of, verdict

SINCE = "2026-05-04T11:59:30Z"
HELD = Departure("prefill", "1 more to remove: the operator cannot reach the index", held=True)
READING = Departure("decode", "1 more to remove: the operator is querying the index", held=False)
TWO = sample_pool("sim", decode={"replicas": 2})


def leaving(number: int = 1, **changes: Any) -> ObservedPod:
    """Return a marked node beyond the number in the spec."""
    facts: dict[str, Any] = {"drain_since": SINCE, "drain_reason": "least loaded"}
    return o.pod("decode", number, "1a2b3c4d5e", **(facts | changes))


def with_leaving(*departures: Departure) -> PoolStatus:
    decode = (*o.role_pods(DEMO, "decode"), leaving())
    return status_of(observed(decode=decode, departures=departures))


def test_a_pool_without_surplus_nodes_is_scaled() -> None:
    assert verdict(status_of(observed()), "Scaled") == ("True", "NoneTooMany")


def test_a_draining_node_is_shown_with_its_time_and_reason() -> None:
    status = with_leaving()
    assert verdict(status, "Scaled") == ("False", "Draining")
    assert condition_of(status, "Scaled").message == f"{leaving().name} since {SINCE}: least loaded"


def test_a_pool_stays_ready_during_a_drain() -> None:
    status = with_leaving(HELD)
    assert verdict(status, "Ready") == ("True", "AllReady")
    assert (status.decode.summary, status.decode.draining) == ("1/1", 1)


def test_a_held_drain_comes_first_in_the_message() -> None:
    status = with_leaving(READING, HELD)
    assert verdict(status, "Scaled") == ("False", "DrainHeld")
    held, reading, draining = condition_of(status, "Scaled").message.split("; ")
    assert held == "prefill: 1 more to remove: the operator cannot reach the index"
    assert reading == "decode: 1 more to remove: the operator is querying the index"
    assert draining.startswith(leaving().name)


def test_the_surplus_is_shown_until_a_node_is_chosen() -> None:
    status = status_of(observed(departures=(READING,)))
    assert verdict(status, "Scaled") == ("False", "Draining")
    assert "1 more to remove" in condition_of(status, "Scaled").message


def test_a_draining_node_does_not_replace_a_missing_one() -> None:
    ready, _ = o.role_pods(TWO, "decode")
    status = status_of(observed(TWO, decode=(ready, leaving())), TWO)
    assert verdict(status, "DecodeReady") == ("False", "Starting")


def test_a_terminating_pod_is_counted_but_not_shown() -> None:
    decode = (*o.role_pods(DEMO, "decode"), leaving(terminating=True))
    status = status_of(observed(decode=decode))
    assert verdict(status, "Scaled") == ("True", "NoneTooMany")
    assert status.decode.draining == 1


def test_an_invalid_spec_does_not_hide_a_drain() -> None:
    before = status_of(observed())
    seen = observed(decode=(*o.role_pods(DEMO, "decode"), leaving()))
    status = status_of(seen, SpecError("spec.x: wrong"), before)
    assert verdict(status, "Scaled") == ("False", "Draining")
    never = status_of(Observed(), SpecError("spec.x: wrong"))
    assert never.condition("Scaled") is None

"""Condition Scaled: surplus nodes and their drain."""

from __future__ import annotations

from typing import Any

from baton_operator.api.pool import SpecError
from baton_operator.api.status import PoolStatus
from baton_operator.state.observed import Departure, Observed, ObservedPod
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner import observations as o
from tests.support.planner.observations import DEMO, observed, said, status_of, verdict

SINCE = "2026-05-04T11:59:30Z"
HELD = Departure("prefill", "1 too many: the index does not answer", held=True)
ASKED = Departure("decode", "1 too many: the index is asked", held=False)
TWO = sample_pool("sim", decode={"replicas": 2})


def leaving(number: int = 1, **changes: Any) -> ObservedPod:
    """One more than the spec wants."""
    facts: dict[str, Any] = {"drain_since": SINCE, "drain_reason": "least to lose"}
    return o.pod("decode", number, "1a2b3c4d5e", **(facts | changes))


def with_leaving(*departures: Departure) -> PoolStatus:
    decode = (*o.role_pods(DEMO, "decode"), leaving())
    return status_of(observed(decode=decode, departures=departures))


def test_a_pool_with_as_many_nodes_as_it_wants_is_scaled() -> None:
    assert verdict(status_of(observed()), "Scaled") == ("True", "NoneTooMany")


def test_a_draining_node_is_named_with_time_and_reason() -> None:
    status = with_leaving()
    assert verdict(status, "Scaled") == ("False", "Draining")
    assert said(status, "Scaled").message == f"{leaving().name} since {SINCE}: least to lose"


def test_a_drain_keeps_no_pool_from_being_ready() -> None:
    status = with_leaving(HELD)
    assert verdict(status, "Ready") == ("True", "AllReady")
    assert (status.decode.summary, status.decode.draining) == ("1/1", 1)


def test_what_holds_a_drain_up_comes_first() -> None:
    status = with_leaving(ASKED, HELD)
    assert verdict(status, "Scaled") == ("False", "DrainHeld")
    held, asked, drains = said(status, "Scaled").message.split("; ")
    assert held == "prefill: 1 too many: the index does not answer"
    assert asked == "decode: 1 too many: the index is asked"
    assert drains.startswith(leaving().name)


def test_until_a_node_is_chosen_the_surplus_is_counted() -> None:
    status = status_of(observed(departures=(ASKED,)))
    assert verdict(status, "Scaled") == ("False", "Draining")
    assert "1 too many" in said(status, "Scaled").message


def test_a_node_that_drains_does_not_stand_in_for_one_that_is_missing() -> None:
    ready, _ = o.role_pods(TWO, "decode")
    status = status_of(observed(TWO, decode=(ready, leaving())), TWO)
    assert verdict(status, "DecodeReady") == ("False", "Starting")


def test_a_terminating_pod_is_counted_but_not_named() -> None:
    decode = (*o.role_pods(DEMO, "decode"), leaving(terminating=True))
    status = status_of(observed(decode=decode))
    assert verdict(status, "Scaled") == ("True", "NoneTooMany")
    assert status.decode.draining == 1


def test_an_invalid_spec_hides_no_drain() -> None:
    before = status_of(observed())
    seen = observed(decode=(*o.role_pods(DEMO, "decode"), leaving()))
    status = status_of(seen, SpecError("spec.x: wrong"), before)
    assert verdict(status, "Scaled") == ("False", "Draining")
    never = status_of(Observed(), SpecError("spec.x: wrong"))
    assert never.condition("Scaled") is None

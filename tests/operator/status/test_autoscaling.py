"""The status of the planner's decisions, and of a sleeping pool."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_operator.api.pool import Pool
from baton_operator.api.spec_reader import SpecError
from baton_operator.api.status import AutoscalingStatus, PoolStatus
from baton_operator.state.observed import Planned
from baton_operator.status.autoscaling import NUMBERS_EVERY_S
from baton_operator.status.events import events_between
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner import observations as o
from tests.support.planner.observations import observed, stamp, status_of, verdict

AUTO: dict[str, Any] = {"mode": "auto", "prefill": {"max": 4}, "decode": {"max": 4}}
POOL = sample_pool("sim", autoscaling=AUTO)
SLEEPY = AUTO | {"scaleToZeroAfterSeconds": 60}
STEADY = Planned(
    mode="auto", prefill=1, decode=1, reason="Steady", message="as it is", numbers="a 1"
)
MORE = msgspec.structs.replace(STEADY, prefill=2, reason="DemandRose", message="prefill 1 -> 2")


def status_after(
    planned: Planned | None,
    before: PoolStatus | None = None,
    after_s: float = 0.0,
    pool: Pool | SpecError = POOL,
) -> PoolStatus:
    return status_of(observed(POOL, planned=planned), pool, before, after_s=after_s)


def autoscaling_of(status: PoolStatus) -> AutoscalingStatus:
    assert status.autoscaling is not None
    return status.autoscaling


def sleeping(name: str = "sim", nodes: int = 0, **model: Any) -> Pool:
    count = {"replicas": nodes}
    return sample_pool(name, autoscaling=SLEEPY, prefill=count, decode=count, **model)


def test_a_decision_is_written_with_its_time() -> None:
    assert autoscaling_of(status_after(STEADY)) == AutoscalingStatus(
        mode="auto",
        desired_prefill=1,
        desired_decode=1,
        reason="Steady",
        message="as it is",
        numbers="a 1",
        since=stamp(0),
        time=stamp(0),
    )


def test_changed_numbers_alone_are_written_once_a_minute() -> None:
    first = status_after(STEADY)
    moved = msgspec.structs.replace(STEADY, numbers="a 2")
    assert autoscaling_of(status_after(moved, first, NUMBERS_EVERY_S - 1.0)) == autoscaling_of(
        first
    )
    later = autoscaling_of(status_after(moved, first, NUMBERS_EVERY_S))
    assert (later.numbers, later.since, later.time) == ("a 2", stamp(0), stamp(NUMBERS_EVERY_S))


@pytest.mark.parametrize("change", [{"prefill": 2}, {"decode": 0}, {"reason": "Idle"}])
def test_a_changed_count_or_reason_is_written_at_once(change: dict[str, Any]) -> None:
    moved = msgspec.structs.replace(STEADY, **change)
    assert autoscaling_of(status_after(moved, status_after(STEADY), 1.0)).since == stamp(1)


def test_the_last_decision_stays_while_there_is_no_new_one() -> None:
    first = status_after(MORE)
    assert status_after(None, first, 999.0).autoscaling == first.autoscaling
    assert status_after(None, first, 999.0, SpecError("spec: no")).autoscaling == first.autoscaling


def test_without_autoscaling_the_status_has_no_autoscaling_part() -> None:
    status = status_after(None, status_after(MORE), pool=sample_pool("sim"))
    assert status.autoscaling is None
    assert "autoscaling" not in status.written()
    assert status_after(MORE).written()["autoscaling"]["desiredPrefill"] == 2


def test_a_changed_count_is_an_event_and_an_unchanged_one_is_not() -> None:
    before, after = status_after(STEADY), status_after(MORE, status_after(STEADY))
    [event] = events_between(before, after)
    assert (event.type, event.reason, event.message) == ("Normal", "DemandRose", "prefill 1 -> 2")
    held = msgspec.structs.replace(MORE, reason="CapacityComing")
    assert events_between(after, status_after(held, after, 5.0)) == ()


def test_the_first_decision_is_an_event_only_if_it_changes_a_count() -> None:
    fixed = status_of(observed(), sample_pool("sim"))
    assert [one.reason for one in events_between(fixed, status_after(MORE, fixed))] == [
        "DemandRose"
    ]
    assert events_between(fixed, status_after(STEADY, fixed)) == ()


def test_an_external_count_is_no_event() -> None:
    before = status_after(STEADY)
    external = msgspec.structs.replace(STEADY, prefill=2, message="prefill 2 (Steady: as it is)")
    assert events_between(before, status_after(external, before)) == ()


def test_advice_is_no_event() -> None:
    advice = msgspec.structs.replace(MORE, mode="advise")
    before = status_after(msgspec.structs.replace(STEADY, mode="advise"))
    assert events_between(before, status_after(advice, before)) == ()


def test_a_sleeping_pool_is_ready() -> None:
    pool = sleeping()
    status = status_of(observed(pool), pool)
    assert verdict(status, "Ready") == ("True", "AllReady")
    assert verdict(status, "Serving") == ("True", "Asleep")
    assert verdict(status, "DecodeReady") == ("True", "NoneWanted")
    hub = sleeping("hub")
    assert verdict(status_of(observed(hub), hub), "ModelReady") == ("True", "Asleep")


def test_a_waking_pool_is_not_ready() -> None:
    pool = sleeping(nodes=1)
    starting: dict[str, Any] = {
        role: o.role_pods(pool, role, ready=False) for role in ("prefill", "decode")
    }
    status = status_of(observed(pool, **starting), pool)
    assert verdict(status, "Serving") == ("False", "Waking")
    assert verdict(status, "Ready") == ("False", "Starting")


def test_a_sleeping_pool_without_a_router_does_not_serve() -> None:
    pool = sleeping()
    routers = tuple(msgspec.structs.replace(one, ready=False) for one in o.shared_pods(pool))
    status = status_of(observed(pool, others=routers), pool)
    assert verdict(status, "Serving") == ("False", "NoRouter")
    assert verdict(status, "RouterReady") == ("False", "Starting")


def test_a_pool_whose_engines_sleep_serves_and_is_ready() -> None:
    asleep = Planned(mode="auto", prefill=1, decode=1, reason="NodesAsleep", message="asleep")
    status = status_of(observed(POOL, planned=asleep), POOL)
    assert verdict(status, "Serving") == ("True", "NodesAsleep")
    assert verdict(status, "DecodeReady") == ("True", "NodesReady")
    assert verdict(status, "Ready")[0] == "True"


def test_a_pool_without_scale_to_zero_is_never_asleep() -> None:
    none: dict[str, Any] = {"prefill": (), "decode": ()}
    assert verdict(status_of(observed(POOL, **none), POOL), "Serving") == ("False", "NoNode")

"""Condition RolloutBlocked: whether a roll-out has stopped until a person intervenes."""

from __future__ import annotations

from typing import Any

import msgspec

from baton_operator.state.observed import Departure, Observed, ObservedPod, Roll
from baton_operator.status.events import events_between
from tests.support.planner import observations as o
from tests.support.planner.observations import DEMO, condition_of, observed, status_of, verdict

NO_ROOM = "4 GPUs are needed"


def rolling(*new: ObservedPod, **changes: Any) -> Observed:
    """Return an observation with these new decode nodes and one old one."""
    facts: dict[str, Any] = {"decode": (*new, o.pod("decode", 0, o.OLD))}
    return observed(**(facts | changes))


def starting(**problem: str) -> tuple[ObservedPod, ...]:
    return o.role_pods(DEMO, "decode", ready=False, **problem)


def blocked(seen: Observed) -> tuple[str, str]:
    return verdict(status_of(seen), "RolloutBlocked")


def test_a_pool_of_one_revision_does_not_roll() -> None:
    assert blocked(observed()) == ("False", "NotRolling")


def test_a_roll_out_in_progress_is_not_blocked_and_reports_how_far_it_is() -> None:
    status = status_of(rolling(*starting(), roll=Roll(rolling=True)))
    assert verdict(status, "RolloutBlocked") == ("False", "Rolling")
    assert condition_of(status, "RolloutBlocked").message == "1 old nodes are left; 1 of 2 ready"


def test_a_gpu_budget_without_room_blocks_a_roll_out() -> None:
    status = status_of(rolling(roll=Roll(rolling=True, no_room=NO_ROOM)))
    assert verdict(status, "RolloutBlocked") == ("True", "GpuBudgetTooSmall")
    assert condition_of(status, "RolloutBlocked").message == NO_ROOM
    assert verdict(status, "Ready") == ("True", "AllReady")


def test_a_failing_new_node_blocks_a_roll_out_with_its_cause() -> None:
    status = status_of(rolling(*starting(problem="Unschedulable", message="0/2 nodes")))
    assert verdict(status, "RolloutBlocked") == ("True", "NewNodesFailing")
    [pod] = starting()
    message = condition_of(status, "RolloutBlocked").message
    assert message == f"Unschedulable: {pod.name}: 0/2 nodes"


def test_old_nodes_that_cannot_be_drained_block_a_roll_out() -> None:
    departure = Departure("decode", "1 more to remove: no index is ready", held=True)
    status = status_of(rolling(*o.role_pods(DEMO, "decode"), departures=(departure,)))
    assert verdict(status, "RolloutBlocked") == ("True", "OldNodesHeld")
    assert "no index is ready" in condition_of(status, "RolloutBlocked").message


def test_slow_drains_of_old_nodes_do_not_block_a_roll_out() -> None:
    departure = Departure(
        "decode", "1 more to remove: the operator is querying the index", held=False
    )
    seen = rolling(*o.role_pods(DEMO, "decode"), departures=(departure,))
    assert blocked(seen) == ("False", "Rolling")


def test_a_blocked_roll_out_gives_one_event() -> None:
    stopped = rolling(*starting(problem="Crashing", message="boom"))
    before, after = status_of(rolling(*starting())), status_of(stopped)
    [event] = [one for one in events_between(before, after) if one.reason == "RolloutBlocked"]
    assert event.type == "Warning"
    assert event.message.startswith("NewNodesFailing: Crashing: ")
    again = status_of(stopped, before=after)
    assert events_between(after, again) == ()


def test_a_role_that_the_gpu_budget_limits_reports_it() -> None:
    short = msgspec.structs.replace(DEMO.spec.decode, replicas=3)
    pool = msgspec.structs.replace(DEMO, spec=msgspec.structs.replace(DEMO.spec, decode=short))
    one = o.pod("decode", 0, o.role_pods(DEMO, "decode")[0].revision)
    seen = observed(pool, decode=(one,), roll=Roll(short=("decode",)))
    status = status_of(seen, pool)
    assert verdict(status, "DecodeReady") == ("False", "GpuBudgetReached")
    assert condition_of(status, "DecodeReady").message == "1 of 3 ready"

"""When a surplus node may be removed, and how far its Deployment is scaled down."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from baton_operator.drain.marks import LOWEST_COST, LeaveTerms, leave_of, mark_body, unmark_body
from baton_operator.drain.steps import (
    DrainAnswer,
    DrainOutcome,
    DrainWait,
    allowed_replicas,
    choose_leavers,
    wait_of,
)
from baton_operator.drain.victims import Victim
from baton_operator.kube.kinds import ChildKey
from baton_operator.names import DRAIN_S
from baton_operator.state.observed import ObservedPod
from baton_protocol.store import NodeReport
from tests.operator.drain.surplus import load, node

READY, UNREADY = node("a"), node("a", ready=False)
REMOVABLE = None
NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
POD = ChildKey("v1", "Pod", "serving", "a")


@pytest.mark.parametrize(
    ("pod", "outcome", "reports", "drained_s", "wait"),
    [
        (READY, "taken", (load("a", state="draining"),), 1, REMOVABLE),
        (READY, "taken", (load("a", 2, state="draining"),), 1, DrainWait()),
        (READY, "taken", (load("a"),), 1, DrainWait()),
        (READY, "taken", None, 1, DrainWait()),
        (READY, "taken", (load("a", 2, state="draining"),), DRAIN_S, REMOVABLE),
        (READY, "taken", None, DRAIN_S, REMOVABLE),
        (READY, "failed", None, DRAIN_S, DrainWait("why")),
        (READY, "failed", (load("a"),), DRAIN_S, DrainWait("why")),
        (READY, "failed", (load("a", state="draining"),), 1, REMOVABLE),
        (READY, "taken", (load("a", state="draining", wakes=True),), 1, DrainWait()),
        (READY, "unknown", (), 1, DrainWait()),
        (READY, "unknown", (), DRAIN_S, REMOVABLE),
        (READY, "unable", (load("a", 2),), 1, DrainWait()),
        (READY, "unable", (load("a", 2),), DRAIN_S, REMOVABLE),
        (UNREADY, "unknown", None, 1, REMOVABLE),
        (UNREADY, "failed", (), 1, REMOVABLE),
        (UNREADY, "failed", None, 1, DrainWait("why")),
        (UNREADY, "taken", (load("a", 2),), 1, DrainWait()),
        (node("a", ready=False, stage="pending"), "failed", None, 0, REMOVABLE),
    ],
    ids=[
        "drained",
        "draining, with requests",
        "the report is older than the drain",
        "the index has not been read since",
        "past the deadline",
        "past the deadline, without the index",
        "the drain failed at every router, without the index",
        "the drain failed at every router, and the node still serves",
        "the drain failed at every router, but the node has drained",
        "the report is of its sleep, before the drain",
        "unknown to the routers, although ready",
        "unknown to the routers, past the deadline",
        "unreachable for the routers",
        "unreachable for the routers, past the deadline",
        "not ready, and unknown to the routers",
        "not ready, and without a report",
        "not ready, without routers and index",
        "not ready, with requests",
        "not started",
    ],
)
def test_a_node_is_removable_once_it_has_drained_or_its_deadline_has_passed(
    pod: ObservedPod,
    outcome: DrainOutcome,
    reports: tuple[NodeReport, ...] | None,
    drained_s: float,
    wait: DrainWait | None,
) -> None:
    by_name = {str(report.node): report for report in reports} if reports is not None else None
    assert wait_of(pod, DrainAnswer(outcome, "why"), by_name, drained_s) == wait


def victims(*pods: ObservedPod) -> list[Victim]:
    return [Victim(pod, "why") for pod in pods]


PENDING = node("p", ready=False, stage="pending")
NOT_READY = node("u", ready=False)
FIRST, SECOND = node("g"), node("w")


@pytest.mark.parametrize(
    ("chosen", "waiting", "going"),
    [
        (victims(FIRST), {"g"}, []),
        (victims(FIRST), set(), ["g"]),
        (victims(FIRST, SECOND), {"g"}, []),
        (victims(PENDING, FIRST), {"g"}, ["p"]),
        (victims(PENDING, NOT_READY, FIRST), {"g"}, ["p", "u"]),
        (victims(PENDING, NOT_READY, FIRST), {"u"}, ["p"]),
        (victims(), set(), []),
    ],
    ids=[
        "a waiting node stays",
        "a drained node is removed",
        "nothing is removed if Kubernetes might delete the waiting node",
        "a pod that never started is removed at once",
        "an unready pod too",
        "a pod waits for those that Kubernetes deletes first",
        "no victims",
    ],
)
def test_victims_are_removed_in_the_order_in_which_kubernetes_deletes_pods(
    chosen: list[Victim], waiting: set[str], going: list[str]
) -> None:
    assert [victim.pod.name for victim in choose_leavers(chosen, waiting)] == going


@pytest.mark.parametrize(
    ("current", "wanted", "pods", "leaving", "replicas"),
    [
        (3, 2, 3, 0, 3),
        (3, 2, 3, 1, 2),
        (5, 2, 3, 0, 3),
        (5, 2, 5, 2, 3),
        (3, 0, 3, 3, 0),
        (4, 2, 1, 0, 2),
    ],
    ids=[
        "held",
        "one leaves",
        "two were never created",
        "two of three leave",
        "all leave",
        "fewer pods than wanted",
    ],
)
def test_replicas_are_lowered_by_the_nodes_that_leave(
    current: int, wanted: int, pods: int, leaving: int, replicas: int
) -> None:
    assert allowed_replicas(current, wanted, pods, leaving) == replicas


def annotations_of(body: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = body["metadata"]["annotations"]
    return found


def test_a_mark_has_its_time_and_reason_and_makes_kubernetes_delete_the_pod_first() -> None:
    body = mark_body(POD, "uid", NOW, "it is idle", LeaveTerms())
    assert annotations_of(body) == {
        "controller.kubernetes.io/pod-deletion-cost": LOWEST_COST,
        "baton.dev/drain-since": "2026-05-04T12:00:00Z",
        "baton.dev/drain-reason": "it is idle",
    }
    assert body["metadata"]["uid"] == unmark_body(POD, "uid")["metadata"]["uid"] == "uid"
    assert annotations_of(unmark_body(POD, "uid")) == {}


def test_the_mark_of_an_old_node_has_its_replacement_and_its_deadline() -> None:
    written = annotations_of(mark_body(POD, "uid", NOW, "why", LeaveTerms(600, "0a1b")))
    assert written["baton.dev/drain-seconds"] == "600"
    assert written["baton.dev/replaced-by"] == "0a1b"
    assert leave_of(node("a", drain_seconds="600", replaced_by="0a1b")) == LeaveTerms(600, "0a1b")


@pytest.mark.parametrize("seconds", ["", "soon", "-5", "1.5", "\N{SUPERSCRIPT TWO}"])
def test_a_mark_without_valid_seconds_has_the_deadline_of_a_scale_down(seconds: str) -> None:
    assert leave_of(node("a", drain_seconds=seconds)) == LeaveTerms(DRAIN_S, "")


@pytest.mark.parametrize(
    ("outcome", "drained_s", "wait"),
    [
        ("taken", DRAIN_S, DrainWait()),
        ("taken", 600, REMOVABLE),
        ("unable", 599, DrainWait()),
        ("unknown", DRAIN_S, REMOVABLE),
    ],
)
def test_an_old_node_whose_requests_cannot_move_has_a_longer_deadline(
    outcome: DrainOutcome, drained_s: float, wait: DrainWait | None
) -> None:
    assert wait_of(READY, DrainAnswer(outcome), {"a": load("a", 2)}, drained_s, 600) == wait


def test_the_time_of_a_mark_is_written_in_utc() -> None:
    written = annotations_of(mark_body(POD, "uid", NOW, "", LeaveTerms()))["baton.dev/drain-since"]
    assert written == "2026-05-04T12:00:00Z"

"""When a surplus node may go, and how far its Deployment is scaled down."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from baton_operator.drain.marks import LOWEST_COST, LeaveTerms, leave_of, mark, unmark
from baton_operator.drain.steps import (
    DrainAnswer,
    DrainWait,
    Outcome,
    allowed_replicas,
    leavers,
    wait_of,
)
from baton_operator.drain.victims import Victim
from baton_operator.kube.kinds import ChildKey
from baton_operator.names import DRAIN_S
from baton_operator.state.observed import ObservedPod
from baton_protocol.store import NodeReport
from tests.operator.drain.test_victims import load, node

READY, UNREADY = node("a"), node("a", ready=False)
GOES = None
NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
POD = ChildKey("v1", "Pod", "serving", "a")


@pytest.mark.parametrize(
    ("pod", "outcome", "reports", "drained_s", "wait"),
    [
        (READY, "taken", (load("a", state="draining"),), 1, GOES),
        (READY, "taken", (load("a", 2, state="draining"),), 1, DrainWait()),
        (READY, "taken", (load("a"),), 1, DrainWait()),
        (READY, "taken", None, 1, DrainWait()),
        (READY, "taken", (load("a", 2, state="draining"),), DRAIN_S, GOES),
        (READY, "taken", None, DRAIN_S, GOES),
        (READY, "failed", None, DRAIN_S, DrainWait("why")),
        (READY, "failed", (load("a"),), DRAIN_S, DrainWait("why")),
        (READY, "failed", (load("a", state="draining"),), 1, GOES),
        (READY, "unknown", (), 1, DrainWait()),
        (READY, "unknown", (), DRAIN_S, GOES),
        (READY, "unable", (load("a", 2),), 1, DrainWait()),
        (READY, "unable", (load("a", 2),), DRAIN_S, GOES),
        (UNREADY, "unknown", None, 1, GOES),
        (UNREADY, "failed", (), 1, GOES),
        (UNREADY, "failed", None, 1, DrainWait("why")),
        (UNREADY, "taken", (load("a", 2),), 1, DrainWait()),
        (node("a", ready=False, stage="pending"), "failed", None, 0, GOES),
    ],
    ids=[
        "it has drained",
        "its requests are at work",
        "its report is from before",
        "nobody has asked the index since",
        "past the deadline",
        "past the deadline, without the index",
        "no router could be told: it is held for good",
        "no router could be told, and it is at work",
        "no router could be told, but it has drained",
        "no router knows it, though it is ready",
        "no router knows it, past the deadline",
        "routers cannot reach it",
        "routers cannot reach it, past the deadline",
        "not ready, and no router knows it",
        "not ready, and it reports nothing",
        "not ready, and nobody could be asked",
        "not ready, and at work",
        "not started",
    ],
)
def test_when_a_node_may_go(
    pod: ObservedPod,
    outcome: Outcome,
    reports: tuple[NodeReport, ...] | None,
    drained_s: float,
    wait: DrainWait | None,
) -> None:
    by_name = {str(one.node): one for one in reports} if reports is not None else None
    assert wait_of(pod, DrainAnswer(outcome, "why"), by_name, drained_s) == wait


def victims(*pods: ObservedPod) -> list[Victim]:
    return [Victim(pod, "why") for pod in pods]


PENDING = node("p", ready=False, stage="pending")
BAD = node("u", ready=False)
GOOD, WELL = node("g"), node("w")


@pytest.mark.parametrize(
    ("chosen", "waiting", "going"),
    [
        (victims(GOOD), {"g"}, []),
        (victims(GOOD), set(), ["g"]),
        (victims(GOOD, WELL), {"g"}, []),
        (victims(PENDING, GOOD), {"g"}, ["p"]),
        (victims(PENDING, BAD, GOOD), {"g"}, ["p", "u"]),
        (victims(PENDING, BAD, GOOD), {"u"}, ["p"]),
        (victims(), set(), []),
    ],
    ids=[
        "it waits",
        "it may go",
        "Kubernetes might take the one that waits",
        "what never started goes at once",
        "and what is not ready",
        "what would be taken later waits for what would be taken first",
        "nobody",
    ],
)
def test_who_goes_is_whom_kubernetes_would_take(
    chosen: list[Victim], waiting: set[str], going: list[str]
) -> None:
    assert [victim.pod.name for victim in leavers(chosen, waiting)] == going


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
    ids=["held", "one goes", "two were never made", "two of three go", "all go", "few are there"],
)
def test_replicas_follow_those_that_may_go(
    current: int, wanted: int, pods: int, leaving: int, replicas: int
) -> None:
    assert allowed_replicas(current, wanted, pods, leaving) == replicas


def notes(body: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = body["metadata"]["annotations"]
    return found


def test_a_mark_says_since_when_and_why_and_makes_kubernetes_take_the_pod_first() -> None:
    body = mark(POD, "uid", NOW, "it is idle", LeaveTerms())
    assert notes(body) == {
        "controller.kubernetes.io/pod-deletion-cost": LOWEST_COST,
        "baton.dev/drain-since": "2026-05-04T12:00:00Z",
        "baton.dev/drain-reason": "it is idle",
    }
    assert body["metadata"]["uid"] == unmark(POD, "uid")["metadata"]["uid"] == "uid"
    assert notes(unmark(POD, "uid")) == {}


def test_the_mark_of_an_old_node_says_what_takes_its_place_and_for_how_long_it_may_go_on() -> None:
    written = notes(mark(POD, "uid", NOW, "why", LeaveTerms(600, "0a1b")))
    assert written["baton.dev/drain-seconds"] == "600"
    assert written["baton.dev/replaced-by"] == "0a1b"
    assert leave_of(node("a", drain_seconds="600", replaced_by="0a1b")) == LeaveTerms(600, "0a1b")


@pytest.mark.parametrize("seconds", ["", "soon", "-5", "1.5", "\N{SUPERSCRIPT TWO}"])
def test_a_mark_without_a_number_of_seconds_is_as_in_a_scale_down(seconds: str) -> None:
    assert leave_of(node("a", drain_seconds=seconds)) == LeaveTerms(DRAIN_S, "")


@pytest.mark.parametrize(
    ("outcome", "drained_s", "wait"),
    [
        ("taken", DRAIN_S, DrainWait()),
        ("taken", 600, GOES),
        ("unable", 599, DrainWait()),
        ("unknown", DRAIN_S, GOES),
    ],
)
def test_an_old_node_whose_requests_cannot_move_has_longer(
    outcome: Outcome, drained_s: float, wait: DrainWait | None
) -> None:
    assert wait_of(READY, DrainAnswer(outcome), {"a": load("a", 2)}, drained_s, 600) == wait


def test_a_mark_is_read_as_it_was_written() -> None:
    written = notes(mark(POD, "uid", NOW, "", LeaveTerms()))["baton.dev/drain-since"]
    assert written == "2026-05-04T12:00:00Z"

"""When a pod's events are listed, and how they change the pod's problem."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from baton_operator.kube.client import Api, ApiUnavailable, Refused
from baton_operator.kube.kinds import ObjectKind
from baton_operator.state.cache import PoolKey
from baton_operator.state.observed import FirstSeen, ObservedPod
from baton_operator.status.pod_events import PodEvents
from tests.support.planner.observations import pod

KEY = PoolKey("serving", "demo")
MISSING = 'MountVolume.SetUp failed for volume "api-keys" : secret "keys" not found'


class Events(Api):
    """An API server with at most one Warning, and a clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.note = ""
        self.error: Exception | None = None
        self.requests: list[tuple[float, str]] = []
        self.delays_s: list[float] = []
        self.reader = PodEvents(KEY, self, lambda: self.now, self.delays_s.append)

    async def list_where(
        self, kind: ObjectKind, namespace: str, fields: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        assert (kind.plural, namespace) == ("events", "serving")
        assert {"type": "Warning", "regarding.kind": "Pod"}.items() <= fields.items()
        self.requests.append((self.now, fields["regarding.name"]))
        if self.error is not None:
            raise self.error
        return [{"reason": "FailedMount", "note": self.note}] if self.note else []

    def look(self, *pods: ObservedPod) -> list[tuple[str, str]]:
        """Return the problem and message of each pod."""
        seen = asyncio.run(self.reader.explain_pods(pods))
        return [(pod.problem, pod.message) for pod in seen]

    def until(self, end: float, *pods: ObservedPod) -> list[tuple[str, str]]:
        """Look again after each requested delay until `end`; return the last result."""
        result = self.look(*pods)
        while self.delays_s and self.now + self.delays_s[-1] <= end:
            self.now += self.delays_s[-1]
            result = self.look(*pods)
        self.now = end
        return result


def unprepared(component: str = "decode", number: int = 0, since: float = 1000.0) -> ObservedPod:
    return pod(
        component,
        number,
        ready=False,
        unprepared_since="2026-05-04T10:00:00Z",
        seen=FirstSeen(unprepared=since),
    )


def test_the_kubelets_message_appears_within_15_seconds() -> None:
    """The kubelet may write it at any time up to 10 seconds after the pod was scheduled."""
    for second in range(11):
        events = Events()
        events.until(1000.0 + second, unprepared())
        events.note = MISSING
        [problem] = events.until(1015.0, unprepared())
        assert problem == ("ConfigMissing", f"FailedMount: {MISSING}")


def test_a_pod_that_is_prepared_at_once_costs_no_request() -> None:
    events = Events()
    assert events.until(1003.0, unprepared()) == [("", "")]
    assert events.look(pod("decode", ready=False)) == [("", "")]
    assert events.requests == []


def test_a_known_problem_is_listed_less_often_and_ends_with_its_cause() -> None:
    events = Events()
    events.note = MISSING
    events.until(1100.0, unprepared())
    assert len(events.requests) <= 5
    events.note = ""
    assert events.until(1200.0, unprepared()) == [("ConfigMissing", f"FailedMount: {MISSING}")]
    assert events.look(pod("decode", ready=False)) == [("", "")]


def test_events_are_listed_for_one_pod_of_each_component() -> None:
    events = Events()
    pods = [unprepared(role, number) for role in ("decode", "router") for number in range(50)]
    events.until(1004.0, *pods)
    assert {name for _, name in events.requests} == {"demo-decode-0", "demo-router-0"}


def test_without_an_answer_a_pod_is_unchanged() -> None:
    for error in (ApiUnavailable("away"), Refused(403, "may not list events")):
        events = Events()
        events.error = error
        assert events.until(1020.0, unprepared()) == [("", "")]
        events.error, events.note = None, MISSING
        assert events.until(1030.0, unprepared()) == [("ConfigMissing", f"FailedMount: {MISSING}")]
        events.error = error
        assert events.until(1200.0, unprepared()) == [("ConfigMissing", f"FailedMount: {MISSING}")]

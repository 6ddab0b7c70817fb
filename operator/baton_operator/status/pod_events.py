"""Why the volumes, secrets or network of a pod are not there: events say it, and nothing else does.

In: pods that a kubelet cannot prepare. Out: the same pods, with the kubelet's message. A cluster
has many events, and a pool that is well needs none of them. So they are not watched: they are
listed for a pod that has been unprepared for some seconds, and of each component for one pod, as a
condition names one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from baton_operator.kube.client import ApiError, Body, Unavailable
from baton_operator.kube.kinds import EVENT, ObjectKind
from baton_operator.state.cache import PoolKey
from baton_operator.state.observed import ObservedPod
from baton_operator.state.pod_problems import Problem, unprepared_problem

logger = logging.getLogger(__name__)

# Most pods are prepared in less. A kubelet says within a second of its first try what is missing.
ASK_S = 4.0
# What was said once is mostly said again.
SAID_S = 30.0


class _EventQuery(msgspec.Struct, frozen=True):
    """When events of a pod were listed last, and what came of it. Before the first time: since when
    it is unprepared."""

    at: float
    problem: Problem | None = None

    @property
    def due(self) -> float:
        return self.at + (ASK_S if self.problem is None else SAID_S)


class Lister(Protocol):
    """`Api` is one."""

    async def list_where(
        self, kind: ObjectKind, namespace: str, fields: Mapping[str, str]
    ) -> list[Body]: ...


class PodEvents:
    """One pool's. `clock` is that of `FirstSeen`; `again` is told in how many seconds the pool is
    to be looked at again."""

    def __init__(
        self,
        key: PoolKey,
        api: Lister,
        clock: Callable[[], float],
        again: Callable[[float], None],
    ) -> None:
        self._key = key
        self._api = api
        self._clock = clock
        self._again = again
        self._queries: dict[str, _EventQuery] = {}
        self._refused = False

    async def explained(self, pods: Sequence[ObservedPod]) -> tuple[ObservedPod, ...]:
        queries: dict[str, _EventQuery] = {}
        for pod in _first_unprepared(pods):
            known = self._queries.get(pod.name) or _EventQuery(pod.seen.unprepared)
            if self._clock() >= known.due:
                known = _EventQuery(self._clock(), await self._ask(pod.name) or known.problem)
            queries[pod.name] = known
        self._queries = queries
        if queries:
            due = min(one.due for one in queries.values())
            self._again(max(0.0, due - self._clock()))
        said = {name: one.problem for name, one in queries.items()}
        return tuple(_with_problem(pod, said.get(pod.name)) for pod in pods)

    async def _ask(self, pod: str) -> Problem | None:
        """None also where nobody answers, or the operator may not list events: a condition says
        then that nothing more is known."""
        fields = {"type": "Warning", "regarding.kind": "Pod", "regarding.name": pod}
        try:
            return unprepared_problem(
                await self._api.list_where(EVENT, self._key.namespace, fields)
            )
        except Unavailable as error:
            logger.info("events of pod %s/%s: %s", self._key.namespace, pod, error)
        except ApiError as error:
            if not self._refused:
                logger.warning("pool %s: events of pods are not read: %s", self._key, error)
            self._refused = True
        return None


def _first_unprepared(pods: Sequence[ObservedPod]) -> list[ObservedPod]:
    """One of each component."""
    found: dict[str, ObservedPod] = {}
    for pod in sorted(pods, key=lambda pod: pod.name):
        if pod.unprepared_since and not pod.problem:
            found.setdefault(pod.component, pod)
    return list(found.values())


def _with_problem(pod: ObservedPod, problem: Problem | None) -> ObservedPod:
    if problem is None:
        return pod
    return msgspec.structs.replace(pod, problem=problem.reason, message=problem.message)

"""Finds out why a pod's volumes, secrets or network are missing, which only events say.

In: pods that a kubelet cannot prepare. Out: the same pods with the kubelet's message. A cluster
has many events, and a healthy pool needs none of them. So they are not watched but listed, for
a pod that has been unprepared for some seconds, and for one pod per component, because a
condition names only one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from baton_operator.kube.client import Api, ApiError, ApiUnavailable
from baton_operator.kube.kinds import EVENT
from baton_operator.state.cache import PoolKey
from baton_operator.state.observed import ObservedPod
from baton_operator.state.pod_problem import Problem, unprepared_problem

logger = logging.getLogger(__name__)
# Seconds. Most pods are prepared in less; a kubelet reports a missing Secret within a second.
ASK_S = 4.0
# Seconds between listings once a problem is known: it usually stays the same.
KNOWN_S = 30.0


class _EventQuery(msgspec.Struct, frozen=True):
    """When a pod's events were last listed, and the problem found. Before the first listing `at` is
    the time since which the pod is unprepared."""

    at: float
    problem: Problem | None = None

    @property
    def due(self) -> float:
        return self.at + (ASK_S if self.problem is None else KNOWN_S)


class PodEvents:
    """For one pool. `clock` is that of `FirstSeen`; `again` is called with the seconds until the
    next reconcile."""

    def __init__(
        self,
        key: PoolKey,
        api: Api,
        clock: Callable[[], float],
        again: Callable[[float], None],
    ) -> None:
        self._key = key
        self._api = api
        self._clock = clock
        self._again = again
        self._queries: dict[str, _EventQuery] = {}
        self._refused = False

    async def explain_pods(self, pods: Sequence[ObservedPod]) -> tuple[ObservedPod, ...]:
        """The same pods, with the problems that their events tell."""
        queries: dict[str, _EventQuery] = {}
        for pod in _first_unprepared(pods):
            query = self._queries.get(pod.name) or _EventQuery(pod.seen.unprepared)
            if self._clock() >= query.due:
                problem = await self._read_problem(pod.name) or query.problem
                query = _EventQuery(self._clock(), problem)
            queries[pod.name] = query
        self._queries = queries
        if queries:
            due = min(query.due for query in queries.values())
            self._again(max(0.0, due - self._clock()))
        problems = {name: query.problem for name, query in queries.items()}
        return tuple(_with_problem(pod, problems.get(pod.name)) for pod in pods)

    async def _read_problem(self, pod: str) -> Problem | None:
        """The pod's problem. None also if the events cannot be listed; the condition then says that
        nothing more is known."""
        fields = {"type": "Warning", "regarding.kind": "Pod", "regarding.name": pod}
        try:
            return unprepared_problem(
                await self._api.list_where(EVENT, self._key.namespace, fields)
            )
        except ApiUnavailable as error:
            logger.info("cannot read the events of pod %s/%s: %s", self._key.namespace, pod, error)
        except ApiError as error:
            if not self._refused:
                logger.warning("pool %s: cannot read the events of its pods: %s", self._key, error)
            self._refused = True
        return None


def _first_unprepared(pods: Sequence[ObservedPod]) -> list[ObservedPod]:
    """The first unprepared pod of each component."""
    firsts: dict[str, ObservedPod] = {}
    for pod in sorted(pods, key=lambda pod: pod.name):
        if pod.unprepared_since and not pod.problem:
            firsts.setdefault(pod.component, pod)
    return list(firsts.values())


def _with_problem(pod: ObservedPod, problem: Problem | None) -> ObservedPod:
    if problem is None:
        return pod
    return msgspec.structs.replace(pod, problem=problem.reason, message=problem.message)

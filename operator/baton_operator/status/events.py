"""Events for the changes in a pool's life that a user should see. Pure, except PodEvents.

In: the previous and the current status. Out: Kubernetes events, only for changes, so that an
operator that restarts repeats none. The drainer posts the events about draining nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from baton_operator.api.status import Condition, PoolStatus
from baton_operator.autoscaling.planner.plan import MOVE
from baton_operator.kube.client import ApiError, Body, Unavailable
from baton_operator.kube.kinds import EVENT, ObjectKind
from baton_operator.state.cache import PoolKey
from baton_operator.state.observed import ObservedPod, Problem, unprepared_problem
from baton_operator.status import conditions as c
from baton_operator.status.derive import OLD_NODES, held_words

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


class Lister(Protocol):
    """Implemented by `Api`."""

    async def list_where(
        self, kind: ObjectKind, namespace: str, fields: Mapping[str, str]
    ) -> list[Body]: ...


class PodEvents:
    """Finds out why a pod's volumes, secrets or network are missing, which only events say.

    In: pods that a kubelet cannot prepare. Out: the same pods with the kubelet's message. A cluster
    has many events, and a healthy pool needs none of them. So they are not watched but listed, for
    a pod that has been unprepared for some seconds, and for one pod per component, because a
    condition names only one.

    For one pool. `clock` is that of `FirstSeen`; `again` is called with the seconds until the next
    reconcile.
    """

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
            due = min(query.due for query in queries.values())
            self._again(max(0.0, due - self._clock()))
        problems = {name: query.problem for name, query in queries.items()}
        return tuple(_with_problem(pod, problems.get(pod.name)) for pod in pods)

    async def _ask(self, pod: str) -> Problem | None:
        """The pod's problem. None also if the events cannot be listed; the condition then says that
        nothing more is known."""
        fields = {"type": "Warning", "regarding.kind": "Pod", "regarding.name": pod}
        try:
            return unprepared_problem(
                await self._api.list_where(EVENT, self._key.namespace, fields)
            )
        except Unavailable as error:
            logger.info("cannot read the events of pod %s/%s: %s", self._key.namespace, pod, error)
        except ApiError as error:
            if not self._refused:
                logger.warning("pool %s: cannot read the events of its pods: %s", self._key, error)
            self._refused = True
        return None


def _first_unprepared(pods: Sequence[ObservedPod]) -> list[ObservedPod]:
    """The first unprepared pod of each component."""
    found: dict[str, ObservedPod] = {}
    for pod in sorted(pods, key=lambda pod: pod.name):
        if pod.unprepared_since and not pod.problem:
            found.setdefault(pod.component, pod)
    return list(found.values())


def _with_problem(pod: ObservedPod, problem: Problem | None) -> ObservedPod:
    if problem is None:
        return pod
    return msgspec.structs.replace(pod, problem=problem.reason, message=problem.message)


# Reasons of Ready that need nobody's attention.
_QUIET = frozenset(
    {c.PAUSED.name} | {reason.name for kind in c.KINDS for reason in kind.reasons if reason.waits}
)


# Reasons of conditions that have their own events.
_REPORTED = frozenset(reason.name for kind in (c.VALID, c.APPLIED) for reason in kind.reasons)


class PoolEvent(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def events_between(before: PoolStatus | None, after: PoolStatus) -> tuple[PoolEvent, ...]:
    """Events in causal order."""
    last = before or PoolStatus()
    found = (
        _turned_false(last, after, c.VALID),
        _turned_false(last, after, c.APPLIED),
        _turned_false(last, after, c.SOLE_OPERATOR),
        _revision(last, after),
        _model(last, after),
        _blocked(last, after),
        _rolled_out(last, after),
        _planned(last, after),
        _ready(last, after),
    )
    return tuple(event for event in found if event is not None)


def held(holder: str, other: str) -> PoolEvent:
    """Posted by the operator that leaves the pool alone."""
    return PoolEvent(type="Warning", reason="HeldByOther", message=held_words(holder, other))


def drain_begun(role: str, pod: str, why: str, replaced_by: str) -> PoolEvent:
    """`replaced_by` is the revision that replaces the node, "" in a scale-down."""
    what = f"makes room for revision {replaced_by}" if replaced_by else "is no longer needed"
    return _normal("Draining", f"{role} node {pod} {what} and drains: {why}")


def drain_ended(nodes: str, replicas: int, fewer: int, pods: Sequence[str]) -> PoolEvent:
    """`replicas` is the previous number of such `nodes`, `fewer` the new one."""
    names = ", ".join(pods)
    message = f"{nodes}: scaled from {replicas} to {fewer} replicas, without {names}"
    return _normal("Drained", message)


def drain_undone(role: str, pod: str) -> PoolEvent:
    return _normal("Resumed", f"{role} node {pod} is needed again and no longer drains")


def _normal(reason: str, message: str) -> PoolEvent:
    return PoolEvent(type="Normal", reason=reason, message=message)


def _status(status: PoolStatus, kind: c.ConditionKind) -> str:
    found = status.condition(kind.name)
    return found.status if found is not None else ""


def _became_true(before: PoolStatus, after: PoolStatus, kind: c.ConditionKind) -> Condition | None:
    """The condition, if it was False or Unknown before."""
    if _status(before, kind) in ("False", "Unknown") and _status(after, kind) == "True":
        return after.condition(kind.name)
    return None


def _turned_false(before: PoolStatus, after: PoolStatus, kind: c.ConditionKind) -> PoolEvent | None:
    """An event with the condition's own reason, such as SpecInvalid or ApplyRefused."""
    now = after.condition(kind.name)
    if now is None or now.status != "False" or _status(before, kind) == "False":
        return None
    return PoolEvent(type="Warning", reason=now.reason, message=now.message)


def _revision(before: PoolStatus, after: PoolStatus) -> PoolEvent | None:
    if after.revision == before.revision:
        return None
    nodes = f"{after.prefill.desired} prefill, {after.decode.desired} decode nodes"
    if not before.revision:
        return _normal("Created", f"revision {after.revision}: {nodes}")
    return _normal("Updating", f"revision {before.revision} to {after.revision}: {nodes}")


def _model(before: PoolStatus, after: PoolStatus) -> PoolEvent | None:
    now = _became_true(before, after, c.MODEL_READY)
    if now is None or now.reason != c.FETCHED.name:
        return None
    return _normal("ModelFetched", after.model.name)


def _blocked(before: PoolStatus, after: PoolStatus) -> PoolEvent | None:
    now = after.condition(c.ROLLOUT_BLOCKED.name)
    if now is None or now.status != "True" or _status(before, c.ROLLOUT_BLOCKED) == "True":
        return None
    message = f"{now.reason}: {now.message}"
    return PoolEvent(type="Warning", reason="RolloutBlocked", message=message)


def _rolled_out(before: PoolStatus, after: PoolStatus) -> PoolEvent | None:
    """Only nodes have revisions, so routers and Redis do not count."""
    was, now = before.condition(c.UPDATED.name), after.condition(c.UPDATED.name)
    if was is None or now is None or OLD_NODES not in was.message or OLD_NODES in now.message:
        return None
    return _normal("RolledOut", f"all nodes run revision {after.revision}")


def _planned(before: PoolStatus, after: PoolStatus) -> PoolEvent | None:
    """An event with the planner's own reason, if its decision is applied."""
    last, now = before.autoscaling, after.autoscaling
    if now is None or now.mode != "auto" or not before.revision:
        return None
    was = before.prefill.desired, before.decode.desired
    if last is not None and last.mode == "auto":
        was = last.desired_prefill, last.desired_decode
    # If only an external autoscaler changed its role's count, the planner decided nothing.
    if was == (now.desired_prefill, now.desired_decode) or MOVE not in now.message:
        return None
    return PoolEvent(type="Normal", reason=now.reason, message=now.message)


def _ready(before: PoolStatus, after: PoolStatus) -> PoolEvent | None:
    """Ready and NotReady. A pool that was never ready also gets an event for each new reason that
    needs attention."""
    was, now = before.condition(c.READY.name), after.condition(c.READY.name)
    if now is None:
        return None
    ready = was is not None and was.status == "True"
    if now.status == "True":
        return None if ready else _normal("Ready", after.url)
    kind: Literal["Normal", "Warning"] = "Normal" if now.reason in _QUIET else "Warning"
    known = was is not None and was.reason == now.reason
    if not ready and (known or now.reason in _QUIET | _REPORTED):
        return None
    return PoolEvent(type=kind, reason="NotReady", message=f"{now.reason}: {now.message}")

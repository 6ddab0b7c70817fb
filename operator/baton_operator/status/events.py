"""Events for the changes in a pool's life that a user should see. Pure.

In: the previous and the current status. Out: Kubernetes events, only for changes, so that an
operator that restarts repeats none. The drainer posts the events about draining nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from baton_operator.api.status import Condition, PoolStatus
from baton_operator.autoscaling.planner.plan import MOVE
from baton_operator.status import conditions as c
from baton_operator.status.condition_kinds import ConditionKind
from baton_operator.status.findings.rollout import OLD_NODES
from baton_operator.status.findings.sole_operator import held_words

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
    events = (
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
    return tuple(event for event in events if event is not None)


def held_event(holder: str, other: str) -> PoolEvent:
    """Posted by the operator that leaves the pool alone."""
    return PoolEvent(type="Warning", reason="HeldByOther", message=held_words(holder, other))


def drain_event(role: str, pod: str, why: str, replaced_by: str) -> PoolEvent:
    """`replaced_by` is the revision that replaces the node, "" in a scale-down."""
    what = f"makes room for revision {replaced_by}" if replaced_by else "is no longer needed"
    return _normal("Draining", f"{role} node {pod} {what} and drains: {why}")


def drained_event(nodes: str, replicas: int, fewer: int, pods: Sequence[str]) -> PoolEvent:
    """`replicas` is the previous number of such `nodes`, `fewer` the new one."""
    names = ", ".join(pods)
    message = f"{nodes}: scaled from {replicas} to {fewer} replicas, without {names}"
    return _normal("Drained", message)


def resumed_event(role: str, pod: str) -> PoolEvent:
    return _normal("Resumed", f"{role} node {pod} is needed again and no longer drains")


def _normal(reason: str, message: str) -> PoolEvent:
    return PoolEvent(type="Normal", reason=reason, message=message)


def _status(status: PoolStatus, kind: ConditionKind) -> str:
    condition = status.condition(kind.name)
    return condition.status if condition is not None else ""


def _became_true(before: PoolStatus, after: PoolStatus, kind: ConditionKind) -> Condition | None:
    """The condition, if it was False or Unknown before."""
    if _status(before, kind) in ("False", "Unknown") and _status(after, kind) == "True":
        return after.condition(kind.name)
    return None


def _turned_false(before: PoolStatus, after: PoolStatus, kind: ConditionKind) -> PoolEvent | None:
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
    repeats = was is not None and was.reason == now.reason
    if not ready and (repeats or now.reason in _QUIET | _REPORTED):
        return None
    return PoolEvent(type=kind, reason="NotReady", message=f"{now.reason}: {now.message}")

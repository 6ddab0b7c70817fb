"""The few steps of a pool's life that a user wants to be told of. Pure.

In: the status before and now. Out: Kubernetes events, only where something has changed, so that an
operator which starts anew repeats none. Of draining nodes those who drain them tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from baton_operator.api.status import Condition, PoolStatus
from baton_operator.autoscaling.planner.records import MOVE
from baton_operator.status import conditions as c
from baton_operator.status.messages import OLD_NODES

# Of Ready, they need nobody's attention.
_QUIET = frozenset(
    {c.PAUSED.name} | {reason.name for kind in c.KINDS for reason in kind.reasons if reason.waits}
)


# Of conditions that have events of their own.
_TOLD = frozenset(reason.name for kind in (c.VALID, c.APPLIED) for reason in kind.reasons)


class PoolEvent(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def events_between(before: PoolStatus | None, after: PoolStatus) -> tuple[PoolEvent, ...]:
    """In the order of what causes what."""
    last = before or PoolStatus()
    found = (
        _turned_false(last, after, c.VALID),
        _turned_false(last, after, c.APPLIED),
        _revision(last, after),
        _model(last, after),
        _blocked(last, after),
        _rolled_out(last, after),
        _planned(last, after),
        _ready(last, after),
    )
    return tuple(event for event in found if event is not None)


def drain_begun(role: str, pod: str, why: str, replaced_by: str) -> PoolEvent:
    """`replaced_by` is the revision whose nodes take its place, "" where none does."""
    what = f"gives way to revision {replaced_by}" if replaced_by else "is one too many"
    return _normal("Draining", f"{role} node {pod} {what} and drains: {why}")


def drain_ended(nodes: str, replicas: int, fewer: int, pods: Sequence[str]) -> PoolEvent:
    """`replicas` of such `nodes` there were, `fewer` there are to be."""
    names = ", ".join(pods)
    return _normal("Drained", f"{nodes}: {replicas} to {fewer} replicas, without {names}")


def drain_undone(role: str, pod: str) -> PoolEvent:
    return _normal("Resumed", f"{role} node {pod} is wanted again, and drains no more")


def _normal(reason: str, message: str) -> PoolEvent:
    return PoolEvent(type="Normal", reason=reason, message=message)


def _status(status: PoolStatus, kind: c.ConditionKind) -> str:
    found = status.condition(kind.name)
    return found.status if found is not None else ""


def _became_true(before: PoolStatus, after: PoolStatus, kind: c.ConditionKind) -> Condition | None:
    """Where it was said to be otherwise."""
    if _status(before, kind) in ("False", "Unknown") and _status(after, kind) == "True":
        return after.condition(kind.name)
    return None


def _turned_false(before: PoolStatus, after: PoolStatus, kind: c.ConditionKind) -> PoolEvent | None:
    """SpecInvalid, ApplyRefused and the like: the condition's own reason."""
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
    """Of nodes: only they have revisions."""
    was, now = before.condition(c.UPDATED.name), after.condition(c.UPDATED.name)
    if was is None or now is None or OLD_NODES not in was.message or OLD_NODES in now.message:
        return None
    return _normal("RolledOut", f"all nodes are of revision {after.revision}")


def _planned(before: PoolStatus, after: PoolStatus) -> PoolEvent | None:
    """Where the planner's decision is acted on: its own reason."""
    said, now = before.autoscaling, after.autoscaling
    if now is None or now.mode != "auto" or not before.revision:
        return None
    was = before.prefill.desired, before.decode.desired
    if said is not None and said.mode == "auto":
        was = said.desired_prefill, said.desired_decode
    # Where somebody else changed their role's count the planner did nothing.
    if was == (now.desired_prefill, now.desired_decode) or MOVE not in now.message:
        return None
    return PoolEvent(type="Normal", reason=now.reason, message=now.message)


def _ready(before: PoolStatus, after: PoolStatus) -> PoolEvent | None:
    """Also of a pool that never was: each reason of which somebody should know."""
    was, now = before.condition(c.READY.name), after.condition(c.READY.name)
    if now is None:
        return None
    ready = was is not None and was.status == "True"
    if now.status == "True":
        return None if ready else _normal("Ready", after.url)
    kind: Literal["Normal", "Warning"] = "Normal" if now.reason in _QUIET else "Warning"
    known = was is not None and was.reason == now.reason
    if not ready and (known or now.reason in _QUIET | _TOLD):
        return None
    return PoolEvent(type=kind, reason="NotReady", message=f"{now.reason}: {now.message}")

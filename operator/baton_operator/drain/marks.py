"""Annotations on a pod that must go, from which any operator can continue.

In: a pod. Out: the body of a server-side apply that owns only these annotations; a body without
them removes them. The lowest deletion cost makes Kubernetes remove the pod before other pods with
the same readiness.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from baton_operator.api.times import stamp
from baton_operator.kube.kinds import ChildKey
from baton_operator.kube.objects import Body
from baton_operator.names import (
    DRAIN_REASON_ANNOTATION,
    DRAIN_S,
    DRAIN_SECONDS_ANNOTATION,
    DRAIN_SINCE_ANNOTATION,
    REPLACED_BY_ANNOTATION,
)
from baton_operator.state.observed import ObservedPod

COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
LOWEST_COST = str(-(2**31))


class LeaveTerms(msgspec.Struct, frozen=True):
    """The terms of a drain: its requests may take `seconds`; `replaced_by` is the new revision in a
    roll-out, "" in a scale-down."""

    seconds: int = DRAIN_S
    replaced_by: str = ""


def mark_body(pod: ChildKey, uid: str, now: datetime, why: str, leave: LeaveTerms) -> Body:
    notes = {
        COST_ANNOTATION: LOWEST_COST,
        DRAIN_SINCE_ANNOTATION: stamp(now),
        DRAIN_REASON_ANNOTATION: why,
    }
    if leave.replaced_by:
        notes[DRAIN_SECONDS_ANNOTATION] = str(leave.seconds)
        notes[REPLACED_BY_ANNOTATION] = leave.replaced_by
    return _body(pod, uid, notes)


def unmark_body(pod: ChildKey, uid: str) -> Body:
    return _body(pod, uid, {})


def leave_of(pod: ObservedPod) -> LeaveTerms:
    """The terms in the pod's annotations. A missing or invalid number means the scale-down's."""
    written = pod.drain_seconds
    seconds = int(written) if written.isascii() and written.isdecimal() else DRAIN_S
    return LeaveTerms(seconds, pod.replaced_by)


def _body(pod: ChildKey, uid: str, notes: dict[str, str]) -> Body:
    """The uid prevents the apply from creating a pod that is gone or marking its successor."""
    return {
        "apiVersion": pod.api_version,
        "kind": pod.kind,
        "metadata": {
            "name": pod.name,
            "namespace": pod.namespace,
            "uid": uid,
            "annotations": notes,
        },
    }

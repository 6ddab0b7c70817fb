"""What is left at a pod that is to go, so that whoever looks next goes on from there.

In: a pod. Out: the body of a server-side apply, which owns these annotations and nothing else of
the pod; without them it takes them back. The cost makes Kubernetes take the pod before others that
are as ready; it is the lowest there is.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from baton_operator.api.status import stamp
from baton_operator.kube.kinds import ChildKey
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
    """How a node is to go: its requests may take `seconds`; `replaced_by` is the revision that
    takes its place in a roll-out, "" where it is one too many."""

    seconds: int = DRAIN_S
    replaced_by: str = ""


def mark(pod: ChildKey, uid: str, now: datetime, why: str, leave: LeaveTerms) -> dict[str, Any]:
    notes = {
        COST_ANNOTATION: LOWEST_COST,
        DRAIN_SINCE_ANNOTATION: stamp(now),
        DRAIN_REASON_ANNOTATION: why,
    }
    if leave.replaced_by:
        notes[DRAIN_SECONDS_ANNOTATION] = str(leave.seconds)
        notes[REPLACED_BY_ANNOTATION] = leave.replaced_by
    return _body(pod, uid, notes)


def unmark(pod: ChildKey, uid: str) -> dict[str, Any]:
    return _body(pod, uid, {})


def leave_of(pod: ObservedPod) -> LeaveTerms:
    """As it was marked; without a number, or with one that is none, as for a scale-down."""
    written = pod.drain_seconds
    seconds = int(written) if written.isascii() and written.isdecimal() else DRAIN_S
    return LeaveTerms(seconds, pod.replaced_by)


def _body(pod: ChildKey, uid: str, notes: dict[str, str]) -> dict[str, Any]:
    """With its uid: a pod that is gone is not to be made, nor another one marked."""
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

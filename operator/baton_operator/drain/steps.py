"""How far a Deployment with surplus nodes may be scaled down now. Pure.

In: the leaving nodes, the routers' answers, the nodes' reports. Out: why a node must wait, and the
number of replicas. Kubernetes removes pods in classes (see `victims`). Replicas are lowered only by
whole classes, because within one Kubernetes might remove a pod that still works.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from baton_operator.drain.victims import (
    Reports,
    Victim,
    is_served,
    live_requests,
    removal_class,
)
from baton_operator.names import DRAIN_S
from baton_operator.state.observed import ObservedPod

DrainOutcome = Literal["taken", "unknown", "unable", "failed"]


class DrainAnswer(msgspec.Struct, frozen=True):
    """The combined answer of all ready routers about one node. taken: the node knows it drains.
    unknown: no router knows the node, or its version cannot drain. unable: no router has a link to
    it now. failed: no router answered. `message` explains the last two."""

    outcome: DrainOutcome
    message: str = ""


class DrainWait(msgspec.Struct, frozen=True):
    """`message`: the obstacle of the drain; "" if only the node's requests delay it."""

    message: str = ""


def wait_of(
    pod: ObservedPod,
    answer: DrainAnswer,
    reports: Reports | None,
    drained_s: float,
    limit_s: float = DRAIN_S,
) -> DrainWait | None:
    """None if the node may go now. `drained_s`: seconds since it was marked. `limit_s`: seconds
    that its requests may take. A node that no router knows can only have requests of routers that
    are ending."""
    report = (reports or {}).get(pod.name)
    if report is not None and report.drains and not live_requests(report):
        return None
    gone = answer.outcome == "unknown" or (reports is not None and report is None)
    if not is_served(pod) or (gone and not pod.ready):
        return None
    if answer.outcome == "failed":
        return DrainWait(answer.message)
    if answer.outcome == "unknown":
        limit_s = min(limit_s, DRAIN_S)
    # It has handed back the requests that are left, or will at SIGTERM.
    return None if drained_s >= limit_s else DrainWait()


def choose_leavers(victims: Sequence[Victim], waiting: Collection[str]) -> list[Victim]:
    """Victims that Kubernetes would remove now. `waiting` names those that may not go yet."""
    leavers: list[Victim] = []
    for kind in sorted({removal_class(victim.pod) for victim in victims}):
        same = [victim for victim in victims if removal_class(victim.pod) == kind]
        if any(victim.pod.name in waiting for victim in same):
            break
        leavers += same
    return leavers


def allowed_replicas(current: int, wanted: int, pods: int, leaving: int) -> int:
    """The replicas to set, between `wanted` and the larger `current`. `pods` counts existing pods:
    those that were never created are no loss."""
    return max(wanted, min(current, pods - leaving))

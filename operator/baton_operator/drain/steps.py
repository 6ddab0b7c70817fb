"""How far a Deployment with nodes too many may be lowered now. Pure.

In: who is to go, what routers were told and nodes report. Out: why one has to wait, and the number
of replicas. Replicas are only lowered by whole classes of Kubernetes' order: within one it might
take the pod that is still at work.
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

Outcome = Literal["taken", "unknown", "unable", "failed"]


class DrainAnswer(msgspec.Struct, frozen=True):
    """What came of telling all ready routers about one node. taken: it has heard it. unknown: no
    router has such a node, or only one that is too old to be told. unable: they have no way to it
    now. failed: no router could be told; `words` say why, in this case and the one before."""

    outcome: Outcome
    words: str = ""


class DrainWait(msgspec.Struct, frozen=True):
    """`words`: what is in the way, "" where it is only the node's requests."""

    words: str = ""


def wait_of(
    pod: ObservedPod,
    told: DrainAnswer,
    reports: Reports | None,
    drained_s: float,
    limit_s: float = DRAIN_S,
) -> DrainWait | None:
    """None: it may go now. `drained_s` is for how long it has been marked, `limit_s` for how long
    its requests may take. A node that no router has can have none but those of routers that end."""
    report = (reports or {}).get(pod.name)
    if report is not None and report.state == "draining" and not live_requests(report):
        return None
    gone = told.outcome == "unknown" or (reports is not None and report is None)
    if not is_served(pod) or (gone and not pod.ready):
        return None
    if told.outcome == "failed":
        return DrainWait(told.words)
    if told.outcome == "unknown":
        limit_s = min(limit_s, DRAIN_S)
    # What it has not ended by now it has handed back, or will when its process is told to end.
    return None if drained_s >= limit_s else DrainWait()


def leavers(victims: Sequence[Victim], waiting: Collection[str]) -> list[Victim]:
    """Those that Kubernetes would take now. `waiting` names the victims that may not go yet."""
    found: list[Victim] = []
    for kind in sorted({removal_class(victim.pod) for victim in victims}):
        same = [victim for victim in victims if removal_class(victim.pod) == kind]
        if any(victim.pod.name in waiting for victim in same):
            break
        found += same
    return found


def allowed_replicas(current: int, wanted: int, pods: int, leaving: int) -> int:
    """Between `current` and `wanted`, of which the first is more. `pods` counts those there are:
    what was never made is no loss."""
    return max(wanted, min(current, pods - leaving))

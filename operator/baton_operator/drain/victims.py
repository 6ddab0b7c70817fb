"""Chooses which nodes of a Deployment go if there are too many: the least loaded ones. Pure.

In: its pods and their nodes' reports. Out: `Victim`s in the order of choice. Except for the last
keys it is the order in which Kubernetes removes pods, which marks cannot override: unscheduled
pods, then pending ones, then unready ones, then by the deletion cost that the mark sets. So
Kubernetes removes the chosen pods. A mark is kept unless a less loaded pod has appeared since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from baton_operator.state.observed import ObservedPod
from baton_protocol.store import NodeReport

_STAGES = ("unplaced", "pending", "running", "over")
Reports = Mapping[str, NodeReport]


class Victim(msgspec.Struct, frozen=True):
    """`why` explains the choice to people."""

    pod: ObservedPod
    why: str


def choose_victims(
    pods: Sequence[ObservedPod],
    reports: Reports | None,
    surplus: int,
    *,
    patient: bool = False,
    replaced: bool = False,
) -> list[Victim]:
    """At most `surplus` of `pods`, which are those that their controller counts. `reports` is by
    pod; None if the index could not be read. Then only pods are chosen for which reports do not
    matter. With `patient` they matter for every serving pod, else only if some pods stay.
    `replaced`: nodes of a newer revision take their place."""
    by_pod = reports or {}
    ranked = sorted(pods, key=lambda pod: _rank(pod, by_pod.get(pod.name)))
    chosen = ranked[: max(0, surplus)]
    everybody = len(chosen) == len(pods)
    end = "all nodes of its revision are replaced" if replaced else "its role scales to 0 nodes"
    return [
        Victim(
            pod,
            pod.drain_reason or _why(pod, by_pod.get(pod.name), end if everybody else ""),
        )
        for pod in chosen
        if reports is not None or (everybody and not patient) or _is_plain(pod)
    ]


def is_served(pod: ObservedPod) -> bool:
    """Whether the node may have requests."""
    return pod.stage == "running"


def live_requests(report: NodeReport) -> int:
    """Protocol 1 nodes do not count requests that their engine has finished."""
    load = report.load
    return max(load.requests, load.running + load.waiting + load.parked)


def removal_class(pod: ObservedPod) -> int:
    """Kubernetes removes all pods of a lower class first, whatever their deletion cost."""
    return _STAGES.index(pod.stage) if not is_served(pod) else len(_STAGES) + pod.ready


def _is_plain(pod: ObservedPod) -> bool:
    return not is_served(pod) or not pod.ready or bool(pod.drain_since)


def _rank(pod: ObservedPod, report: NodeReport | None) -> tuple[object, ...]:
    """A node without a report ranks last among its equals: it may be the busiest."""
    drained = report is not None and report.drains
    loads = (live_requests(report), report.load.cached_blocks) if report is not None else ()
    marked = bool(pod.drain_since)
    return (removal_class(pod), not marked, not drained, report is None, loads, pod.name)


def _why(pod: ObservedPod, report: NodeReport | None, end: str) -> str:
    """`end`: why no node of its Deployment stays, "" if some do."""
    if not is_served(pod):
        return "it has not started"
    if not pod.ready:
        return "it is not ready"
    if end:
        return end
    if report is None:
        return "no node of its role has a report"
    what = "drained by hand, with" if report.drains else "least loaded:"
    live, cached = live_requests(report), report.load.cached_blocks
    return f"{what} {live} live requests, {cached} cached blocks"

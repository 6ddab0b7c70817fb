"""Which nodes of a Deployment go where some are too many: those with least to lose. Pure.

In: its pods and what their nodes report. Out: `Victim`s in the order in which they are chosen. Up
to its last keys it is Kubernetes' own order, which no mark overrules: pods that are not placed,
then those whose containers are being made, then those that are not ready, then by the cost that
the mark sets. So whoever is chosen is whom Kubernetes takes. A mark is kept unless somebody with
less to lose has come meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from baton_operator.state.observed import ObservedPod
from baton_protocol.store import NodeReport

_STAGES = ("unplaced", "pending", "running", "over")
Reports = Mapping[str, NodeReport]


class Victim(msgspec.Struct, frozen=True):
    """`why` is for people."""

    pod: ObservedPod
    why: str


def choose_victims(
    pods: Sequence[ObservedPod],
    reports: Reports | None,
    surplus: int,
    *,
    patient: bool = False,
) -> list[Victim]:
    """At most `surplus` of `pods`, which are those that their controller counts. `reports` by pod,
    None where nobody could be asked: then only those for which they do not matter. They matter
    for all to whoever is `patient`, else only where some are to stay."""
    known = reports or {}
    ranked = sorted(pods, key=lambda pod: _rank(pod, known.get(pod.name)))
    chosen = ranked[: max(0, surplus)]
    everybody = len(chosen) == len(pods)
    return [
        Victim(pod, pod.drain_reason or _why(pod, known.get(pod.name), everybody))
        for pod in chosen
        if reports is not None or (everybody and not patient) or _is_plain(pod)
    ]


def is_served(pod: ObservedPod) -> bool:
    """Somebody's requests may be on it."""
    return pod.stage == "running"


def live_requests(report: NodeReport) -> int:
    """A node of protocol 1 does not count requests that its engine has done with."""
    load = report.load
    return max(load.requests, load.running + load.waiting + load.parked)


def removal_class(pod: ObservedPod) -> int:
    """Kubernetes takes all pods of a lower class first, whatever they cost."""
    return _STAGES.index(pod.stage) if not is_served(pod) else len(_STAGES) + pod.ready


def _is_plain(pod: ObservedPod) -> bool:
    return not is_served(pod) or not pod.ready or bool(pod.drain_since)


def _rank(pod: ObservedPod, report: NodeReport | None) -> tuple[object, ...]:
    """A node that reports nothing may have more to lose than any other."""
    drained = report is not None and report.state == "draining"
    loads = (live_requests(report), report.load.cached_blocks) if report is not None else ()
    marked = bool(pod.drain_since)
    return (removal_class(pod), not marked, not drained, report is None, loads, pod.name)


def _why(pod: ObservedPod, report: NodeReport | None, everybody: bool) -> str:
    if not is_served(pod):
        return "it has not started"
    if not pod.ready:
        return "it is not ready"
    if everybody:
        return "no node of its role is to stay"
    if report is None:
        return "nothing is known of it, nor of the others"
    what = "drained by hand, with" if report.state == "draining" else "least to lose:"
    live, cached = live_requests(report), report.load.cached_blocks
    return f"{what} {live} live requests, {cached} cached blocks"

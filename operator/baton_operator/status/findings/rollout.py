"""Conditions Updated, RolloutBlocked and Scaled: which nodes must go, and what keeps them."""

from __future__ import annotations

from baton_operator.names import STORE
from baton_operator.status import conditions as c
from baton_operator.status.view import Finding, View, count_words
from baton_protocol.store import ROLES

OLD_NODES = "old nodes are left"


def updated_finding(view: View) -> Finding:
    """Old nodes count until they are gone. Kubernetes itself rolls routers and Redis."""
    old, rolling = old_nodes(view), _rolling(view)
    if not old and not rolling:
        return Finding(c.ONE_REVISION)
    fresh = [pod for pod in view.pods(*ROLES) if view.is_current(pod)]
    parts = []
    if old:
        ready = sum(pod.ready for pod in fresh)
        parts.append(f"{old} {OLD_NODES}; {count_words(ready, view.desired(*ROLES))}")
    if rolling:
        parts.append("new pods for " + ", ".join(rolling))
    if view.model.progress:
        parts.append(f"model: {view.model.progress}")
    names = (*ROLES, "router", *STORE)
    unready = [pod for pod in view.unready(*names) if view.is_current(pod)]
    finding = view.trouble(unready, *names) or Finding(c.ROLLING_OUT)
    return Finding(finding.reason, "; ".join([*parts, *filter(None, [finding.message])]))


def old_nodes(view: View) -> int:
    """The number of old pods, or of those that a Deployment would create again, if larger."""
    pods = [pod for pod in view.observed.pods if pod.component in ROLES]
    workloads = [item for item in view.observed.workloads if item.component in ROLES]
    return max(
        sum(not view.is_current(pod) for pod in pods),
        sum(item.desired for item in workloads if item.revision != view.revision),
    )


def rollout_blocked_finding(view: View) -> Finding:
    """The first obstacle. Obstacles that need a person come before those that pass."""
    left = old_nodes(view)
    if not left:
        return Finding(c.NOT_ROLLING)
    observed = view.observed
    if observed.roll.no_room:
        return Finding(c.GPU_BUDGET_TOO_SMALL, observed.roll.no_room)
    new = [pod for pod in view.pods(*ROLES) if view.is_current(pod)]
    trouble = view.trouble([pod for pod in new if not pod.ready], *ROLES)
    if trouble is not None:
        return Finding(c.NEW_NODES_FAILING, f"{trouble.reason.name}: {trouble.message}")
    held = [
        f"{departure.role}: {departure.message}"
        for departure in observed.departures
        if departure.held
    ]
    if held:
        return Finding(c.OLD_NODES_HELD, "; ".join(held))
    ready = count_words(sum(pod.ready for pod in new), view.desired(*ROLES))
    return Finding(c.ROLLING, f"{left} {OLD_NODES}; {ready}")


def _rolling(view: View) -> list[str]:
    workloads = [item for item in view.workloads("router", *STORE) if item.pods]
    return sorted(item.name for item in workloads if not item.rolled)


def scaled_finding(view: View) -> Finding:
    """The marks are on the pods, so this also works for a paused pool."""
    held = [departure for departure in view.observed.departures if departure.held]
    others = [departure for departure in view.observed.departures if not departure.held]
    marked = [pod for pod in view.observed.pods if pod.drain_since and not pod.terminating]
    parts = [f"{departure.role}: {departure.message}" for departure in (*held, *others)]
    parts += [f"{pod.name} since {pod.drain_since}: {pod.drain_reason}" for pod in marked]
    if not parts:
        return Finding(c.NONE_TOO_MANY)
    return Finding(c.DRAIN_HELD if held else c.DRAINING, "; ".join(parts))

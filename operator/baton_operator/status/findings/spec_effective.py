"""Condition SpecEffective: is something in the spec wasted, or in conflict with another pool?"""

from __future__ import annotations

from collections.abc import Iterator

from baton_operator.api.pool import Pool
from baton_operator.builders.nodes import node_gpus
from baton_operator.state.observed import Observed
from baton_operator.status import conditions as c
from baton_operator.status.view import Finding, View
from baton_protocol.store import ROLES


def spec_effective_finding(view: View) -> Finding | None:
    """What is valid and yet not what its author expects. All hints are in the message. Those about
    the last valid spec hold while the spec is invalid, because that one is in force."""
    if view.pool is None:
        last = view.last_condition(c.SPEC_EFFECTIVE.name)
        reasons = {reason.name: reason for reason in c.SPEC_EFFECTIVE.reasons}
        current = reasons.get(last.reason) if last else None
        return Finding(current, last.message) if last and current else None
    hints = [*_unused_gpus(view.pool), *_shared_hosts(view.observed)]
    if not hints:
        return Finding(c.FULL_EFFECT)
    return Finding(hints[0].reason, "; ".join(finding.message for finding in hints))


def _unused_gpus(pool: Pool) -> Iterator[Finding]:
    used = 1 if pool.spec.engine.kind == "torch" else 0
    for role in ROLES:
        gpus = node_gpus(pool.spec.role(role))
        if gpus > used:
            words = (
                f"spec.{role}.resources.limits: a node has {gpus} GPUs and uses {used}; write "
                + (f"{used}, and more replicas" if used else "none: a simulated engine has no use")
            )
            yield Finding(c.GPUS_UNUSED, words)


def _shared_hosts(observed: Observed) -> Iterator[Finding]:
    for shared in observed.shared_hosts:
        words = f"{shared.field}: pool {shared.pool} routes {shared.host} too"
        yield Finding(c.HOST_SHARED, words)

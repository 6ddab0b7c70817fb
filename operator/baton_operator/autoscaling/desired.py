"""The desired number of nodes before the planner's next decision. Pure.

In: the pool, its status, its Deployments. Out: a count per role. The status holds the last
decision, where the next operator finds it. Without a decision the Deployments' current replicas
count.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_operator.api.autoscaling import AutoscalingSpec
from baton_operator.api.pool import Pool
from baton_operator.api.status import AutoscalingStatus
from baton_operator.state.observed import ObservedWorkload
from baton_protocol.store import ROLES, Role


def desired_now(
    pool: Pool,
    spec: AutoscalingSpec,
    written: AutoscalingStatus | None,
    workloads: Sequence[ObservedWorkload],
) -> dict[Role, int]:
    """`spec` is the pool's own. For a role that an external autoscaler scales, and in mode advise,
    the pool's `replicas` count."""
    own = {role: pool.spec.role(role).replicas for role in ROLES}
    if spec.mode != "auto":
        return own
    if written is not None and written.mode == "auto":
        known = {"prefill": written.desired_prefill, "decode": written.desired_decode}
    else:
        known = {role: _there(role, workloads, own[role]) for role in ROLES}
    return {role: own[role] if spec.is_external(role) else known[role] for role in ROLES}


def _there(role: Role, workloads: Sequence[ObservedWorkload], otherwise: int) -> int:
    made = [item.desired for item in workloads if item.component == role]
    return sum(made) if made else otherwise

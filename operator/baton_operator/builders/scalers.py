"""PoolScalers: for each role whose count somebody else says.

In: a pool. Out: manifests without a count, which is not the operator's; `seeded` is what one is
made from, as the count must not be missing.
"""

from __future__ import annotations

from baton_operator.api.pool import Pool
from baton_operator.builders.child import ChildIdentity, Manifest
from baton_operator.names import API_VERSION, SCALER_KIND
from baton_protocol.store import ROLES, Role


def scaled_roles(pool: Pool) -> tuple[Role, ...]:
    """Those with a PoolScaler."""
    spec = pool.spec.autoscaling
    return tuple(role for role in ROLES if spec is not None and spec.is_external(role))


def build_scalers(pool: Pool) -> tuple[Manifest, ...]:
    return tuple(build_scaler(pool, role) for role in scaled_roles(pool))


def build_scaler(pool: Pool, role: Role) -> Manifest:
    metadata = ChildIdentity(pool, role).metadata()
    return {"apiVersion": API_VERSION, "kind": SCALER_KIND, "metadata": metadata}


def seeded(scaler: Manifest, replicas: int) -> Manifest:
    return scaler | {"spec": {"replicas": replicas}}


def selector_of(pool: Pool, role: Role) -> str:
    """Of the role's pods, as /scale gives it to an autoscaler."""
    return ",".join(
        f"{label}={value}" for label, value in ChildIdentity(pool, role).selector().items()
    )

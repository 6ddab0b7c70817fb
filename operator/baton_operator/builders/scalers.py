"""PoolScalers, for the roles that an external autoscaler scales."""

from __future__ import annotations

from baton_operator.api.pool import Pool
from baton_operator.builders.child import ChildIdentity, Manifest
from baton_operator.names import API_VERSION, SCALER_KIND
from baton_protocol.store import ROLES, Role


def scaled_roles(pool: Pool) -> tuple[Role, ...]:
    """Roles with a PoolScaler."""
    spec = pool.spec.autoscaling
    return tuple(role for role in ROLES if spec is not None and spec.is_external(role))


def build_scalers(pool: Pool) -> tuple[Manifest, ...]:
    """Manifests without a count, which the operator does not own; `seeded` adds the initial count
    for the creation, where it is required."""
    return tuple(build_scaler(pool, role) for role in scaled_roles(pool))


def build_scaler(pool: Pool, role: Role) -> Manifest:
    metadata = ChildIdentity(pool, role).metadata()
    return {"apiVersion": API_VERSION, "kind": SCALER_KIND, "metadata": metadata}


def seeded(scaler: Manifest, replicas: int) -> Manifest:
    return scaler | {"spec": {"replicas": replicas}}


def selector_of(pool: Pool, role: Role) -> str:
    """The label selector of the role's pods, which /scale gives to an autoscaler."""
    return ",".join(
        f"{label}={value}" for label, value in ChildIdentity(pool, role).selector().items()
    )

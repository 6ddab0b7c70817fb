"""Observations of a pool, and the status that the operator derives from them.

In: a pool, and the differences from a healthy pool. Out: `Observed` records, statuses.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.api.spec_reader import SpecError
from baton_operator.api.status import Condition, PoolStatus
from baton_operator.builders.nodes import revision_of
from baton_operator.kube.kinds import ChildKey
from baton_operator.state.observed import Observed, ObservedPod, ObservedWorkload, Refusal
from baton_operator.status.derive import derive_status
from baton_protocol.ids import Fingerprint, NodeId
from baton_protocol.store import FetchReport, NodeReport, Role
from tests.support.kubernetes.manifests import sample_pool
from tests.support.nodes.fake_node import make_report

NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
OLD = "0123456789"
GIB = 1 << 30
# A simulated pool with one node of each role, for most tests.
DEMO = sample_pool("sim")
HUB = sample_pool("hub")


def stamp(after_s: float) -> str:
    """The time `after_s` seconds after NOW, in the format of the Kubernetes API."""
    return (NOW + timedelta(seconds=after_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


def workload(
    name: str, component: str, desired: int = 1, revision: str = "", **changes: Any
) -> ObservedWorkload:
    """A workload whose pods all exist, have the newest template and are ready."""
    fields: dict[str, Any] = {
        "pods": desired,
        "ready": desired,
        "updated": desired,
        "current": True,
    }
    return ObservedWorkload(
        name=name, component=component, revision=revision, desired=desired, **(fields | changes)
    )


def pod(component: str, number: int = 0, revision: str = "", **changes: Any) -> ObservedPod:
    fields: dict[str, Any] = {"ready": True, "terminating": False}
    name = f"demo-{component}-{revision}-{number}" if revision else f"demo-{component}-{number}"
    return ObservedPod(name=name, component=component, revision=revision, **(fields | changes))


def role_pods(pool: Pool, role: Role, **changes: Any) -> tuple[ObservedPod, ...]:
    """The role's pods: as many as the spec says, of the current revision."""
    replicas = {"prefill": pool.spec.prefill, "decode": pool.spec.decode}[role].replicas
    return tuple(pod(role, number, revision_of(pool).name, **changes) for number in range(replicas))


def shared_pods(pool: Pool) -> tuple[ObservedPod, ...]:
    """The pods of router and Redis, all ready."""
    routers = tuple(pod("router", number) for number in range(pool.spec.router.replicas))
    if pool.spec.kv_store.external is not None:
        return routers
    return (*routers, pod("kv-index"), *(data_pod(number) for number in range(instances(pool))))


def instances(pool: Pool) -> int:
    """The number of data servers that the pool manages."""
    managed = pool.spec.kv_store.owned
    return managed.data_instances if managed is not None else 0


def data_pod(number: int, **changes: Any) -> ObservedPod:
    return pod("kv-data", number, instance=str(number), **changes)


def scales_to_zero(pool: Pool) -> bool:
    scaling = pool.spec.autoscaling
    return scaling is not None and scaling.scales_to_zero


def workloads(pool: Pool) -> tuple[ObservedWorkload, ...]:
    revision = revision_of(pool).name
    nodes_and_router = (
        workload(f"demo-prefill-{revision}", "prefill", pool.spec.prefill.replicas, revision),
        workload(f"demo-decode-{revision}", "decode", pool.spec.decode.replicas, revision),
        workload("demo-router", "router", pool.spec.router.replicas, holds=scales_to_zero(pool)),
    )
    if pool.spec.kv_store.external is not None:
        return nodes_and_router
    data = (
        workload(f"demo-kv-data-{number}", "kv-data", instance=str(number))
        for number in range(instances(pool))
    )
    return (*nodes_and_router, workload("demo-kv-index", "kv-index"), *data)


def observed(pool: Pool = DEMO, **changes: Any) -> Observed:
    """The observation of a healthy pool whose index was not read. `prefill` and `decode` replace
    that role's pods, `others` those of router and store; other changes replace fields."""
    pods = (
        *changes.pop("prefill", role_pods(pool, "prefill")),
        *changes.pop("decode", role_pods(pool, "decode")),
        *changes.pop("others", shared_pods(pool)),
    )
    fields: dict[str, Any] = {"workloads": workloads(pool), "pods": pods}
    return Observed(**(fields | changes))


def status_of(
    observation: Observed,
    pool: Pool | SpecError = DEMO,
    before: PoolStatus | None = None,
    *,
    generation: int = 1,
    after_s: float = 0.0,
) -> PoolStatus:
    """Derive the status `after_s` seconds after NOW, which is 0 on the operator's monotonic
    clock."""
    revision = revision_of(pool).name if isinstance(pool, Pool) else ""
    when = NOW + timedelta(seconds=after_s)
    return derive_status(pool, revision, generation, observation, before, when, after_s)


def condition_of(status: PoolStatus, kind: str) -> Condition:
    condition = status.condition(kind)
    assert condition is not None, f"no condition {kind}"
    return condition


def verdict(status: PoolStatus, kind: str) -> tuple[str, str]:
    condition = condition_of(status, kind)
    return condition.status, condition.reason


def report(pool: Pool, role: Role, number: int = 0, **changes: Any) -> NodeReport:
    """The report that a ready node of the current revision registers."""
    revision = revision_of(pool).name
    changes = {"revision": revision, "fingerprint": Fingerprint("f" * 32)} | changes
    return make_report(pod(role, number, revision).name, role, **changes)


def reports(pool: Pool = DEMO, **changes: Any) -> tuple[NodeReport, ...]:
    return report(pool, "prefill", **changes), report(pool, "decode", **changes)


def fetch(pool: Pool, role: Role, done: int, total: int, number: int = 0) -> FetchReport:
    name = pod(role, number, revision_of(pool).name).name
    return FetchReport(node=NodeId(name), source="hf://a/b", done_bytes=done, total_bytes=total)


def refusal(kind: str, name: str, code: int, message: str) -> Refusal:
    child = ChildKey(api_version="v1", kind=kind, namespace="serving", name=name)
    return Refusal(child=child, code=code, message=message)


def replaced(status: PoolStatus, **changes: Any) -> PoolStatus:
    return msgspec.structs.replace(status, **changes)

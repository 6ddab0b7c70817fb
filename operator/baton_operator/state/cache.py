"""The pools and their children as the operator last observed them.

In: objects from watches, listings and the answers to our own requests. Out: the pools, and of each
child the little that planning and status need: its owner, a digest of its desired state, and what
status reads. It is only a cache: an operator that starts with an empty one reaches the same state.
Secrets are not cached, because nothing watches them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from baton_operator.kube.kinds import POOL, ChildKey, ObjectKind, key_of
from baton_operator.names import COMPONENT_LABEL, POOL_LABEL, REVISION_LABEL, SCALER_KIND
from baton_operator.state.observed import (
    ObservedPod,
    ObservedRoute,
    ObservedScaler,
    ObservedWorkload,
)
from baton_operator.state.pod_problem import NODE_LOST
from baton_operator.state.readers import (
    read_address,
    read_pod,
    read_route,
    read_scaler,
    read_workload,
    seen_pod,
)

Body = dict[str, Any]
# Every write to an object changes these fields.
_VOLATILE = frozenset({"resourceVersion", "managedFields", "generation"})
_REPORTS = frozenset({"deployment.kubernetes.io/revision"})
# After an outage of the API server a kubelet reports within 10 s, or within 30 s if its watch of
# pods has backed off.
SETTLE_S = 60.0


class PoolKey(NamedTuple):
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class CachedChild(msgspec.Struct, frozen=True, kw_only=True):
    """`owner` is the uid of the pool that controls it and `owner_name` its name, "" without one.
    `proven`: a Deployment whose pods have all been available at some time, perhaps not now."""

    key: ChildKey
    uid: str
    version: int
    owner: str
    owner_name: str = ""
    component: str
    revision: str
    digest: str
    proven: bool = False
    workload: ObservedWorkload | None = None
    pod: ObservedPod | None = None
    route: ObservedRoute | None = None
    scaler: ObservedScaler | None = None
    address: str = ""

    def differs(self, other: CachedChild | None) -> bool:
        """Whether anything but the version differs."""
        return other is None or msgspec.structs.replace(self, version=other.version) != other


class Cache:
    """For one event loop. `changed` is called with each pool whose objects changed."""

    def __init__(self, changed: Callable[[PoolKey], None], clock: Callable[[], float]) -> None:
        self._changed = changed
        self._clock = clock
        self._pools: dict[PoolKey, Body] = {}
        self._children: dict[PoolKey, dict[ChildKey, CachedChild]] = {}
        # Our own writes that no watch has shown yet, and since when.
        self._unseen: dict[ChildKey, tuple[int, float]] = {}
        # When the API server last failed to answer. The time before this operator is unknown.
        self._unanswered_at = clock()

    def pools(self) -> list[PoolKey]:
        return list(self._pools)

    def pool(self, key: PoolKey) -> Body | None:
        return self._pools.get(key)

    def specs(self) -> dict[PoolKey, Body]:
        """The spec of each pool that is not being deleted, as its author wrote it."""
        return {
            key: body.get("spec") or {} for key, body in self._pools.items() if self.pool_uid(key)
        }

    def wake(self, key: PoolKey) -> None:
        """Have the pool reconciled although none of its objects changed."""
        self._changed(key)

    def pool_uid(self, key: PoolKey) -> str:
        """The uid of the pool with this name; "" if there is none or it is being deleted."""
        metadata = self._pools.get(key, {}).get("metadata", {})
        return "" if "deletionTimestamp" in metadata else metadata.get("uid", "")

    def now_s(self) -> float:
        """The current time of the clock that `FirstSeen` uses."""
        return self._clock()

    def children(self, key: PoolKey) -> dict[ChildKey, CachedChild]:
        """Objects with the pool's label, regardless of their owner."""
        return dict(self._children.get(key, {}))

    def unanswered(self) -> None:
        """The API server did not answer a request."""
        self._unanswered_at = self._clock()

    def settles(self, key: PoolKey) -> bool:
        """Whether some of the pool's pods report a lost node that may only be late. No kubelet can
        report while the API server is away, and when it is back, Kubernetes marks the pods of all
        silent nodes unready. The state of such pods is neither reported nor acted on. This lasts a
        minute at most for each pod, even if some requests keep failing."""
        now = self._clock()
        if now - self._unanswered_at >= SETTLE_S:
            return False
        pods = [child.pod for child in self._children.get(key, {}).values()]
        return any(
            pod is not None and pod.problem == NODE_LOST and now - pod.seen.readiness < SETTLE_S
            for pod in pods
        )

    def unseen_s(self) -> float:
        """Watch lag: seconds since the oldest of our own writes that no watch has shown. Safe to
        call from another thread."""
        now = self._clock()
        return now - min((at for _, at in list(self._unseen.values())), default=now)

    def see_pool(self, body: Body, *, listed: bool = False, ours: bool = False) -> None:
        """`listed`: from a listing, which is current even if its version is lower. `ours`: the
        answer to a request of ours, which needs no reconcile."""
        key = PoolKey(body["metadata"]["namespace"], body["metadata"]["name"])
        known = self._pools.get(key)
        if ours and known is None:
            return  # the pool was deleted meanwhile
        if known is not None and _version(body) < _version(known) and not listed:
            return
        body["metadata"].pop("managedFields", None)
        self._pools[key] = body
        if not ours and (known is None or _version(body) != _version(known)):
            self._changed(key)

    def lose_pool(self, key: PoolKey, uid: str) -> None:
        known = self._pools.get(key)
        if known is not None and known["metadata"]["uid"] == uid:
            del self._pools[key]
            self._changed(key)

    def see_child(self, body: Body, *, listed: bool = False, ours: bool = False) -> CachedChild:
        """Return the child as cached afterwards. `ours`: the answer to a request of ours, which
        needs no reconcile; then return that answer's content, even if the cache is newer."""
        child = read_child(body)
        pool = _pool_of(body)
        known = self._children.get(pool, {}).get(child.key)
        if child.pod is not None:
            before = known.pod if known is not None and known.uid == child.uid else None
            child = msgspec.structs.replace(child, pod=seen_pod(child.pod, before, self._clock()))
        if ours and pool not in self._pools:
            return child  # garbage collection deletes it with its pool
        if known is not None and child.version < known.version and not listed:
            return child if ours else known
        if ours:
            if known is None or known.version != child.version:
                self._unseen[child.key] = (child.version, self._clock())
        elif child.version >= self._unseen.get(child.key, (0, 0.0))[0]:
            self._unseen.pop(child.key, None)
        self._children.setdefault(pool, {})[child.key] = child
        if child.differs(known) and not ours:
            self._changed(pool)
        return child

    def lose_child(self, pool: PoolKey, key: ChildKey, uid: str) -> None:
        """Remove a child that was deleted or lost its label, unless another object has its name."""
        known = self._children.get(pool, {}).get(key)
        if known is None or known.uid != uid:
            return
        del self._children[pool][key]
        self._unseen.pop(key, None)
        if not self._children[pool]:
            del self._children[pool]
        self._changed(pool)

    def compare(
        self, kind: ObjectKind, listed: Iterable[Body], known: Mapping[ChildKey, CachedChild]
    ) -> list[ChildKey]:
        """Remove the children that a listing shows to be gone, because a watch misses deletions
        while it is down. Return the keys that are newer than known, for the caller to read.
        `listed`: metadata of all objects of `kind`. `known`: the children known before the listing
        was requested."""
        versions = keys_of(kind, listed)
        gone = known.keys() - versions.keys()
        for pool, children in list(self._children.items()):
            for key in gone & children.keys():
                self.lose_child(pool, key, known[key].uid)
        for key, version in versions.items():
            # This listing confirms our write, as a watch would: some kinds may have no watch.
            if version >= self._unseen.get(key, (version + 1, 0.0))[0]:
                del self._unseen[key]
        return [
            key
            for key, version in versions.items()
            if key not in known or known[key].version < version
        ]

    def of_kind(self, kind: ObjectKind, namespace: str | None) -> dict[ChildKey, CachedChild]:
        return {
            key: child
            for children in self._children.values()
            for key, child in children.items()
            if (key.api_version, key.kind) == (kind.api_version, kind.kind)
            and namespace in (None, key.namespace)
        }


def keys_of(kind: ObjectKind, listed: Iterable[Body]) -> dict[ChildKey, int]:
    """The resource versions in a listing of metadata."""
    return {
        ChildKey(kind.api_version, kind.kind, metadata["namespace"], metadata["name"]): int(
            metadata["resourceVersion"]
        )
        for metadata in listed
    }


def read_child(body: Body) -> CachedChild:
    metadata = body["metadata"]
    labels = metadata.get("labels", {})
    owner = _owner(metadata)
    kind = body["kind"]
    return CachedChild(
        key=key_of(body),
        uid=metadata["uid"],
        version=_version(body),
        owner=owner["uid"],
        owner_name=owner["name"],
        component=labels.get(COMPONENT_LABEL, ""),
        revision=labels.get(REVISION_LABEL, ""),
        digest="" if kind == "Pod" else digest_of(body),
        proven=_proven(body),
        workload=read_workload(body) if kind == "Deployment" else None,
        pod=read_pod(body) if kind == "Pod" else None,
        route=read_route(body) if kind in ("Ingress", "HTTPRoute") else None,
        scaler=read_scaler(body) if kind == SCALER_KIND else None,
        address=read_address(body) if kind == "Service" else "",
    )


def pods_of(
    children: Mapping[ChildKey, CachedChild], component: str, revision: str
) -> tuple[ObservedPod, ...]:
    """A Deployment's pods, except those that have ended."""
    pods = (child.pod for child in children.values())
    return tuple(
        pod
        for pod in pods
        if pod is not None
        and (pod.component, pod.revision) == (component, revision)
        and pod.stage != "over"
    )


def _owner(metadata: Body) -> Body:
    """The owner reference to a pool of our API group, or an empty one."""
    for reference in metadata.get("ownerReferences", ()):
        if (
            reference["kind"] == POOL.kind
            and reference["apiVersion"].partition("/")[0] == POOL.group
        ):
            return dict(reference)
    return {"uid": "", "name": ""}


def _proven(body: Body) -> bool:
    conditions = body.get("status", {}).get("conditions") or ()
    return any(
        condition.get("reason") == "NewReplicaSetAvailable" for condition in conditions
    )


def digest_of(body: Body) -> str:
    """A digest of the object's desired state, without what controllers report in it."""
    metadata = {name: body["metadata"][name] for name in body["metadata"].keys() - _VOLATILE}
    notes = metadata.get("annotations", {}).items()
    metadata["annotations"] = {name: note for name, note in notes if name not in _REPORTS}
    desired = {name: body[name] for name in body.keys() - {"status"}} | {"metadata": metadata}
    encoded = msgspec.json.encode(desired, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=12).hexdigest()


def _version(body: Body) -> int:
    """Comparable between objects and over time. Kubernetes guarantees this since 1.35; earlier
    versions behave the same."""
    return int(body["metadata"]["resourceVersion"])


def _pool_of(body: Body) -> PoolKey:
    metadata = body["metadata"]
    return PoolKey(metadata["namespace"], metadata.get("labels", {}).get(POOL_LABEL, ""))


def has_served(child: CachedChild, pods: Iterable[ObservedPod]) -> bool:
    """Whether any node of the Deployment was ever ready."""
    ready = child.workload.ready if child.workload is not None else 0
    return child.proven or ready > 0 or any(pod.ready for pod in pods)

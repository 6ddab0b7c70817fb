"""The pools and their children as the operator last observed them.

In: objects from watches, listings and the answers to our own requests. Out: the pools and their
children. It is only a cache: an operator that starts with an empty one reaches the same state.
Secrets are not cached, because nothing watches them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from baton_operator.kube.kinds import ChildKey, ObjectKind
from baton_operator.kube.objects import Body, version_of
from baton_operator.names import POOL_LABEL
from baton_operator.state.child import CachedChild, read_child
from baton_operator.state.pod_problem import NODE_LOST
from baton_operator.state.readers import keep_first_seen

# After an outage of the API server a kubelet reports within 10 s, or within 30 s if its watch of
# pods has backed off.
SETTLE_S = 60.0


class PoolKey(NamedTuple):
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


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

    def wake_pool(self, key: PoolKey) -> None:
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

    def note_unanswered(self) -> None:
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
        cached = self._pools.get(key)
        if ours and cached is None:
            return  # the pool was deleted meanwhile
        if cached is not None and version_of(body) < version_of(cached) and not listed:
            return
        body["metadata"].pop("managedFields", None)
        self._pools[key] = body
        if not ours and (cached is None or version_of(body) != version_of(cached)):
            self._changed(key)

    def lose_pool(self, key: PoolKey, uid: str) -> None:
        cached = self._pools.get(key)
        if cached is not None and cached["metadata"]["uid"] == uid:
            del self._pools[key]
            self._changed(key)

    def see_child(self, body: Body, *, listed: bool = False, ours: bool = False) -> CachedChild:
        """Return the child as cached afterwards. `ours`: the answer to a request of ours, which
        needs no reconcile; then return that answer's content, even if the cache is newer."""
        child = read_child(body)
        pool = _pool_of(body)
        cached = self._children.get(pool, {}).get(child.key)
        if child.pod is not None:
            before = cached.pod if cached is not None and cached.uid == child.uid else None
            pod = keep_first_seen(child.pod, before, self._clock())
            child = msgspec.structs.replace(child, pod=pod)
        if ours and pool not in self._pools:
            return child  # garbage collection deletes it with its pool
        if cached is not None and child.version < cached.version and not listed:
            return child if ours else cached
        if ours:
            if cached is None or cached.version != child.version:
                self._unseen[child.key] = (child.version, self._clock())
        elif child.version >= self._unseen.get(child.key, (0, 0.0))[0]:
            self._unseen.pop(child.key, None)
        self._children.setdefault(pool, {})[child.key] = child
        if child.differs(cached) and not ours:
            self._changed(pool)
        return child

    def lose_child(self, pool: PoolKey, key: ChildKey, uid: str) -> None:
        """Remove a child that was deleted or lost its label, unless another object has its name."""
        cached = self._children.get(pool, {}).get(key)
        if cached is None or cached.uid != uid:
            return
        del self._children[pool][key]
        self._unseen.pop(key, None)
        if not self._children[pool]:
            del self._children[pool]
        self._changed(pool)

    def compare_listing(
        self, kind: ObjectKind, listed: Iterable[Body], cached: Mapping[ChildKey, CachedChild]
    ) -> list[ChildKey]:
        """Remove the children that a listing shows to be gone, because a watch misses deletions
        while it is down. Return the keys that are newer than cached, for the caller to read.
        `listed`: metadata of all objects of `kind`. `cached`: the children in the cache before the
        listing was requested."""
        versions = keys_of(kind, listed)
        gone = cached.keys() - versions.keys()
        for pool, children in list(self._children.items()):
            for key in gone & children.keys():
                self.lose_child(pool, key, cached[key].uid)
        for key, version in versions.items():
            # This listing confirms our write, as a watch would: some kinds may have no watch.
            if version >= self._unseen.get(key, (version + 1, 0.0))[0]:
                del self._unseen[key]
        return [
            key
            for key, version in versions.items()
            if key not in cached or cached[key].version < version
        ]

    def children_of_kind(
        self, kind: ObjectKind, namespace: str | None
    ) -> dict[ChildKey, CachedChild]:
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


def _pool_of(body: Body) -> PoolKey:
    metadata = body["metadata"]
    return PoolKey(metadata["namespace"], metadata.get("labels", {}).get(POOL_LABEL, ""))

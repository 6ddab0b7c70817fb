"""How many nodes a pool wants where somebody else says it: by its PoolScalers.

In: a pool. Out: the same with those counts, from which all else is built. A PoolScaler that is
missing is made with as many as there are; after that its count is read, and never written. Its
status tells an autoscaler how many there are, and which.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.builders.nodes import build_scaler, scaled_roles, seeded, selector_of
from baton_operator.kube.client import Api, Refused, ServerFailed
from baton_operator.kube.kinds import POOL_SCALER, ChildKey, key_of
from baton_operator.state.cache import Cache, CachedChild, PoolKey, read_child
from baton_protocol.store import Role

logger = logging.getLogger(__name__)


class Scalers:
    """One event loop's."""

    def __init__(self, api: Api, cache: Cache) -> None:
        self._api = api
        self._cache = cache

    async def follow(self, key: PoolKey, pool: Pool) -> Pool:
        """With a count of the spec where there is no PoolScaler to be had: why not is said when its
        manifest is applied. Raise Conflict and Unavailable."""
        counts: dict[Role, int] = {}
        for role in scaled_roles(pool):
            children = self._cache.children(key)
            place = key_of(build_scaler(pool, role))
            child = children.get(place)
            if child is None and not pool.spec.paused:
                child = await self._make(pool, role, place, children)
            if child is None or child.scaler is None or child.owner != pool.uid:
                continue
            counts[role] = child.scaler.wanted
            if not pool.spec.paused:
                await self._tell(pool, role, child, children)
        return with_replicas(pool, counts)

    async def _make(
        self, pool: Pool, role: Role, place: ChildKey, children: Mapping[ChildKey, CachedChild]
    ) -> CachedChild | None:
        found = await self._api.get(place)
        if found is not None:
            return read_child(found)  # the watch will show it
        body = seeded(build_scaler(pool, role), seed_of(pool, role, children))
        try:
            return self._cache.see_child(await self._api.create(body), ours=True)
        except (Refused, ServerFailed) as error:
            logger.debug("%s %s: %s", POOL_SCALER.kind, place.name, error)
            return None

    async def _tell(
        self, pool: Pool, role: Role, child: CachedChild, children: Mapping[ChildKey, CachedChild]
    ) -> None:
        status = {"replicas": nodes_of(role, children), "selector": selector_of(pool, role)}
        said = child.scaler
        if said is not None and status == {"replicas": said.replicas, "selector": said.selector}:
            return
        metadata = {
            "name": child.key.name,
            "namespace": child.key.namespace,
            "uid": child.uid,
        }
        body = {
            "apiVersion": child.key.api_version,
            "kind": child.key.kind,
            "metadata": metadata,
            "status": status,
        }
        try:
            self._cache.see_child(await self._api.apply_status(body), ours=True)
        except (Refused, ServerFailed) as error:
            logger.warning("status of %s %s: %s", child.key.kind, child.key.name, error)


def with_replicas(pool: Pool, counts: Mapping[Role, int]) -> Pool:
    changed = {
        role: msgspec.structs.replace(pool.spec.role(role), replicas=count)
        for role, count in counts.items()
    }
    return msgspec.structs.replace(pool, spec=msgspec.structs.replace(pool.spec, **changed))


def seed_of(pool: Pool, role: Role, children: Mapping[ChildKey, CachedChild]) -> int:
    """As many as there are now: whoever takes over begins there. In a new pool what the spec
    says."""
    known = [
        child.workload.desired
        for child in children.values()
        if child.workload is not None and child.workload.component == role
    ]
    return max(known, default=pool.spec.role(role).replicas)


def nodes_of(role: Role, children: Mapping[ChildKey, CachedChild]) -> int:
    """Without those that drain or end: an autoscaler shall not count on them."""
    pods = (child.pod for child in children.values())
    return sum(
        pod is not None and pod.component == role and not pod.ends and pod.stage != "over"
        for pod in pods
    )

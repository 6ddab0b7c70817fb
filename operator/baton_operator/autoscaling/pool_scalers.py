"""Sets the counts of externally scaled roles from their PoolScalers.

In: a pool. Out: the same pool with those counts. A missing PoolScaler is created with the current
number of nodes; after that its count is only read. Its status gives an autoscaler the current
number and the pods' selector.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.builders.scalers import build_scaler, scaled_roles, seeded, selector_of
from baton_operator.kube.client import Api, Refused, ServerFailed
from baton_operator.kube.kinds import POOL_SCALER, ChildKey, key_of
from baton_operator.state.cache import Cache, PoolKey
from baton_operator.state.child import CachedChild, read_child
from baton_protocol.store import Role

logger = logging.getLogger(__name__)


class Scalers:
    """For one event loop."""

    def __init__(self, api: Api, cache: Cache) -> None:
        self._api = api
        self._cache = cache

    async def follow(self, key: PoolKey, pool: Pool) -> Pool:
        """The pool with its counts; the spec's count if a PoolScaler cannot be created, which is
        reported when its manifest is applied. Raise Conflict and ApiUnavailable."""
        counts: dict[Role, int] = {}
        for role in scaled_roles(pool):
            children = self._cache.children(key)
            place = key_of(build_scaler(pool, role))
            child = children.get(place)
            if child is None and not pool.spec.paused:
                child = await self._create(pool, role, place, children)
            if child is None or child.scaler is None or child.owner != pool.uid:
                continue
            counts[role] = child.scaler.wanted
            if not pool.spec.paused:
                await self._write_status(pool, role, child, children)
        return with_replicas(pool, counts)

    async def _create(
        self, pool: Pool, role: Role, place: ChildKey, children: Mapping[ChildKey, CachedChild]
    ) -> CachedChild | None:
        existing = await self._api.get(place)
        if existing is not None:
            return read_child(existing)  # the watch will show it
        body = seeded(build_scaler(pool, role), initial_count(pool, role, children))
        try:
            return self._cache.see_child(await self._api.create(body), ours=True)
        except (Refused, ServerFailed) as error:
            logger.debug("%s %s: %s", POOL_SCALER.kind, place.name, error)
            return None

    async def _write_status(
        self, pool: Pool, role: Role, child: CachedChild, children: Mapping[ChildKey, CachedChild]
    ) -> None:
        status = {"replicas": count_nodes(role, children), "selector": selector_of(pool, role)}
        written = child.scaler
        if written is not None and status == {
            "replicas": written.replicas,
            "selector": written.selector,
        }:
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


def initial_count(pool: Pool, role: Role, children: Mapping[ChildKey, CachedChild]) -> int:
    """The current number of nodes, or in a new pool the spec's: where an autoscaler starts."""
    current = [
        child.workload.desired
        for child in children.values()
        if child.workload is not None and child.workload.component == role
    ]
    return max(current, default=pool.spec.role(role).replicas)


def count_nodes(role: Role, children: Mapping[ChildKey, CachedChild]) -> int:
    """Without draining and ending nodes, on which an autoscaler must not count."""
    pods = (child.pod for child in children.values())
    return sum(
        pod is not None and pod.component == role and not pod.ends and pod.stage != "over"
        for pod in pods
    )

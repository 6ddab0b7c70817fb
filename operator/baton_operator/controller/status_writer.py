"""Writes a pool's status when it changes, and posts events for the changes.

In: the pool as read (or the error in its spec), and what was observed of it. Out: a status, written
only to the version of the pool that it was derived from, then events. An operator that dies between
the two loses the events; the status is what counts.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.api.spec_reader import SpecError
from baton_operator.api.status import OperatorStatus, PoolStatus, read_operator, read_status
from baton_operator.kube.client import FIELD_MANAGER, Api, ApiError
from baton_operator.kube.kinds import EVENT, POOL
from baton_operator.kube.objects import Body
from baton_operator.state.cache import Cache, PoolKey
from baton_operator.state.observed import Observed
from baton_operator.status.derive import derive_status
from baton_operator.status.events import PoolEvent, events_between
from baton_operator.status.pod_events import PodEvents

logger = logging.getLogger(__name__)

LONGEST_NOTE = 1024  # characters; the API's limit


class StatusWriter:
    """For one pool. `now` is the UTC time of day; `instance` names this process in events."""

    def __init__(
        self,
        key: PoolKey,
        api: Api,
        cache: Cache,
        pod_events: PodEvents,
        now: Callable[[], datetime],
        instance: str,
    ) -> None:
        self._key = key
        self._api = api
        self._cache = cache
        self._pod_events = pod_events
        self.now = now
        self._instance = instance

    async def write_status(
        self,
        generation: int,
        pool: Pool | SpecError,
        revision: str,
        observed: Observed,
    ) -> PoolStatus:
        """`generation` is that of the spec in `pool`, `revision` that of its templates. Raise
        Conflict if the pool changed since the cache saw it."""
        pods = await self._pod_events.explain_pods(observed.pods)
        observed = msgspec.structs.replace(observed, pods=pods)
        resource = self._cache.pool(self._key)
        before = read_status(resource) if resource is not None else None
        if resource is not None and before is None:
            before = PoolStatus(operator=read_operator(resource))
        after = derive_status(
            pool, revision, generation, observed, before, self.now(), self._cache.now_s()
        )
        if resource is not None and after != before:
            await self._write(resource, after.written())
            for event in events_between(before, after):
                await self.post_event(resource["metadata"]["uid"], event)
        return after

    async def write_operator(self, resource: Body, record: OperatorStatus) -> None:
        """Write who manages the pool, and nothing else of its status. Raise Conflict if the pool
        changed since the cache saw it: another operator may have been faster."""
        # The other fields stay, also those that only another version of the operator knows.
        status = (resource.get("status") or {}) | {"operator": msgspec.to_builtins(record)}
        await self._write(resource, status)

    async def _write(self, resource: Body, status: Body) -> None:
        # resourceVersion: no other version of the pool may get this status.
        metadata = {
            "name": self._key.name,
            "namespace": self._key.namespace,
            "uid": resource["metadata"]["uid"],
            "resourceVersion": resource["metadata"]["resourceVersion"],
        }
        body = {
            "apiVersion": POOL.api_version,
            "kind": POOL.kind,
            "metadata": metadata,
            "status": status,
        }
        self._cache.see_pool(await self._api.apply_status(body), ours=True)

    async def post_event(self, uid: str, event: PoolEvent) -> None:
        """Post an event on the pool with this `uid`. A failure is logged and not retried."""
        key = self._key
        logger.info("pool %s: %s: %s", key, event.reason, event.message)
        body = {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {
                "name": f"{key.name}.{uuid.uuid4().hex[:16]}",
                "namespace": key.namespace,
            },
            "eventTime": self.now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": f"baton.dev/{FIELD_MANAGER}",
            "reportingInstance": self._instance,
            "action": "Reconcile",
            "type": event.type,
            "reason": event.reason,
            "note": event.message[:LONGEST_NOTE],
            "regarding": {
                "apiVersion": POOL.api_version,
                "kind": POOL.kind,
                "name": key.name,
                "namespace": key.namespace,
                "uid": uid,
            },
        }
        try:
            await self._api.create(body)
        except ApiError as error:
            logger.warning("pool %s: cannot post event %s: %s", key, event.reason, error)

"""Looks at everything again now and then, whatever the watches say; one task for all pools.

In: time, and marks that a watch began anew. Out: the cache without what is gone, and each pool
marked at a moment of its own. Listings are of metadata alone: 100 pools are some 200 kB.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from baton_operator.api import Api, ApiError, Body, Unavailable
from baton_operator.cache import POOL_LABEL, Cache, PoolKey
from baton_operator.kinds import CHILDREN, POOL, Kind
from baton_operator.observed import ChildKey
from baton_operator.queue import WorkQueue

logger = logging.getLogger(__name__)

PERIOD_S = 300.0
# A listing by kopf is a burst of marks; its objects come before its end.
SETTLE_S = 1.0


class Resync:
    """One event loop's. `namespaces` is empty for all."""

    def __init__(
        self,
        api: Api,
        cache: Cache,
        queue: WorkQueue[PoolKey],
        namespaces: Sequence[str],
        clock: Callable[[], float],
        period_s: float = PERIOD_S,
    ) -> None:
        self._api = api
        self._cache = cache
        self._queue = queue
        self._namespaces = tuple(namespaces) or (None,)
        self._clock = clock
        self._period_s = period_s
        self._marked: set[Kind] = set()
        self._woken = asyncio.Event()

    def mark(self, kind: Kind) -> None:
        """Objects of this kind were listed by a watch: some may be gone since it last did."""
        self._marked.add(kind)
        self._woken.set()

    async def run(self) -> None:
        while True:
            await self._until_due(self._clock() + self._period_s * random.uniform(0.9, 1.1))
            for key in self._cache.pools():
                self._queue.add(key, random.uniform(0, self._period_s / 2))
            await self._compare({*CHILDREN, POOL})

    async def _until_due(self, due: float) -> None:
        """Compare what is marked meanwhile."""
        while (left := due - self._clock()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._woken.wait()
            except TimeoutError:
                return
            await asyncio.sleep(SETTLE_S)
            marked, self._marked = self._marked, set()
            self._woken.clear()
            await self._compare(marked)

    async def _compare(self, kinds: set[Kind]) -> None:
        for kind in kinds:
            try:
                for namespace in self._namespaces:
                    if kind == POOL:
                        await self._compare_pools(namespace)
                    else:
                        await self._compare_children(kind, namespace)
            except Unavailable as error:
                logger.info("%s are to be compared again: %s", kind.plural, error)
                self.mark(kind)
            except ApiError as error:
                logger.warning("%s were not compared: %s", kind.plural, error)

    async def _compare_children(self, kind: Kind, namespace: str | None) -> None:
        known = self._cache.of_kind(kind, namespace)
        listed = await self._api.list_metadata(kind, namespace, POOL_LABEL)
        for key in self._cache.compare(kind, listed, known):
            body = await self._api.get(key)
            if body is not None:
                self._cache.see_child(body)

    async def _compare_pools(self, namespace: str | None) -> None:
        known = {key: self._cache.pool(key) for key in self._cache.pools()}
        listed = await self._api.list_metadata(POOL, namespace)
        found = {PoolKey(one["namespace"], one["name"]): one for one in listed}
        for key, pool in known.items():
            if pool is not None and key not in found and namespace in (None, key.namespace):
                self._cache.lose_pool(key, pool["metadata"]["uid"])
        for key, metadata in found.items():
            if _newer(metadata, known.get(key)):
                place = ChildKey(POOL.api_version, POOL.kind, key.namespace, key.name)
                body = await self._api.get(place)
                if body is not None:
                    self._cache.see_pool(body)


def _newer(metadata: Body, known: Body | None) -> bool:
    if known is None:
        return True
    return int(metadata["resourceVersion"]) > int(known["metadata"]["resourceVersion"])

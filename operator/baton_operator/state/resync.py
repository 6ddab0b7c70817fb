"""Periodically compares the cache with the API server, independently of the watches.

In: time, and marks that a watch listed again. Out: a cache without deleted objects, and a reconcile
of each pool at its own time. One task serves all pools. Listings contain metadata only: some 200 kB
for 100 pools.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from baton_operator.kube.client import Api, ApiError, ApiUnavailable, Refused, TooManyRequests
from baton_operator.kube.kinds import POOL, WATCHED, ChildKey, ObjectKind
from baton_operator.kube.objects import Body
from baton_operator.names import POOL_LABEL
from baton_operator.state.cache import Cache, PoolKey, keys_of

logger = logging.getLogger(__name__)

PERIOD_S = 300.0
# A listing by kopf is a burst of marks; its objects arrive before the last mark.
SETTLE_S = 1.0
FIRST_S = 60.0
# Backoff after a comparison that failed.
FIRST_RETRY_S = 10.0
LONGEST_RETRY_S = 60.0


class KindInstalled(Exception):
    """A missing kind was installed. With a list of namespaces only a new life can watch it."""


class Resync:
    """For one event loop. `namespaces` is empty for all. `look` is called with a pool and the
    seconds until its reconcile."""

    def __init__(
        self,
        api: Api,
        cache: Cache,
        look: Callable[[PoolKey, float], None],
        namespaces: Sequence[str],
        clock: Callable[[], float],
        period_s: float = PERIOD_S,
    ) -> None:
        self._api = api
        self._cache = cache
        self._look = look
        self._namespaces = tuple(namespaces) or (None,)
        self._clock = clock
        self._period_s = period_s
        self._marked: set[ObjectKind] = set()
        # Kinds whose comparison failed, the failures in a row, and the time of the next attempt.
        self._failed: set[ObjectKind] = set()
        self._failures = 0
        self._retry_at = math.inf
        self._woken = asyncio.Event()

    def mark_listed(self, kind: ObjectKind) -> None:
        """A watch listed this kind: objects may have been deleted since its previous listing."""
        self._marked.add(kind)
        self._woken.set()

    async def wait_for_cache(self) -> None:
        """Return once the cache contains all existing objects: a reconcile without them would
        report children as missing. Give up after FIRST_S, but not while the server does not answer,
        because the cache is then empty."""
        late, silent = self._clock() + FIRST_S, False
        while True:
            try:
                missing = await self._missing()
            except ApiUnavailable as error:
                if not silent:
                    logger.info("waiting for the API server: %s", error)
                late, silent = self._clock() + FIRST_S, True
                await asyncio.sleep(max(SETTLE_S, _retry_after_s(error)))
                continue
            silent = False
            if not missing:
                return
            if self._clock() > late:
                logger.warning(
                    "the operator sees no events of %s; check that it may watch them",
                    ", ".join(missing),
                )
                return
            await asyncio.sleep(SETTLE_S / 4)

    async def _missing(self) -> list[str]:
        """Kinds that cannot be listed, or with objects that are not in the cache."""
        names = [await self._describe_missing(kind) for kind in (*WATCHED, POOL)]
        return [name for name in names if name]

    async def _describe_missing(self, kind: ObjectKind) -> str:
        try:
            return kind.plural if await self._is_incomplete(kind) else ""
        except Refused as error:
            return f"{kind.plural} ({error})"

    async def _list(self, kind: ObjectKind, namespace: str | None) -> list[Body]:
        was_missing = kind in self._api.missing
        selector = "" if kind == POOL else POOL_LABEL
        listed = await self._api.list_metadata(kind, namespace, selector)
        if was_missing and kind not in self._api.missing and namespace is not None:
            raise KindInstalled(f"{kind.plural} are now installed and can be watched")
        return listed

    async def _is_incomplete(self, kind: ObjectKind) -> bool:
        for namespace in self._namespaces:
            listed = await self._list(kind, namespace)
            if kind == POOL:
                keys = {PoolKey(metadata["namespace"], metadata["name"]) for metadata in listed}
                missing: set[Any] = keys - set(self._cache.pools())
            else:
                missing = (
                    keys_of(kind, listed).keys()
                    - self._cache.children_of_kind(kind, namespace).keys()
                )
            if missing:
                return True
        return False

    async def run(self) -> None:
        while True:
            await self._until_due(self._clock() + self._period_s * random.uniform(0.9, 1.1))
            for key in self._cache.pools():
                self._look(key, random.uniform(0, self._period_s / 2))
            await self._compare({*WATCHED, POOL})

    async def _until_due(self, due: float) -> None:
        """Until then compare marked kinds, and retry comparisons that failed."""
        while (now := self._clock()) < due:
            if now >= self._retry_at:
                await self._compare(set(self._failed))
                continue
            try:
                async with asyncio.timeout(min(due, self._retry_at) - now):
                    await self._woken.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(SETTLE_S)
            marked, self._marked = self._marked - self._failed, set()
            self._woken.clear()
            await self._compare(marked)

    async def _compare(self, kinds: set[ObjectKind]) -> None:
        unanswered: list[ApiUnavailable] = []
        for kind in kinds:
            self._failed.discard(kind)
            try:
                for namespace in self._namespaces:
                    if kind == POOL:
                        await self._compare_pools(namespace)
                    else:
                        await self._compare_children(kind, namespace)
            except ApiUnavailable as error:
                self._failed.add(kind)
                unanswered.append(error)
            except ApiError as error:
                logger.warning("comparing %s with the API server failed: %s", kind.plural, error)

        self._plan_retry(unanswered)

    def _plan_retry(self, unanswered: list[ApiUnavailable]) -> None:
        """Exponential backoff, but no earlier than the server asked for."""
        if not self._failed:
            self._failures, self._retry_at = 0, math.inf
        if not unanswered:
            return
        if not self._failures:
            kinds = ", ".join(sorted(kind.plural for kind in self._failed))
            logger.info("cannot compare %s with the API server; retrying: %s", kinds, unanswered[0])
        pause = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self._failures, 10))
        self._failures += 1
        retry_after_s = max(_retry_after_s(error) for error in unanswered)
        self._retry_at = self._clock() + max(pause, retry_after_s) * random.uniform(1.0, 1.25)

    async def _compare_children(self, kind: ObjectKind, namespace: str | None) -> None:
        cached = self._cache.children_of_kind(kind, namespace)
        listed = await self._list(kind, namespace)
        for key in self._cache.compare_listing(kind, listed, cached):
            body = await self._api.get(key)
            if body is not None:
                self._cache.see_child(body)

    async def _compare_pools(self, namespace: str | None) -> None:
        cached = {key: self._cache.pool(key) for key in self._cache.pools()}
        listed = await self._list(POOL, namespace)
        pools = {PoolKey(metadata["namespace"], metadata["name"]): metadata for metadata in listed}
        for key, pool in cached.items():
            if pool is not None and key not in pools and namespace in (None, key.namespace):
                self._cache.lose_pool(key, pool["metadata"]["uid"])
        for key, metadata in pools.items():
            if _newer(metadata, cached.get(key)):
                place = ChildKey(POOL.api_version, POOL.kind, key.namespace, key.name)
                body = await self._api.get(place)
                if body is not None:
                    self._cache.see_pool(body)


def _retry_after_s(error: ApiUnavailable) -> float:
    """Seconds for which the server asked clients to wait."""
    return error.retry_after_s if isinstance(error, TooManyRequests) else 0.0


def _newer(metadata: Body, cached: Body | None) -> bool:
    if cached is None:
        return True
    return int(metadata["resourceVersion"]) > int(cached["metadata"]["resourceVersion"])

"""Runs the batches of the pool that no other router runs, and deletes what has expired.

In: the queue in the store, leases on the index, the tenants of the keys. Out: runs of batches, some
at a time. A router holds the lease of each batch that it runs; if the router dies, another one
finds the lease free and continues. A router without an index is alone and needs no lease. While the
index is down, runs go on, and none begins.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from baton_kvstore.errors import StoreError
from baton_kvstore.index.leases import Leases
from baton_protocol.errors import BatonError
from baton_router.batches.run import BatchRun, BatchWorkshop

LOOK_S = 1.0  # between two looks at the queue; in a bucket, each costs a request
LEASE_S = 6.0
RENEW_S = 1.5
MOST_RUNS = 8  # batches at a time on one router
SWEEP_S = 3600.0
SWEEP = "sweep"

logger = logging.getLogger(__name__)


class BatchKeeper:
    """Call keep_running() until cancelled, then close(). `knows` says whether a tenant has keys."""

    def __init__(
        self, shop: BatchWorkshop, leases: Leases | None, knows: Callable[[str], bool]
    ) -> None:
        self._shop = shop
        self._leases = leases
        self._knows = knows
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._tenants: dict[str, str] = {}  # of the runs
        self._pauses: dict[str, float] = {}  # until when a batch that failed is not tried again
        self._swept_at = -SWEEP_S
        self._closed = False
        self.open = 0

    @property
    def running(self) -> int:
        """Number of batches that this router runs."""
        return len(self._runs)

    async def keep_running(self) -> None:
        renewed_at = 0.0
        while True:
            pause_s = LOOK_S
            try:
                if time.monotonic() - renewed_at >= RENEW_S:
                    renewed_at = time.monotonic()
                    await self._renew()
                await self._start()
                await self._sweep()
            except BatonError:  # the store fails, which it has logged
                pause_s = RENEW_S
            except Exception:  # our bug; keep the other batches running
                logger.exception("looking for batches failed")
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Leave the running batches to other routers. Their answers so far are kept."""
        self._closed = True
        runs = dict(self._runs)
        for task in runs.values():
            task.cancel()
        await asyncio.gather(*runs.values(), return_exceptions=True)

    # --- runs -------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Begin batches of the queue: first of tenants of which the fewest run here."""
        waiting = await self._shop.journal.open_batches()
        self.open = len(waiting)
        self._pauses = {id: until for id, until in self._pauses.items() if id in waiting}
        while len(self._runs) < MOST_RUNS and not (self._closed or self._shop.lines.stopping):
            now = time.monotonic()
            ready = [
                id
                for id, tenant in waiting.items()
                if id not in self._runs and self._pauses.get(id, now) <= now and self._knows(tenant)
            ]
            if not ready:
                return
            running = list(self._tenants.values())
            id = min(ready, key=lambda each: (running.count(waiting[each]), each))
            tenant = waiting.pop(id)
            if not await self._hold(id):
                continue
            self._tenants[id] = tenant
            self._runs[id] = asyncio.create_task(self._run(id, tenant))

    async def _run(self, id: str, tenant: str) -> None:
        try:
            state = await self._shop.journal.read(tenant, id)
            if state is None:
                await self._shop.journal.forget(id)
            else:
                await BatchRun(self._shop, state.order).run()
        except BatonError as error:
            logger.warning("batch %s pauses: %s", id, error.message)
            self._pauses[id] = time.monotonic() + LEASE_S
        except Exception:  # our bug; keep the other batches running
            logger.exception("batch %s failed; it is tried again later", id)
            self._pauses[id] = time.monotonic() + LEASE_S
        finally:
            del self._runs[id], self._tenants[id]
            await self._release(id)

    # --- leases -----------------------------------------------------------------------------------

    async def _hold(self, name: str) -> bool:
        if self._leases is None:
            return True
        try:
            return await self._leases.hold(name, LEASE_S)
        except StoreError as error:
            logger.warning("no batch begins, because the index gives no lease: %s", error)
            return False

    async def _renew(self) -> None:
        """Renew the leases of the runs, and end those whose lease another router has."""
        if self._leases is None:
            return
        for id, task in list(self._runs.items()):
            try:
                if not await self._leases.hold(id, LEASE_S):
                    logger.warning("another router has taken batch %s", id)
                    task.cancel()
            except StoreError as error:
                logger.warning("the index does not renew the lease of batch %s: %s", id, error)
                return

    async def _release(self, name: str) -> None:
        if self._leases is not None:
            try:
                await self._leases.release(name)
            except StoreError:
                return  # it expires

    async def _sweep(self) -> None:
        now = time.monotonic()
        if now - self._swept_at < SWEEP_S or not await self._hold(SWEEP):
            return
        self._swept_at = now
        await self._shop.files.sweep()
        await self._shop.journal.sweep()

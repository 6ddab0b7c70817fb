"""Finds nodes from a static list and from the registry on the index.

In: NodeReports, polled from the registry. Out: one link per address. The registry only says which
addresses to dial. A node whose report expired keeps its link while that is up, because a registry
that is down must not take down a serving pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from baton_kvstore.errors import StoreError
from baton_kvstore.index.registry import Registry
from baton_router.nodes.link import NodeLink
from baton_router.nodes.link_table import LinkTable

# While no link is up, and for EAGER_FOR_S seconds after a new address appeared, poll the registry
# this often (seconds), so that a starting pool serves soon.
EAGER_S = 0.1
EAGER_FOR_S = 5.0
# Remove a broken link after its address was absent for this many polling intervals.
MISSES = 3

logger = logging.getLogger(__name__)


class Discovery:
    """Keeps the link table up to date. `forget` is called with each removed link."""

    def __init__(
        self,
        table: LinkTable,
        registry: Registry | None,
        static: Sequence[str],
        *,
        interval_s: float,
        forget: Callable[[NodeLink], None],
    ) -> None:
        self._table = table
        self._registry = registry
        self._static = [address.rstrip("/") for address in static]
        self._interval_s = interval_s
        self._forget = forget
        self._absent: dict[str, float] = {}  # address to the time when it was first absent
        self._eager_until = 0.0
        self.reachable: bool | None = None  # None before the first poll

    async def keep_links(self) -> None:
        """Poll the registry until cancelled."""
        for address in self._static:
            self._table.ensure_link(address)
        while self._registry is not None:
            try:
                await self._poll(self._registry)
            except Exception:
                logger.exception("reading the node registry failed; keeping the known nodes")
            new_address = asyncio.get_running_loop().time() < self._eager_until
            eager = new_address or not any(link.up for link in self._table.links.values())
            await asyncio.sleep(min(EAGER_S, self._interval_s) if eager else self._interval_s)

    async def _poll(self, registry: Registry) -> None:
        try:
            reports = await registry.nodes()
        except StoreError as error:
            if self.reachable is not False:
                logger.warning(
                    "the node registry is unreachable; keeping the known nodes: %s", error
                )
            self.reachable = False
            return
        self.reachable = True
        listed = {report.address.rstrip("/") for report in reports}
        if listed - set(self._table.links):
            self._eager_until = asyncio.get_running_loop().time() + EAGER_FOR_S
        for address in listed:
            self._table.ensure_link(address)
        for address, link in list(self._table.links.items()):
            # Two nodes with one name overwrite each other's report: keep showing the unused one.
            if link.up or link.rival or address in listed or address in self._static:
                self._absent.pop(address, None)
                continue
            now = asyncio.get_running_loop().time()
            if now - self._absent.setdefault(address, now) >= MISSES * self._interval_s:
                del self._absent[address]
                await self._table.remove_link(address)
                self._forget(link)

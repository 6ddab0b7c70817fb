"""Keeps the pool's prefixes pinned, and their records the same on all routers.

In: PrefixPins, and the records on the index. Out: frames to nodes that lack a prefix; changed
records, in both directions. A router that starts learns all prefixes from the index. Without one,
or while it is down, the router's own records are all it has.
"""

from __future__ import annotations

import asyncio
import logging

from baton_kvstore.errors import StoreError
from baton_kvstore.index.pins import Pins
from baton_protocol.store import PinnedPrefix
from baton_router.nodes.prefix_pins import PrefixPins

LOOK_S = 0.25  # between two looks at what nodes lack
SYNC_EVERY = 4  # looks; each sync is one small command if nothing has changed

logger = logging.getLogger(__name__)


class PinKeeper:
    """Call `keep_pinned()` until cancelled."""

    def __init__(self, pins: PrefixPins, index: Pins | None) -> None:
        self._pins = pins
        self._index = index
        self._down = False

    async def keep_pinned(self) -> None:
        look = 0
        while True:
            try:
                if look % SYNC_EVERY == 0:
                    await self._sync()
                self._pins.send_missing()
            except Exception:  # our bug; keep the other prefixes pinned
                logger.exception("keeping prefixes pinned failed")
            look += 1
            await asyncio.sleep(LOOK_S)

    async def save(self, record: PinnedPrefix) -> None:
        """Write a record of this router at once."""
        if self._index is not None:
            try:
                await self._index.put(record, record.until - self._pins.now())
            except StoreError as error:
                self._note_down(error)

    async def _sync(self) -> None:
        if self._index is None:
            return
        try:
            listed = await self._index.list_ids()
            known = {record.id: record.changed for record in self._pins.records}
            for record in await self._index.read_changed(listed, known):
                self._pins.learn(record)
            for record in list(self._pins.records):  # the index has restarted, or was down
                if listed.get(record.id, -1) < record.changed:
                    await self._index.put(record, record.until - self._pins.now())
            self._down = False
        except StoreError as error:
            self._note_down(error)

    def _note_down(self, error: StoreError) -> None:
        if not self._down:
            logger.warning("the index does not take or give the pinned prefixes: %s", error)
        self._down = True

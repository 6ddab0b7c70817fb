"""Tells the registry again and again that this node is there.

In: the node's report, asked for at each beat. Out: a key with a TTL on the index. An index that is
down is no reason to stop serving: routers that know this node keep their links.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from baton_kvstore.errors import StoreError
from baton_kvstore.index.registry import Registry
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.store import NodeReport

logger = logging.getLogger(__name__)
BEAT_S = 1.0
TTL_S = 3.0
LEAVE_S = 1.0


async def beat(registry: Registry, report: Callable[[], NodeReport]) -> None:
    """Register until cancelled; say once that the index is away, and once that it is back."""
    away = False
    while True:
        try:
            await registry.register(report(), TTL_S)
            if away:
                logger.warning("registered again")
            away = False
        except StoreError as error:
            if not away:
                logger.warning("cannot register: %s", error)
            away = True
        await asyncio.sleep(BEAT_S)


async def leave(registry: Registry, node: NodeId, epoch: Epoch) -> None:
    """Take the report away, if the index answers soon: it would expire by itself."""
    try:
        async with asyncio.timeout(LEAVE_S):
            await registry.unregister(node, epoch)
    except (StoreError, TimeoutError) as error:
        logger.info("not unregistered: %s", error or "no answer in time")

"""The node's heartbeat: registers the node in the index once per second.

In: the node's report, read at each beat. Out: a key with a TTL in the index. The node keeps serving
while the index is down: routers that know the node keep their links.
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
    """Register until cancelled. Log once when the index becomes unavailable, and once when it is
    available again."""
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
    """Unregister, if the index answers within LEAVE_S. Otherwise the report expires on its own."""
    try:
        async with asyncio.timeout(LEAVE_S):
            await registry.unregister(node, epoch)
    except (StoreError, TimeoutError) as error:
        logger.info("cannot unregister: %s", error or "timeout")

"""Applies the nodes' cache events to the view, up to a rate, and requests listings after losses.

In: CacheEvents. Out: the chunks of each node in the view, and which nodes to ask for a listing. A
node numbers its frames (`seq`). If a frame is missing, the router forgets the node's chunks until
the node lists them. It does the same if events exceed EVENTS_PER_S, because handling more would
leave no time to serve requests. Frames without a number are always applied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from baton_protocol.ids import NodeId
from baton_protocol.link import CacheEvents
from baton_router.nodes.pool_view import PoolView

# A chunk event takes 0.7 us of the event loop, so this rate uses at most a seventh of its time.
EVENTS_PER_S = 200_000
# Nodes asked for a listing at once: a listing may hold as many chunks as a node's cache.
LISTINGS = 16

logger = logging.getLogger(__name__)


class KVEventListener:
    """Applies events to the view. `dropped` counts the chunk events that were not applied."""

    def __init__(
        self, view: PoolView, clock: Callable[[], float], events_per_s: int = EVENTS_PER_S
    ) -> None:
        self.dropped = 0
        self._view = view
        self._clock = clock
        self._per_s = events_per_s
        self._budget = float(events_per_s)  # chunk events it may apply now
        self._filled_at = clock()
        self._unlisted: dict[NodeId, None] = {}  # nodes to ask for a listing, oldest first
        self._requested: set[NodeId] = set()
        self._behind = False

    def apply_events(self, node: NodeId, frame: CacheEvents) -> None:
        size = len(frame.stored) + len(frame.evicted)
        self._refill()
        if frame.reset:
            self._unlisted.pop(node, None)
            self._requested.discard(node)
        elif node in self._unlisted or node in self._requested:
            self.dropped += size
            return
        elif frame.seq and size > self._budget:
            self._fall_behind()
            self._drop(node, size)
            return
        self._budget -= size
        if not self._view.cache(node, frame):
            logger.info(
                "cache events are missing; requesting a listing of the node's chunks",
                extra={"node": node},
            )
            self._drop(node, size)

    def next_listings(self) -> list[NodeId]:
        """The nodes to ask for a listing now; empty while less than half of the budget is free."""
        self._refill()
        if 2 * self._budget < self._per_s:
            return []
        self._behind = False
        requested = list(self._unlisted)[:LISTINGS]
        for node in requested:
            del self._unlisted[node]
        self._requested.update(requested)
        return requested

    def forget_node(self, node: NodeId) -> None:
        """The node or its link is gone. It lists its chunks when it comes back."""
        self._unlisted.pop(node, None)
        self._requested.discard(node)

    def _refill(self) -> None:
        now = self._clock()
        self._budget = min(self._per_s, self._budget + (now - self._filled_at) * self._per_s)
        self._filled_at = now

    def _drop(self, node: NodeId, size: int) -> None:
        self.dropped += size
        self._view.forget_chunks(node)
        self._unlisted[node] = None

    def _fall_behind(self) -> None:
        if not self._behind:
            logger.warning(
                "chunk events exceed %d a second; the router treats some nodes' caches as "
                "empty until they list their chunks",
                self._per_s,
            )
        self._behind = True

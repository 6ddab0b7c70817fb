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
        self._room = float(events_per_s)  # chunk events it may apply now
        self._filled_at = clock()
        self._unheard: dict[NodeId, None] = {}  # nodes to ask for a listing, oldest first
        self._asked: set[NodeId] = set()
        self._behind = False

    def heard(self, node: NodeId, frame: CacheEvents) -> None:
        size = len(frame.stored) + len(frame.evicted)
        self._fill()
        if frame.reset:
            self._unheard.pop(node, None)
            self._asked.discard(node)
        elif node in self._unheard or node in self._asked:
            self.dropped += size
            return
        elif frame.seq and size > self._room:
            self._fall_behind()
            self._miss(node, size)
            return
        self._room -= size
        if not self._view.cache(node, frame):
            logger.info("cache events are missing: it is to list its chunks", extra={"node": node})
            self._miss(node, size)

    def to_ask(self) -> list[NodeId]:
        """The nodes to ask for a listing now; empty while less than half of the budget is free."""
        self._fill()
        if 2 * self._room < self._per_s:
            return []
        self._behind = False
        asked = list(self._unheard)[:LISTINGS]
        for node in asked:
            del self._unheard[node]
        self._asked.update(asked)
        return asked

    def forget(self, node: NodeId) -> None:
        """The node or its link is gone. It lists its chunks when it comes back."""
        self._unheard.pop(node, None)
        self._asked.discard(node)

    def _fill(self) -> None:
        now = self._clock()
        self._room = min(self._per_s, self._room + (now - self._filled_at) * self._per_s)
        self._filled_at = now

    def _miss(self, node: NodeId, size: int) -> None:
        self.dropped += size
        self._view.forget_chunks(node)
        self._unheard[node] = None

    def _fall_behind(self) -> None:
        if not self._behind:
            logger.warning(
                "chunk events come faster than %d a second: some nodes' caches are taken for empty"
                " until there is time for them to list what they hold",
                self._per_s,
            )
        self._behind = True

"""Takes the nodes' cache events into the view, as fast as a router may, and has them listed anew
where some are missing.

In: CacheEvents. Out: the view knows the nodes' chunks; which nodes to ask for a listing. A node
counts its frames (`seq`): where one is missing, all that was believed of its chunks is forgotten
until it lists them. So it is, too, where events come faster than EVENTS_PER_S: a loop that did
nothing but listen would serve nobody. Nodes that do not count are always heard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from baton_protocol.ids import NodeId
from baton_protocol.link import CacheEvents
from baton_router.nodes.pool_view import PoolView

# A chunk event costs 0.7 us of the loop: all of them leave it four fifths of its time and more.
EVENTS_PER_S = 200_000
# Nodes asked at a time: a listing may have as many chunks as a node's cache.
LISTINGS = 16

logger = logging.getLogger(__name__)


class KVEventListener:
    """`dropped` counts chunk events that were not taken."""

    def __init__(
        self, view: PoolView, clock: Callable[[], float], events_per_s: int = EVENTS_PER_S
    ) -> None:
        self.dropped = 0
        self._view = view
        self._clock = clock
        self._per_s = events_per_s
        self._room = float(events_per_s)  # of a second's worth
        self._filled_at = clock()
        self._unheard: dict[NodeId, None] = {}  # in the order in which they are asked
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
        """The nodes whose turn it is to list their chunks; none while there is no room for it."""
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
        """It is gone, or its link is: it lists its chunks when it comes back."""
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

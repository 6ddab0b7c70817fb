"""Whether a node takes work, and from when on what still runs there is to go elsewhere.

In: the words of routers, and the signal that ends the process. Out: what hellos and loads say of
it, and Drain and Undrain for the engine. Lives in the server's event loop.

    ready --drain--> draining --deadline--> its chunks are put --saved--> leaving
      ^                 |                                                    |
      `-----resume------+----------------------------------------------------'

A node that drains because it ends stays so, and an earlier deadline than its own still stands.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton_node.ipc.messages import Drain, ToEngine, Undrain
from baton_protocol.link import DrainNode
from baton_protocol.store import NodeState

logger = logging.getLogger(__name__)
ENDS = "the node was told to end"


@dataclass(frozen=True, slots=True)
class EndWaits:
    """How long a node that drains waits, at most, past the deadline of its requests."""

    # For the store to have the chunks of what runs: a store that is away must not keep a node from
    # ending.
    save_s: float = 2.0
    # For routers to move their requests. They do it as soon as they hear that the node is leaving:
    # in some 10 ms, or 1 s later where a router reads one body of 16 MB. Requests that no other
    # node can take run on here meanwhile.
    move_s: float = 2.0
    # For the puts that are still on their way into the store, once nothing runs here.
    publish_s: float = 2.0


class Draining:
    """`tell` gives a frame to the engine, `changed` is called when there is news for routers.
    `limit_s` is how long requests may stay where nobody says it, `save_s` that of EndWaits."""

    def __init__(
        self,
        tell: Callable[[ToEngine], None],
        changed: Callable[[], None],
        limit_s: float,
        save_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._changed = changed
        self._limit_s = limit_s
        self._save_s = save_s
        self._clock = clock
        self._words: DrainNode | None = None
        self._until = 0.0
        self._due = False
        self._ending = False
        self._timer: asyncio.TimerHandle | None = None
        self.state: NodeState = "ready"
        self.reason = ""
        self.replaced_by = ""
        self.leaving = False

    def drain(self, words: DrainNode) -> None:
        """A router says so. The same words again are no news."""
        if self._ending or words == self._words:
            return
        self._words = words
        limit_s = self._limit_s if words.deadline_s is None else words.deadline_s
        self.replaced_by = words.replaced_by
        self._begin(self._clock() + limit_s, words.reason)

    def end(self) -> None:
        """The process ends."""
        until = self._clock() + self._limit_s
        if self.state == "draining":
            until = min(until, self._until)
        self._ending = True
        self._begin(until, self.reason or ENDS)

    def resume(self) -> None:
        """A router says so."""
        if self._ending or self.state == "ready":
            return
        self._cancel()
        self._words, self._due = None, False
        self.state, self.leaving = "ready", False
        self.reason = self.replaced_by = ""
        self._tell(Undrain())
        logger.info("takes requests again")
        self._changed()

    def saved(self) -> None:
        """The chunks that running requests had at the last Drain are in the store."""
        if self._due and not self.leaving:
            self._leave()

    def close(self) -> None:
        self._cancel()

    def _begin(self, until: float, reason: str) -> None:
        left = max(0.0, until - self._clock())
        self._cancel()
        self._until, self._due = until, False
        self.state, self.reason, self.leaving = "draining", reason, self.leaving and left <= 0
        self._tell(Drain())  # at once: a request that has to move finds what it had
        logger.info("drains (%s): what runs may end here for %.1f s", reason or "no reason", left)
        self._changed()
        self._timer = asyncio.get_running_loop().call_later(left, self._deadline)

    def _deadline(self) -> None:
        self._due = True
        self._tell(Drain())
        self._timer = asyncio.get_running_loop().call_later(self._save_s, self._leave)

    def _leave(self) -> None:
        self._cancel()
        self.leaving = True
        self._changed()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

"""The node's drain state: whether it accepts jobs, and when routers must move running requests.

In: drain and resume frames from routers, and the shutdown of the process. Out: the state for Hello
and Load frames, and Drain and Undrain for the engine. Belongs to the server's event loop.

    ready --drain--> draining --deadline--> putting chunks --saved or timeout--> leaving
      ^                 |                        |                                  |
      `-----resume------+------------------------+----------------------------------'

A node that goes to sleep drains, too, until it has woken up. A router's drain outlasts that sleep.
Shutdown cannot be resumed. It keeps the deadline of an earlier drain if that is sooner.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton_node.ipc.messages import Drain, ToEngine, Undrain
from baton_protocol.link import DrainNode
from baton_protocol.store import NodeState

logger = logging.getLogger(__name__)
ENDS = "the node is shutting down"
SLEEPS = "the node sleeps"


@dataclass(frozen=True, slots=True)
class EndWaits:
    """The longest waits of a node that shuts down or goes to sleep, after the drain deadline. In
    seconds."""

    # For the chunks of running requests to reach the store. A store that is down must not stop the
    # shutdown.
    save_s: float = 2.0
    # For routers to move their requests. A router does so about 10 ms after it hears that the node
    # is leaving, or 1 s later while it parses a body of 16 MB. Requests that no other node can take
    # continue here meanwhile.
    move_s: float = 2.0
    # For puts that are still in flight after the last request has left.
    publish_s: float = 2.0
    # For an engine without requests to settle its transfers and give its memory back.
    sleep_s: float = 30.0


class Draining:
    """The drain state of one node.

    `send` sends a frame to the engine. `changed` is called when the state for routers changes.
    `limit_s` is the time that running requests get if a router sets no deadline, and on shutdown.
    `save_s` is as in EndWaits.
    """

    def __init__(
        self,
        send: Callable[[ToEngine], None],
        changed: Callable[[], None],
        limit_s: float,
        save_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._changed = changed
        self._limit_s = limit_s
        self._save_s = save_s
        self._clock = clock
        self._frame: DrainNode | None = None
        self._until = 0.0
        self._due = False
        self._ending = False
        self._sleeps = False
        self._timer: asyncio.TimerHandle | None = None
        self.state: NodeState = "ready"
        self.reason = ""
        self.replaced_by = ""
        self.leaving = False

    def begin_drain(self, frame: DrainNode) -> None:
        """Drain, as a router asks. Idempotent for equal frames; ignored during shutdown."""
        if self._ending or frame == self._frame:
            return
        self._frame = frame
        limit_s = self._limit_s if frame.deadline_s is None else frame.deadline_s
        self.replaced_by = frame.replaced_by
        self._begin(self._clock() + limit_s, frame.reason)

    def begin_shutdown(self, reason: str = ENDS) -> None:
        """Drain because the process, or its engine, ends."""
        until = self._clock() + self._limit_s
        if self.state == "draining":
            until = min(until, self._until)
        self._ending = True
        self._begin(until, self.reason or reason)

    def begin_sleep(self, *, waits: bool = False) -> None:
        """Drain because the engine goes to sleep. `waits`: until requests have ended, however long
        that takes."""
        self._sleeps = True
        if self.state == "ready":
            self._begin(math.inf if waits else self._clock() + self._limit_s, SLEEPS)

    def end_sleep(self) -> None:
        """Accept jobs again, unless a router has asked for a drain."""
        self._sleeps = False
        if self._frame is None:
            self._resume()

    def end_drain(self) -> None:
        """Accept jobs again, as a router asks. Ignored during shutdown; a node that sleeps takes
        none before it has woken up."""
        self._frame = None
        if not self._sleeps:
            self._resume()
        elif not self._ending:
            self.reason, self.replaced_by = SLEEPS, ""
            self._changed()

    def _resume(self) -> None:
        if self._ending or self.state == "ready":
            return
        self.cancel_timer()
        self._due = False
        self.state, self.leaving = "ready", False
        self.reason = self.replaced_by = ""
        self._send(Undrain())
        logger.info("taking requests again")
        self._changed()

    @property
    def is_asked(self) -> bool:
        """Whether a router has asked for a drain, or the process ends."""
        return self._frame is not None or self._ending

    def note_saved(self) -> None:
        """The engine answered a Drain: the store has stored or refused the chunks of running
        requests."""
        if self._due and not self.leaving:
            self._leave()

    def _begin(self, until: float, reason: str) -> None:
        left = max(0.0, until - self._clock())
        self.cancel_timer()
        self._until, self._due = until, False
        self.state, self.reason, self.leaving = "draining", reason, self.leaving and left <= 0
        self._send(Drain())  # now, so that a request that moves finds its KV in the store
        logger.info(
            "draining (%s): running requests may finish here for %.1f s",
            reason or "no reason",
            left,
        )
        self._changed()
        if left < math.inf:
            self._timer = asyncio.get_running_loop().call_later(left, self._deadline)

    def _deadline(self) -> None:
        self._due = True
        self._send(Drain())
        self._timer = asyncio.get_running_loop().call_later(self._save_s, self._leave)

    def _leave(self) -> None:
        self.cancel_timer()
        self.leaving = True
        self._changed()

    def cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

"""Sleep and wake-up of a node: it drains, and then its engine gives its memory back.

In: calls from the admin routes, and the engine's answers. Out: Sleep and WakeUp for the engine; the
drain state; an error if requests stay here, or if the engine does not obey. Belongs to the server's
event loop.

A node that a person puts to sleep stays asleep until that person wakes it. One that sleeps because
its pool is idle `wakes`: a router tells it as soon as a request waits. Such a sleep is refused to a
node that was in use a moment ago, so a router that does not know of a request yet does no harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from baton_engine.interface import PARTS, Part, SleepLevel
from baton_node.ipc.messages import Sleep, Slept, ToEngine, WakeUp
from baton_node.server.draining import Draining
from baton_protocol.node_sleep import NodeSleepMode

logger = logging.getLogger(__name__)


class SleepRefusedError(Exception):
    """The node is as before: awake, or asleep as it was. The message is one line."""


class WeightsChangedError(Exception):
    """The model's folder has other weights than when the node went to sleep."""


class NodeRequests(Protocol):
    """What a sleep needs to know of the node's requests."""

    def idle_s(self) -> float:
        """Seconds since the node was last in use."""
        ...

    def note_use(self) -> None: ...

    def hand_back(self) -> None:
        """Return all requests to their routers."""
        ...

    async def leave(self) -> bool:
        """Wait until no request is here; False if they stay for too long."""
        ...


class Sleeping:
    """`changed` is called when the parts that are away change. `sleep_s` is how long the engine may
    take to settle its transfers and to give its memory back, `wake_s` to take it again.

    `away` are the parts that the engine has given back. `wakes`: it sleeps, or is about to, until a
    router needs it."""

    def __init__(
        self,
        send: Callable[[ToEngine], None],
        draining: Draining,
        requests: NodeRequests,
        changed: Callable[[], None],
        *,
        sleep_s: float,
        wake_s: float,
    ) -> None:
        self._send = send
        self._draining = draining
        self._requests = requests
        self._changed = changed
        self._sleep_s = sleep_s
        self._wake_s = wake_s
        self._one_at_a_time = asyncio.Lock()
        self._answers: asyncio.Queue[Slept] = asyncio.Queue()
        self.away: tuple[Part, ...] = ()
        self.wakes = False

    def take_answer(self, frame: Slept) -> None:
        self.away = frame.away
        self._answers.put_nowait(frame)
        self._changed()

    async def sleep(
        self, level: SleepLevel, mode: NodeSleepMode = "move", idle_s: float | None = None
    ) -> None:
        """Drain, and then sleep. With `idle_s` only if the node was idle for that time, and
        until a router needs it; without effect on a node that sleeps. Raises SleepRefusedError."""
        async with self._one_at_a_time:
            if idle_s is not None and self.away:
                return
            if idle_s is not None and (idle := self._requests.idle_s()) < idle_s:
                raise SleepRefusedError(f"the node was in use {idle:.1f} s ago")
            self.wakes = idle_s is not None
            self._draining.begin_sleep(waits=mode == "wait")
            try:
                if mode == "abort":
                    self._requests.hand_back()
                if not await self._requests.leave():
                    raise SleepRefusedError(
                        "requests are still here: they take longer than --drain-timeout, and no"
                        " other node can take them"
                    )
                await self._ask(Sleep(level), self._sleep_s)
                logger.info("asleep at level %d", level)
            finally:
                if not self.away:
                    self._end()

    async def wake_up(self, parts: tuple[Part, ...] = PARTS) -> None:
        """Restore these parts; accept requests if none is away then. Raises SleepRefusedError and
        WeightsChangedError."""
        async with self._one_at_a_time:
            if not self.away:
                return
            answer = await self._ask(WakeUp(parts), self._wake_s)
            if answer.changed:
                raise WeightsChangedError
            if not self.away:
                self._end()

    def _end(self) -> None:
        self.wakes = False
        self._requests.note_use()
        self._draining.end_sleep()

    async def _ask(self, frame: Sleep | WakeUp, limit_s: float) -> Slept:
        with suppress(asyncio.QueueEmpty):  # answers that came too late
            while True:
                self._answers.get_nowait()
        self._send(frame)
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._answers.get()
        except TimeoutError:
            self._send(WakeUp(()))  # forgets the Sleep
            raise SleepRefusedError(f"the engine has not obeyed within {limit_s:g} s") from None
        if answer.error:
            raise SleepRefusedError(answer.error)
        return answer

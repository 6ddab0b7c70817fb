"""Calls take turns on the event loop, one per pass.

When many calls arrive at one moment, each has a prompt to tokenize and to place. Without turns the
loop would do all of that before it sends the first job, and before it passes on tokens of others.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """In: calls that are about to do their work. Out: the first of a pass goes on at once, the
    others in the order of their arrival, one per pass of the loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False  # in this pass, or by a call that wakes in the next one

    async def take(self) -> None:
        loop = asyncio.get_running_loop()
        if self._taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._taken = True
            loop.call_soon(self._pass_on, loop)

    def _pass_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the next call that still waits; its turn is in the next pass."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its client may have left
                turn.set_result(None)
                loop.call_soon(self._pass_on, loop)
                return
        self._taken = False

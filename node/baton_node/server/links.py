"""WebSocket links to routers: each has a bounded queue and a task that writes it.

In: frames for one router or all. Out: bytes on the wire, in order. A router that reads so slowly
that its queue would pass the bound loses its link: it can always connect anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable

from aiohttp import WSCloseCode, web

from baton_protocol.link import ToRouter, to_router_codec

logger = logging.getLogger(__name__)
MAX_QUEUED_BYTES = 64 << 20
CLOSE_S = 2.0


class RouterLink:
    """One router's connection. `router` is what that router says of itself with each of them (see
    `baton_protocol.link.link_headers`); a secret, and never logged."""

    def __init__(self, socket: web.WebSocketResponse, peer: str, router: str = "") -> None:
        self.peer = peer
        self.router = router
        self._socket = socket
        self._codec = to_router_codec()
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._filled = asyncio.Event()
        self._lost = False

    @property
    def open(self) -> bool:
        return not self._lost and not self._socket.closed

    def send(self, record: ToRouter) -> None:
        """Queue a frame; frames for a lost link are dropped."""
        self.send_bytes(self._codec.encode(record))

    def send_bytes(self, data: bytes) -> None:
        if self._lost:
            return
        self._queue.append(data)
        self._queued += len(data)
        self._filled.set()
        if self._queued > MAX_QUEUED_BYTES:
            logger.error("router %s does not read: its link is closed", self.peer)
            self.lose()

    def lose(self) -> None:
        """Drop what is queued and end write()."""
        self._lost = True
        self._queue.clear()
        self._filled.set()

    async def write(self) -> None:
        """Send what is queued until the link is lost; run as a task."""
        try:
            while not self._lost:
                await self._filled.wait()
                self._filled.clear()
                while self._queue:
                    data = self._queue.popleft()
                    self._queued -= len(data)
                    await self._socket.send_bytes(data)
        except ConnectionError as error:
            logger.info("link to %s broke: %s", self.peer, error)
        self.lose()
        await self.close(WSCloseCode.TRY_AGAIN_LATER)

    async def flush(self) -> None:
        """Wait until all that is queued was handed to the socket, for a bounded time."""
        until = asyncio.get_running_loop().time() + CLOSE_S
        while self._queue and not self._lost and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.005)

    async def close(self, code: WSCloseCode = WSCloseCode.GOING_AWAY) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close(code=code)
        except TimeoutError:
            logger.info("link to %s did not close in time", self.peer)


def broadcast(links: Iterable[RouterLink], record: ToRouter) -> None:
    """One frame to all, encoded once."""
    data = to_router_codec().encode(record)
    for link in links:
        link.send_bytes(data)

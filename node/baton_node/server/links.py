"""WebSocket links to routers. Each has a bounded queue and a task that sends it.

In: frames for one router or for all. Out: bytes on the wire, in order. Deltas that wait together,
as those of several steps do if the engine is faster than this process, become one frame, unless
they have log-probabilities, which can be large. If a router reads so slowly that its queue exceeds
the bound, its link is closed; the router can reconnect.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable

from aiohttp import WSCloseCode, web

from baton_protocol.link import Delta, Deltas, ToRouter, to_router_codec

logger = logging.getLogger(__name__)
MAX_QUEUED_BYTES = 64 << 20
MAX_FRAME_DELTAS = 1024  # 0.1 MB; deltas count as queued once they are a frame
CLOSE_S = 2.0


class RouterLink:
    """One router's connection. `peer` is its address, for the log. `router` is the secret that
    identifies the router on all its links (see `baton_protocol.link.link_headers`); it must not be
    logged."""

    def __init__(self, socket: web.WebSocketResponse, peer: str, router: str = "") -> None:
        self.peer = peer
        self.router = router
        self._socket = socket
        self._codec = to_router_codec()
        self._queue: deque[bytes] = deque()
        self._deltas: list[Delta] = []  # the next frame, after those in the queue
        self._queued = 0
        self._filled = asyncio.Event()
        self._lost = False

    @property
    def open(self) -> bool:
        return not self._lost and not self._socket.closed

    def send(self, record: ToRouter) -> None:
        """Queue a frame. Drop it if the link is lost."""
        if not isinstance(record, Deltas) or any(map(_has_logprobs, record.items)):
            self.send_bytes(self._codec.encode(record))
        elif not self._lost:
            self._deltas += record.items
            self._filled.set()
            if len(self._deltas) > MAX_FRAME_DELTAS:
                self._end_frame()

    def send_bytes(self, data: bytes) -> None:
        """Queue an encoded frame."""
        self._end_frame()
        self._enqueue(data)

    def lose(self) -> None:
        """Drop the queued frames and end write()."""
        self._lost = True
        self._queue.clear()
        self._deltas.clear()
        self._filled.set()

    async def write(self) -> None:
        """Send queued frames until the link is lost, then close the socket. Run as a task."""
        try:
            while not self._lost:
                await self._filled.wait()
                self._filled.clear()
                self._end_frame()
                while self._queue:
                    data = self._queue.popleft()
                    self._queued -= len(data)
                    await self._socket.send_bytes(data)
        except ConnectionError as error:
            logger.info("link to %s broke: %s", self.peer, error)
        self.lose()
        await self.close(WSCloseCode.TRY_AGAIN_LATER)

    async def flush(self) -> None:
        """Wait until all queued frames have been passed to the socket, at most CLOSE_S."""
        until = asyncio.get_running_loop().time() + CLOSE_S
        while (self._queue or self._deltas) and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.005)

    def _end_frame(self) -> None:
        """Queue the frame of the deltas so far: none may overtake it."""
        if self._deltas:
            frame, self._deltas = Deltas(tuple(self._deltas)), []
            self._enqueue(self._codec.encode(frame))

    def _enqueue(self, data: bytes) -> None:
        if self._lost:
            return
        self._queue.append(data)
        self._queued += len(data)
        self._filled.set()
        if self._queued > MAX_QUEUED_BYTES:
            logger.error("closing the link to router %s, which does not read", self.peer)
            self.lose()

    async def close(self, code: WSCloseCode = WSCloseCode.GOING_AWAY) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close(code=code)
        except TimeoutError:
            logger.info("link to %s did not close in time", self.peer)


def _has_logprobs(delta: Delta) -> bool:
    return bool(delta.logprobs or delta.prompt_logprobs)


def broadcast(links: Iterable[RouterLink], record: ToRouter) -> None:
    """Send one frame to all links; encode it once."""
    data = to_router_codec().encode(record)
    for link in links:
        link.send_bytes(data)

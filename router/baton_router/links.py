"""One WebSocket per node, kept open: the router's only truth about a node.

In: frames for the node (send() never waits, so that a decision, its booking and its jobs are one
act). Out: the listener hears hello, each later frame, and the loss. A link that breaks is dialled
again with growing pauses until it is closed. Aborts that a broken link could not carry are sent
when it is back, if the node is still the same epoch: they free its blocks.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

import aiohttp

from baton_protocol.link import Abort, Hello, ToNode, ToRouter, to_node_codec, to_router_codec
from baton_protocol.store import NodeReport
from baton_protocol.wire import WireError

HELLO_WAIT_S = 5.0
# aiohttp pings after this much silence and gives the peer half of it to answer.
HEARTBEAT_S = 6.0
FIRST_PAUSE_S = 0.05
KEPT_ABORTS = 4096
LINK_PATH = "/link"

logger = logging.getLogger(__name__)


class LinkListener(Protocol):
    def on_hello(self, link: Link, report: NodeReport) -> bool:
        """False refuses the link: another one to this node is up already."""
        ...

    def on_frame(self, link: Link, frame: ToRouter) -> None: ...

    def on_lost(self, link: Link) -> None: ...


class Link:
    """The link to one address. `report` is the last hello's."""

    def __init__(
        self,
        address: str,
        session: aiohttp.ClientSession,
        listener: LinkListener,
        *,
        pause_max_s: float,
        rng: random.Random,
    ) -> None:
        self.address = address.rstrip("/")
        self.report: NodeReport | None = None
        self.up = False
        self._session = session
        self._listener = listener
        self._pause_max_s = pause_max_s
        self._rng = rng
        self._encoder = to_node_codec()
        self._decoder = to_router_codec()
        self._outgoing: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._kept: deque[Abort] = deque(maxlen=KEPT_ABORTS)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link {self.address}")

    async def close(self) -> None:
        """Stop dialling and drop the connection; the listener hears the loss."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def send(self, frame: ToNode) -> None:
        """Queue a frame. On a broken link aborts wait for its return and all else is dropped: the
        listener has heard of the loss and decided what becomes of those requests."""
        if self.up:
            self._outgoing.append(self._encoder.encode(frame))
            self._wake.set()
        elif isinstance(frame, Abort):
            self._kept.append(frame)

    @property
    def idle(self) -> bool:
        """Nothing is waiting to be written."""
        return not self._outgoing

    async def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            try:
                if await self._connect():
                    pause = FIRST_PAUSE_S
            except (aiohttp.ClientError, OSError, TimeoutError, WireError) as error:
                level = logging.DEBUG if self.report is None else logging.INFO
                logger.log(level, "no link to %s: %s", self.address, error or type(error).__name__)
            except Exception:
                logger.exception("the link to %s failed", self.address)
            await asyncio.sleep(pause * self._rng.uniform(0.5, 1.0))
            pause = min(pause * 2, self._pause_max_s)

    async def _connect(self) -> bool:
        """One connection's life; whether it got as far as a hello that was not refused."""
        async with self._session.ws_connect(
            self.address + LINK_PATH, heartbeat=HEARTBEAT_S, max_msg_size=0, compress=0
        ) as socket:
            first = await socket.receive(timeout=HELLO_WAIT_S)
            hello = self._decode(first)
            if not isinstance(hello, Hello):
                raise WireError(f"the first frame of {self.address} is no hello")
            self._arrive(hello.report)
            if not self._listener.on_hello(self, hello.report):
                return False
            self.up = True
            for abort in self._kept:
                self.send(abort)
            self._kept.clear()
            writer = asyncio.create_task(self._write(socket))
            try:
                async for message in socket:
                    frame = self._decode(message)
                    if frame is not None:
                        self._listener.on_frame(self, frame)
            finally:
                self.up = False
                self._outgoing.clear()
                writer.cancel()
                self._listener.on_lost(self)
                await asyncio.gather(writer, return_exceptions=True)
            return True

    def _arrive(self, report: NodeReport) -> None:
        if self.report is not None and self.report.epoch != report.epoch:
            self._kept.clear()  # the old engine took its requests with it
        self.report = report

    def _decode(self, message: aiohttp.WSMessage) -> ToRouter | None:
        """None for a frame this version does not know; the peer may be newer."""
        if message.type is not aiohttp.WSMsgType.BINARY:
            raise WireError(f"{self.address} sent {message.type.name} where frames were due")
        try:
            return self._decoder.decode(message.data)
        except WireError as error:
            logger.warning("a frame of %s was skipped: %s", self.address, error)
            return None

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outgoing:
                try:
                    await socket.send_bytes(self._outgoing.popleft())
                except (aiohttp.ClientError, OSError):
                    return  # the reader sees the same loss and reports it


class LinkTable:
    """Links by address, from discovery; at most one link stands for a node."""

    def __init__(self, dial: Callable[[str], Link]) -> None:
        self._dial = dial
        self.links: dict[str, Link] = {}

    def ensure(self, address: str) -> None:
        address = address.rstrip("/")
        if address not in self.links:
            link = self._dial(address)
            self.links[address] = link
            link.start()

    async def remove(self, address: str) -> None:
        link = self.links.pop(address, None)
        if link is not None:
            await link.close()

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self.links.values()))
        self.links.clear()

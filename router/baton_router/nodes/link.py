"""One WebSocket per node, kept open: the router's only source of truth about the node.

In: frames for the node. send_frame() does not wait, so a decision, its booking and its jobs happen
without an await. Out: the listener gets the hello, each later frame, a break, and a refused
connection. A broken link is dialled again at once, then with growing pauses, until it is closed.

A node that misses MISSED_PINGS pings in a row is silent: frozen, or cut off without a close. Any
frame from it counts as an answer. A ping that this process itself handled late does not count.

Input is bounded. A frame that is too large, or whose part about requests cannot be decoded, ends
the link and the node is lost at once, because it would send the same again. A figure out of bounds
costs no token: the frame's part about requests is used, and the router keeps the node's last known
state.

Output is bounded. If more than `max_unsent_bytes` wait and the number does not shrink, the link
counts as broken, and a new one resynchronises both sides. A node that reads may exceed the limit,
for instance when all its jobs are sent again. Nodes treat routers the same way
(`baton_node.server.links`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Protocol

import aiohttp
from aiohttp import WSCloseCode, WSMsgType

from baton_protocol.link import (
    LINK_PATH,
    MAX_FRAME_BYTES,
    Hello,
    ToNode,
    ToRouter,
    rescued,
    to_node_codec,
    to_router_codec,
)
from baton_protocol.store import NodeReport
from baton_protocol.wire import WireError
from baton_router.settings import Tunables

HELLO_WAIT_S = 10.0  # to connect, and then to receive the hello
MISSED_PINGS = 3
LATE_S = 0.5
CLOSE_S = 0.5
FIRST_PAUSE_S = 0.05
NOT_OUR_TOKEN = "the node refuses this router's link token (401); give both the same --link-token"
STEADY_S = 1.0  # after a link of this length, dial again without a pause
Flaw = Literal["unreadable", "too_large"]
# Why a node is lost: its link does not come back, it misses its pings, its engine makes no step, or
# another engine takes its name.
Loss = Literal["link", "pings", "stalled", "restarted"]
logger = logging.getLogger(__name__)


class LinkViolation(WireError):
    """The node sent a frame after which the link cannot continue."""


class LinkListener(Protocol):
    def on_hello(self, link: NodeLink, report: NodeReport) -> bool:
        """Return False to refuse the link: the node has another link, or `link.rival` is set."""
        ...

    def on_up(self, link: NodeLink) -> None:
        """The link accepts frames now."""
        ...

    def on_frame(self, link: NodeLink, frame: ToRouter) -> None: ...

    def on_broken(self, link: NodeLink, *, silent: bool) -> None:
        """The link was up and is down now. `silent`: the node did not answer pings."""
        ...

    def on_refused(self, link: NodeLink) -> None:
        """The address refuses connections, or its node broke the protocol: do not wait for it."""
        ...

    def on_bad_frame(self, link: NodeLink, flaw: Flaw, why: str) -> None:
        """The node sent a frame that cannot be used. Called for each such frame."""
        ...


class NodeLink:
    """The link to one address.

    `report` is the last hello's. `heard_at` is when the node last sent anything (by the clock).
    `trouble` says why the last connection failed. `rival` is set while the node answers but is not
    used: it is the address of a newer node of the same name."""

    def __init__(
        self,
        address: str,
        session: aiohttp.ClientSession,
        listener: LinkListener,
        *,
        pause_max_s: float,
        rng: random.Random,
        tunables: Tunables,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address.rstrip("/")
        self.report: NodeReport | None = None
        self.up = False
        self.trouble = ""
        self.rival = ""
        self._session = session
        self._listener = listener
        self._pause_max_s = pause_max_s
        self._rng = rng
        self._clock = clock
        self._tunables = tunables
        self._encoder = to_node_codec()
        self._decoder = to_router_codec()
        self._outgoing: deque[bytes] = deque()
        self._unsent = 0  # bytes in `_outgoing`
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self._dropped = asyncio.Event()
        self._received = 0
        self.heard_at = 0.0
        self._logged_down = True  # log a failure once per break, and not before the first hello
        self._task: asyncio.Task[None] | None = None

    def start_dialling(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link {self.address}")

    async def close_link(self) -> None:
        """Stop dialling and drop the connection; the listener gets on_broken()."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def send_frame(self, frame: ToNode) -> None:
        """Queue a frame. A link that is down drops it; the listener resends what is needed."""
        if not self.up:
            return
        data = self._encoder.encode(frame)
        self._outgoing.append(data)
        self._unsent += len(data)
        self._wake.set()
        if self._unsent > self._tunables.max_unsent_bytes:
            self._full.set()

    def drop_connection(self) -> None:
        """End the connection, if any; the link dials again."""
        self._dropped.set()

    @property
    def due_at(self) -> float:
        """Until this time (by the clock) the node is not overdue with an answer."""
        return self.heard_at + self._tunables.ping_s

    @property
    def idle(self) -> bool:
        """True if no frame waits to be written."""
        return not self._outgoing

    # --- one connection after another -------------------------------------------------------------

    async def _run(self) -> None:
        pause = 0.0
        while True:
            await asyncio.sleep(pause * self._rng.uniform(0.5, 1.0))
            pause = min(max(pause * 2, FIRST_PAUSE_S), self._pause_max_s)
            began = self._clock()
            try:
                if await self._connect() and self._clock() - began > STEADY_S:
                    pause = 0.0
            except (aiohttp.ClientError, OSError, TimeoutError, WireError) as error:
                self._failed(error)
                if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
                    self._listener.on_refused(self)
            except Exception:
                logger.exception("the link to %s failed", self.address)

    def _failed(self, error: Exception) -> None:
        """Log the failure: once per break at INFO, and a refused token as a warning."""
        self.rival = ""
        previous, self.trouble = self.trouble, str(error) or type(error).__name__
        level, self._logged_down = logging.DEBUG if self._logged_down else logging.INFO, True
        if isinstance(error, aiohttp.WSServerHandshakeError) and error.status == 401:
            self.trouble = NOT_OUR_TOKEN
            level = logging.DEBUG if previous == NOT_OUR_TOKEN else logging.WARNING
        logger.log(level, "no link to %s: %s", self.address, self.trouble)

    async def _connect(self) -> bool:
        """Serve one connection. Return whether its hello was accepted."""
        async with asyncio.timeout(HELLO_WAIT_S):
            socket = await self._session.ws_connect(
                self.address + LINK_PATH,
                autoping=False,
                max_msg_size=MAX_FRAME_BYTES,
                compress=0,
            )
        try:
            async with asyncio.timeout(HELLO_WAIT_S):
                hello = self._decode(await socket.receive())
            if not isinstance(hello, Hello):
                raise WireError(f"the first frame of {self.address} is not a readable hello")
            self.report = hello.report
            if not self._listener.on_hello(self, hello.report):
                return False
            await self._serve(socket)
            return True
        finally:
            await _close(socket)

    async def _serve(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Serve the connection until either side ends it or the node falls silent."""
        self.up, self.trouble, self._logged_down, self.heard_at = True, "", False, self._clock()
        self._full.clear()
        self._dropped.clear()
        loops = (self._until_silent(socket), self._read(socket), self._write(socket))
        watches = (self._until_choked(), self._until_dropped())
        tasks = [asyncio.create_task(loop) for loop in (*loops, *watches)]
        silent = violated = False
        try:
            self._listener.on_up(self)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            silent = done == {tasks[0]} and tasks[0].exception() is None
            violated = any(isinstance(task.exception(), LinkViolation) for task in done)
        finally:
            self.up = False
            self._outgoing.clear()
            self._unsent = 0
            for task in tasks:
                task.cancel()
            self._listener.on_broken(self, silent=silent)
            if violated:
                self._listener.on_refused(self)
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            self._received += 1
            self.heard_at = self._clock()
            if message.type is WSMsgType.PING:
                await socket.pong(message.data)
            elif message.type is not WSMsgType.PONG:
                frame = self._decode(message)
                if frame is not None:
                    self._listener.on_frame(self, frame)

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outgoing:
                data = self._outgoing.popleft()
                self._unsent -= len(data)
                await socket.send_bytes(data)

    async def _until_choked(self) -> None:
        while True:
            await self._full.wait()
            self._full.clear()
            unsent_before = self._unsent
            await asyncio.sleep(self._tunables.choked_s)
            if self._unsent > self._tunables.max_unsent_bytes:
                if self._unsent >= unsent_before:
                    raise ConnectionError(
                        f"the node does not read: {self._unsent} bytes are unsent"
                    )
                self._full.set()

    async def _until_dropped(self) -> None:
        await self._dropped.wait()

    async def _until_silent(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        missed, ping_s = 0, self._tunables.ping_s
        while missed < MISSED_PINGS:
            received_before, due = self._received, self._clock() + ping_s
            with suppress(TimeoutError):  # a ping may wait behind unsent data
                async with asyncio.timeout(ping_s):
                    await socket.ping()
            await asyncio.sleep(due - self._clock())
            if self._received != received_before:
                missed = 0
            elif self._clock() - due < LATE_S:
                missed += 1

    def _decode(self, message: aiohttp.WSMessage) -> ToRouter | None:
        """Decode a frame; None if nothing in it can be used, as the node may be newer."""
        if message.type is WSMsgType.ERROR:
            code = getattr(message.data, "code", None)
            flaw: Flaw = "too_large" if code == WSCloseCode.MESSAGE_TOO_BIG else "unreadable"
            self._listener.on_bad_frame(self, flaw, str(message.data))
            raise LinkViolation(
                f"{self.address} sent a frame that the router refuses: {message.data}"
            )
        if message.type is not WSMsgType.BINARY:
            raise WireError(f"{self.address} sent {message.type.name} instead of a binary frame")
        try:
            return self._decoder.decode(message.data)
        except WireError as error:
            self._listener.on_bad_frame(self, "unreadable", str(error))
            try:
                return rescued(message.data)
            except WireError as lost:
                raise LinkViolation(f"{self.address} sent an {lost}") from lost


async def _close(socket: aiohttp.ClientWebSocketResponse) -> None:
    with suppress(TimeoutError):  # a frozen node does not answer a close
        async with asyncio.timeout(CLOSE_S):
            await socket.close()

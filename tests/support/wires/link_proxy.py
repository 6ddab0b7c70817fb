"""A TCP proxy between a node and one Redis server, which a test can slow, hold, cut or corrupt.

In: the server's URL. Out: a TCP URL for the node. The faults affect both directions unless stated:

    slow          limits the bytes per second of all connections together, in each direction
    hold          no bytes flow, and no connection is refused: a dead switch
    hold_at       holds the first matching command after a number of its bytes
    hold_replies  forwards a number of bytes of replies, and then none
    lossy         has a mishap about every `mean_bytes`: a cut, a stall, or one flipped bit
    cut           resets the open connections once
    refuse        resets the open connections, and also new ones

`mishaps` counts the mishaps, so a test can check that there were some. mend() ends all faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Literal

from baton_kvstore.connection.endpoint import parse_endpoint
from tests.support.wires.resp_commands import CommandSplitter, StreamPart
from tests.support.wires.wire import RESET, WireLoop

Mishap = Literal["cut", "stall", "flip"]
Direction = Literal["up", "down"]  # to the server, to the client
Fits = Callable[[tuple[bytes, ...]], bool]
PIECE_BYTES = 1 << 14


@dataclass(slots=True, eq=False)
class _Trap:
    """Holds the connection that sends a command for which `fits` is true, after `left` more bytes,
    until `open`. Without `fits` it holds all replies."""

    fits: Fits | None
    left: int
    caught: threading.Event
    open: bool = False


class _Loss:
    """Draws the distances between mishaps. The kinds take turns."""

    def __init__(
        self, mean_bytes: int, kinds: Sequence[Mishap], seed: object, stall_s: float
    ) -> None:
        self._rng = random.Random(str(seed))
        self._mean = mean_bytes
        self._kinds = cycle(kinds)
        self.stall_s = stall_s
        self._left = self._draw()

    def _draw(self) -> int:
        return 1 + int(self._rng.expovariate(1.0 / self._mean))

    def next(self, size: int) -> tuple[int, Mishap] | None:
        """Return the mishap in the next `size` bytes and the number of bytes before it, or None."""
        if self._left > size:
            self._left -= size
            return None
        after, self._left = self._left, self._draw()
        return after, next(self._kinds)

    def flipped(self, byte: int) -> int:
        return byte ^ 1 << self._rng.randrange(8)


class LinkProxy:
    """Forwards connections to `target`. Any thread may call its methods."""

    def __init__(self, loop: WireLoop, target: str) -> None:
        self._loop = loop
        self._target = parse_endpoint(target)
        self.mishaps: Counter[Mishap] = Counter()
        self.passed: Counter[Direction] = Counter()  # bytes
        self._tasks: set[asyncio.Task[None]] = set()
        self._rate = 0.0
        self._free_at: dict[Direction, float] = {"up": 0.0, "down": 0.0}
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False
        self._loss: _Loss | None = None
        self._traps: list[_Trap] = []  # traps whose command has not been sent yet
        self._set: list[_Trap] = []  # all traps, also those that hold a connection
        self._brake: _Trap | None = None
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listener.setblocking(False)
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        loop.call(lambda: loop.loop.add_reader(self._listener, self._accept))

    def slow(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s

    def hold(self) -> None:
        self._loop.call(self._flowing.clear)

    def hold_at(self, fits: Fits, after: int = 0) -> threading.Event:
        """Hold the first connection that sends a command for which `fits` is true, after `after`
        bytes of it. `fits` gets the command's name and first argument. The event is set when it
        holds."""
        trap = _Trap(fits, after, threading.Event())

        def act() -> None:
            self._traps.append(trap)
            self._set.append(trap)

        self._loop.call(act)
        return trap.caught

    def hold_replies(self, after: int) -> threading.Event:
        brake = _Trap(None, after, threading.Event())

        def act() -> None:
            self._brake = brake
            self._set.append(brake)

        self._loop.call(act)
        return brake.caught

    def cut(self) -> None:
        self._loop.call(self._reset)

    def refuse(self) -> None:
        def act() -> None:
            self._refusing = True
            self._reset()

        self._loop.call(act)

    def lossy(self, mean_bytes: int, *kinds: Mishap, seed: object, stall_s: float = 0.1) -> None:
        loss = _Loss(mean_bytes, kinds, seed, stall_s)
        self._loop.call(lambda: setattr(self, "_loss", loss))

    def mend(self) -> None:
        """End all faults. Held bytes are forwarded unchanged."""
        self._loop.call(self._mend)

    def close(self) -> None:
        def act() -> None:
            self._loop.loop.remove_reader(self._listener)
            self._listener.close()
            self._reset()

        self._loop.call(act)

    # --- in the loop's thread ---------------------------------------------------------------------

    def _mend(self) -> None:
        self._rate, self._refusing = 0.0, False
        self._loss = self._brake = None
        for trap in self._set:
            trap.open = True
        self._set.clear()
        self._traps.clear()
        self._flowing.set()

    def _reset(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            near, _ = self._listener.accept()
            near.setblocking(False)
            task = self._loop.loop.create_task(self._serve(near))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            # A task that is cancelled before its first step never reaches its own `finally`.
            task.add_done_callback(lambda _: near.close())

    async def _serve(self, near: socket.socket) -> None:
        """Serve one connection until either end closes it or it is reset."""
        far: socket.socket | None = None
        pumps: list[asyncio.Task[None]] = []
        try:
            if self._refusing:
                return
            far = await self._connect()
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            loop = asyncio.get_running_loop()
            pumps = [
                loop.create_task(self._pump(near, far, "up")),
                loop.create_task(self._pump(far, near, "down")),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # the server is down, and thus the link
        finally:
            for pump in pumps:
                pump.cancel()
            try:
                await asyncio.gather(*pumps, return_exceptions=True)
            finally:  # it may be cancelled a second time
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                near.close()
                if far is not None:
                    far.close()

    async def _connect(self) -> socket.socket:
        target = self._target
        place = target.path if target.kind == "unix" else (target.host, target.port)
        far = socket.socket(socket.AF_UNIX if target.kind == "unix" else socket.AF_INET)
        far.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(far, place)
        except BaseException:
            far.close()
            raise
        return far

    async def _pump(self, source: socket.socket, sink: socket.socket, way: Direction) -> None:
        loop, splitter = asyncio.get_running_loop(), CommandSplitter()
        held: _Trap | None = None
        while data := await loop.sock_recv(source, PIECE_BYTES):
            for piece in splitter.feed(data) if way == "up" else [StreamPart(data)]:
                held = self._triggered(piece.words) or held
                await self._pass(sink, piece.data, way, held if way == "up" else self._brake)

    def _triggered(self, words: tuple[bytes, ...] | None) -> _Trap | None:
        for trap in self._traps if words is not None else ():
            if trap.fits is not None and trap.fits(words or ()):
                self._traps.remove(trap)
                return trap
        return None

    async def _pass(
        self, sink: socket.socket, data: bytes, way: Direction, trap: _Trap | None
    ) -> None:
        if trap is not None and not trap.open:
            ahead, data = data[: trap.left], data[trap.left :]
            trap.left -= len(ahead)
            await self._send(sink, ahead, way)
            if data:
                trap.caught.set()
            while data and not trap.open:
                await asyncio.sleep(0.001)
        await self._send(sink, data, way)

    async def _send(self, sink: socket.socket, data: bytes, way: Direction) -> None:
        while data:
            await self._flowing.wait()
            mishap = self._loss.next(len(data)) if self._loss else None
            ahead = data if mishap is None else data[: mishap[0]]
            if mishap is not None and mishap[1] == "flip" and self._loss:
                ahead = ahead[:-1] + bytes([self._loss.flipped(ahead[-1])])
            await self._pace(len(ahead), way)
            await asyncio.get_running_loop().sock_sendall(sink, ahead)
            self.passed[way] += len(ahead)
            data = data[len(ahead) :]
            if mishap is not None:
                await self._have_mishap(mishap[1])

    async def _have_mishap(self, mishap: Mishap) -> None:
        self.mishaps[mishap] += 1
        if mishap == "cut":
            raise ConnectionResetError
        if mishap == "stall" and self._loss:
            await asyncio.sleep(self._loss.stall_s)

    async def _pace(self, size: int, way: Direction) -> None:
        if self._rate:
            now = time.monotonic()
            self._free_at[way] = max(now, self._free_at[way]) + size / self._rate
            await asyncio.sleep(self._free_at[way] - now)

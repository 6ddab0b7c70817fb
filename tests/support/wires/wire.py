"""A TCP proxy between the router and one node, which a test can hold, break or close.

In: the node's port. Out: a port for the router. Each frame is decoded and passed to `watch` before
it is forwarded. The watch may kill a process or cut this wire first, and the frame may then be
lost. So a fault hits exactly between two frames, on any machine.

    open      bytes flow
    held      no bytes flow, and no connection is refused: a partition, or a dead switch
    broken    connections are reset, also new ones as soon as they are accepted
    refused   connections are reset and new ones refused, as by a dead process
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeVar

from baton_cli.commands.up import reserve_port
from baton_protocol.link import ToNode, ToRouter, to_node_codec, to_router_codec
from baton_protocol.wire import Codec, WireError
from tests.support.wires.ws_frames import Piece, Splitter

T = TypeVar("T")
State = Literal["open", "held", "broken", "refused"]
READ_BYTES = 1 << 16
CALL_S = 120.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST


class Passing(NamedTuple):
    """A frame on its way from or to `node`."""

    node: str
    frame: ToNode | ToRouter


# Called in the loop's thread before a frame is forwarded. It may return a function, which is called
# after the frame was forwarded. A wire that is no longer open loses the frame.
Watch = Callable[[Passing], Callable[[], None] | None]


class WireLoop:
    """One thread with the event loop of all wires of a cluster."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="wires", daemon=True)
        self._thread.start()

    def call(self, act: Callable[[], T]) -> T:
        """Run `act` in the loop's thread and return its result. Callable from any thread."""
        if threading.current_thread() is self._thread:
            return act()

        async def run() -> T:
            return act()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(CALL_S)

    def close(self) -> None:
        async def cancel_tasks() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_tasks(), self.loop).result(CALL_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CALL_S)
        self.loop.close()


class Wire:
    """The wire between the router and `node`, which listens on the port `upstream`. Any thread may
    call its methods; the watch runs in the loop's thread. Without `answers`, the watch sees only
    the router's frames: decoding every step of a busy node takes a whole core."""

    def __init__(
        self, wires: WireLoop, node: str, upstream: int, watch: Watch, *, answers: bool = True
    ) -> None:
        self.node = node
        self.state: State = "open"
        self._wires = wires
        self._upstream = upstream
        self._watch = watch
        self._answers = answers
        self._held_port = reserve_port("127.0.0.1", 0)
        self.port: int = self._held_port.getsockname()[1]
        self._listener: socket.socket | None = None
        self._answered = False  # the node has accepted a connection since the wire was opened
        self._flowing = asyncio.Event()
        self._sockets: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        wires.call(lambda: self._become("open"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def hold(self) -> None:
        self._wires.call(lambda: self._become("held"))

    def break_off(self) -> None:
        self._wires.call(lambda: self._become("broken"))

    def refuse(self) -> None:
        self._wires.call(lambda: self._become("refused"))

    def blip(self) -> None:
        """Reset the open connections; new ones are accepted."""
        self._wires.call(self._reset)

    def mend(self) -> None:
        self._wires.call(lambda: self._become("open"))

    def close(self) -> None:
        self.refuse()
        self._held_port.close()

    # --- in the loop's thread ---------------------------------------------------------------------

    def _become(self, state: State) -> None:
        self.state, self._answered = state, False
        if state == "refused":
            self._stop_listening()
        elif self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
            self._listener.setblocking(False)
            self._wires.loop.add_reader(self._listener, self._accept, self._listener)
        if state in ("broken", "refused"):
            self._reset()
        if state == "held":
            self._flowing.clear()
        else:
            self._flowing.set()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._wires.loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            near, _ = listener.accept()
            near.setblocking(False)
            task = self._wires.loop.create_task(self._serve(near))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            # A task that is cancelled before its first step never reaches its own `finally`.
            task.add_done_callback(lambda _: near.close())

    def _reset(self) -> None:
        for connection in list(self._sockets):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                # This ends the pumps, which close the socket. If it was closed here, its file
                # descriptor could be reused while they still use it.
                connection.shutdown(socket.SHUT_RD)
        self._sockets.clear()

    async def _serve(self, near: socket.socket) -> None:
        loop = self._wires.loop
        far = socket.socket()
        far.setblocking(False)
        try:
            if self.state == "broken":
                return
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._connect(far)
            self._sockets |= {near, far}
            up = _Pump(self, near, far, to_node_codec())
            down = _Pump(self, far, near, to_router_codec() if self._answers else None)
            pumps = [loop.create_task(up.run()), loop.create_task(down.run())]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except ConnectionError:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        finally:
            for end in (near, far):
                self._sockets.discard(end)
                end.close()

    async def _connect(self, far: socket.socket) -> None:
        try:
            await self._wires.loop.sock_connect(far, ("127.0.0.1", self._upstream))
            self._answered = True
        except ConnectionRefusedError:
            if self._answered and self.state == "open":  # the node has ended by itself
                self._become("refused")
            raise

    async def carry(
        self, target: socket.socket, raw: bytes, frame: ToNode | ToRouter | None
    ) -> bool:
        """Pass a frame to the watch, and forward its bytes. Return False if the wire lost them."""
        after = self._watch(Passing(self.node, frame)) if frame is not None else None
        await self._flowing.wait()
        if target not in self._sockets:
            return False
        await self._wires.loop.sock_sendall(target, raw)
        if after is not None:
            after()
        return True


class _Pump:
    """One direction of one connection."""

    def __init__(
        self, wire: Wire, source: socket.socket, target: socket.socket, codec: Codec[Any] | None
    ) -> None:
        self._wire = wire
        self._source = source
        self._target = target
        self._codec = codec
        self._splitter = Splitter()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(self._source, READ_BYTES):
            for raw, message in self._pieces(data):
                if not await self._wire.carry(self._target, raw, self._decode(message)):
                    return

    def _pieces(self, data: bytes) -> Iterable[Piece]:
        return [Piece(data)] if self._codec is None else self._splitter.feed(data)

    def _decode(self, message: bytes | None) -> Any:
        if self._codec is not None and message is not None:
            with contextlib.suppress(WireError):
                return self._codec.decode(message)
        return None

"""Request bodies, read within bounds of time and memory for all bodies of the router together.

In: requests with complete headers. Out: their bytes, or an error: 413 if the body is too large, 408
if it arrives too slowly, 429 if other bodies hold the room for too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

from aiohttp import web

from baton_protocol.errors import BodyTimeout, MalformedBody, TooLarge
from baton_router.http.bytes_budget import BytesBudget
from baton_router.http.malloc import return_freed_memory
from baton_router.openai.json_body import check_size
from baton_router.settings import RouterSettings

T = TypeVar("T")
SMALL = 64 << 10  # bytes; such a body costs a few ms and at most 2 MB
HUGE = 1 << 20  # bytes; larger bodies are processed one at a time


class BodyLimits:
    """Reads request bodies within bounds of time and memory for all bodies of the router together.

    In: requests with complete headers. Out: their bytes, or an error: 413 if the body is too large,
    408 if it arrives too slowly, 429 if other bodies hold the room for too long. While a large body
    is read, parsed and tokenized, it takes several times its size. So large bodies in progress have
    at most `max_bodies_bytes` together, and those of one tenant half of that; the rest wait unread.
    Tenants get room in turn. Small bodies never wait. Memory of large bodies is returned to the
    system at once, because the C library would keep it.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._budget = BytesBudget(settings.max_bodies_bytes, settings.queue_timeout_s)
        self._huge_body_lock = asyncio.Lock()
        self._trimming: asyncio.Task[None] | None = None

    async def read(self, request: web.Request) -> bytes:
        """Read a small body, or one that only the router's administrator can send."""
        async with self.of(request, "") as body:
            return bytes(body.data)

    @asynccontextmanager
    async def of(self, request: web.Request, tenant: str) -> AsyncIterator[Body]:
        """Read the body and hold its room until the end of the block or until `done()`. Raise
        TooLarge, BodyTimeout, BodiesFull, MalformedBody."""
        body = Body(self, tenant)
        try:
            await body.read(request, self._settings)
            yield body
        finally:
            body.done()

    def return_memory(self) -> None:
        """Return freed memory to the system, in a thread, as that takes milliseconds."""
        if self._trimming is None or self._trimming.done():
            self._trimming = asyncio.create_task(asyncio.to_thread(return_freed_memory))

    @property
    def budget(self) -> BytesBudget:
        return self._budget

    @property
    def huge_body_lock(self) -> asyncio.Lock:
        return self._huge_body_lock


async def parse_body(
    data: bytearray,
    parse: Callable[[bytearray], T],
    turn: Callable[[], AbstractAsyncContextManager[None]],
) -> T:
    """Parse a body, a large one in a thread and within `turn`."""
    if len(data) <= SMALL:
        return parse(data)

    def checked() -> T:
        check_size(data)
        return parse(data)

    async with turn():
        return await asyncio.to_thread(checked)


class Body:
    """One request body. `data` is empty once it is parsed."""

    def __init__(self, bodies: BodyLimits, tenant: str) -> None:
        self.data = bytearray()
        self._bodies = bodies
        self._tenant = tenant
        self._held = 0

    async def read(self, request: web.Request, settings: RouterSettings) -> None:
        max_bytes = settings.max_body_bytes
        declared = request.content_length
        if declared is not None and declared > max_bytes:
            raise TooLarge(f"the body has {declared} bytes; at most {max_bytes} are allowed")
        # The final size of a compressed or chunked body is unknown.
        known_size = declared if "Content-Encoding" not in request.headers else None
        if known_size is not None and known_size > SMALL:
            await self._hold(known_size)
        elif known_size is not None and request.content.is_eof():
            self.data += request.content.read_nowait()  # it came with the headers
            return
        loop = asyncio.get_running_loop()
        max_pause_s, began = settings.body_timeout_s, loop.time()
        try:
            async with asyncio.timeout(max_pause_s) as timeout:
                while chunk := await request.content.readany():
                    self.data += chunk
                    size = len(self.data)
                    if size > max_bytes:
                        raise TooLarge(f"the body exceeds the limit of {max_bytes} bytes")
                    if size > SMALL and not self._held:
                        timeout.reschedule(None)
                        waiting_since = loop.time()
                        await self._hold(max_bytes)
                        began += loop.time() - waiting_since
                    max_duration_s = size / settings.body_bytes_per_s
                    timeout.reschedule(min(loop.time(), began + max_duration_s) + max_pause_s)
        except TimeoutError:
            raise BodyTimeout(
                f"the body did not arrive in time: {len(self.data)} bytes"
                f"{'' if declared is None else f' of {declared}'} arrived; send it without pauses"
                f" of {max_pause_s:g} s, at {settings.body_bytes_per_s} bytes per second or more"
            ) from None
        except web.RequestPayloadError as error:
            reason = str(error).strip().rpartition("\n")[2].strip()
            raise MalformedBody(f"the body cannot be read: {reason}") from error

    async def parsed(self, parse: Callable[[bytearray], T]) -> T:
        """Parse the body, a large one in a thread. Releases its bytes."""
        data, self.data = self.data, bytearray()
        return await parse_body(data, parse, self.turn)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold the lock for processing a huge body; other bodies need none."""
        if self._held <= HUGE:
            yield
            return
        async with self._bodies.huge_body_lock:
            yield

    def done(self) -> None:
        """Release the body's room. Idempotent."""
        self.data = bytearray()
        if self._held:
            self._bodies.budget.free_room(self._tenant, self._held)
            if self._held > HUGE:
                self._bodies.return_memory()
            self._held = 0

    async def _hold(self, size: int) -> None:
        await self._bodies.budget.take_room(self._tenant, size)
        self._held = size

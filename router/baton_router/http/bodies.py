"""Reads the bodies of requests, within bounds of time and memory for all of them together.

In: requests whose headers are there. Out: their bytes, or an error: 413 for a body that is too
large, 408 for one that comes too slowly, 429 where others have the room for too long. A large body
takes several times its bytes while it is read, parsed and tokenized. So only `max_bodies_bytes` of
such bodies are under way at a time, of one tenant half of that; others wait, unread. Tenants get
room in turns, and nobody waits for a small body's room. What large bodies took is given back to the
system at once: the C library would keep it.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web

from baton_protocol.errors import BodiesFull, BodyTimeout, MalformedBody, TooLarge
from baton_router.openai.large_json import check_size
from baton_router.settings import RouterSettings

T = TypeVar("T")
SMALL = 64 << 10  # bytes; such a body takes a few milliseconds and at most 2 MB
HUGE = 1 << 20  # such bodies are parsed and tokenized one after the other
MAX_WAITING = 100  # large bodies of one tenant; one more is refused at once
RETRY_AFTER_S = 1.0
# mallopt's parameters, of malloc.h.
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
_OWN_PAGES = 256 << 10  # bytes; what is larger goes back to the system when it is freed
_ARENAS = 2


class BodyLimits:
    """Of one router."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._budget = _BytesBudget(settings.max_bodies_bytes, settings.queue_timeout_s)
        self._one = asyncio.Lock()
        self._trimming: asyncio.Task[None] | None = None

    async def read(self, request: web.Request) -> bytes:
        """A body that is small, or that nobody but this router's admin sends."""
        async with self.of(request, "") as body:
            return bytes(body.data)

    @asynccontextmanager
    async def of(self, request: web.Request, tenant: str) -> AsyncIterator[Body]:
        """The body, and its room until the end of the block or `done()`. Raise TooLarge,
        BodyTimeout, BodiesFull, MalformedBody."""
        body = Body(self, tenant)
        try:
            await body.read(request, self._settings)
            yield body
        finally:
            body.done()

    def give_back(self) -> None:
        """Free memory to the system, in a thread: it takes some milliseconds."""
        if self._trimming is None or self._trimming.done():
            self._trimming = asyncio.create_task(asyncio.to_thread(_trim))

    @property
    def budget(self) -> _BytesBudget:
        return self._budget

    @property
    def one(self) -> asyncio.Lock:
        return self._one


class Body:
    """One body. `data` is empty once it is parsed."""

    def __init__(self, bodies: BodyLimits, tenant: str) -> None:
        self.data = bytearray()
        self._bodies = bodies
        self._tenant = tenant
        self._held = 0

    async def read(self, request: web.Request, settings: RouterSettings) -> None:
        most = settings.max_body_bytes
        told = request.content_length
        if told is not None and told > most:
            raise TooLarge(f"the body has {told} bytes; at most {most}")
        # How much a compressed body, or one in chunks, will be is not known.
        known = told if "Content-Encoding" not in request.headers else None
        if known is not None and known > SMALL:
            await self._hold(known)
        loop = asyncio.get_running_loop()
        silence, began = settings.body_timeout_s, loop.time()
        try:
            async with asyncio.timeout(silence) as limit:
                while chunk := await request.content.readany():
                    self.data += chunk
                    size = len(self.data)
                    if size > most:
                        raise TooLarge(f"the body has more than {most} bytes")
                    if size > SMALL and not self._held:
                        limit.reschedule(None)
                        waits = loop.time()
                        await self._hold(most)
                        began += loop.time() - waits
                    slowest = size / settings.body_bytes_per_s
                    limit.reschedule(min(loop.time(), began + slowest) + silence)
        except TimeoutError:
            raise BodyTimeout(
                f"the body did not come in time: {len(self.data)} bytes"
                f"{'' if told is None else f' of {told}'} were there; send it without pauses of"
                f" {silence:g} s, and {settings.body_bytes_per_s} bytes per second or more"
            ) from None
        except web.RequestPayloadError as error:
            reason = str(error).strip().rpartition("\n")[2].strip()
            raise MalformedBody(f"the body cannot be read: {reason}") from error

    async def parsed(self, parse: Callable[[bytearray], T]) -> T:
        """A large body in a thread. Its bytes are gone then."""
        data, self.data = self.data, bytearray()
        if len(data) <= SMALL:
            return parse(data)

        def checked() -> T:
            check_size(data)
            return parse(data)

        async with self.turn():
            return await asyncio.to_thread(checked)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """In which a huge body may be worked on."""
        if self._held <= HUGE:
            yield
            return
        async with self._bodies.one:
            yield

    def done(self) -> None:
        """What it took is free."""
        self.data = bytearray()
        if self._held:
            self._bodies.budget.free(self._tenant, self._held)
            if self._held > HUGE:
                self._bodies.give_back()
            self._held = 0

    async def _hold(self, size: int) -> None:
        await self._bodies.budget.take(self._tenant, size)
        self._held = size


class _BytesBudget:
    """`total` bytes, of one tenant half. One body fits in any case, where there is no other."""

    def __init__(self, total: int, wait_s: float) -> None:
        self._total = total
        self._wait_s = wait_s
        self._taken: defaultdict[str, int] = defaultdict(int)
        # By tenant, who has had no turn for longest first.
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()

    async def take(self, tenant: str, size: int) -> None:
        """Wait for that much. Raise BodiesFull after too long, and at once where too many wait."""
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= MAX_WAITING:
            raise BodiesFull(
                f"{len(queue)} large bodies of yours wait to be read; send fewer at a time",
                retry_after=RETRY_AFTER_S,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (turn, size)
        queue.append(place)
        self._hand_out()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.free(tenant, size)
            else:
                self._leave(tenant, place)
            if isinstance(error, TimeoutError):
                raise BodiesFull(
                    f"for {self._wait_s:g} s other large bodies had the room to be read; send"
                    " fewer at a time, or smaller ones",
                    retry_after=RETRY_AFTER_S,
                ) from None
            raise

    def free(self, tenant: str, size: int) -> None:
        self._taken[tenant] -= size
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._hand_out()

    def _leave(self, tenant: str, place: tuple[asyncio.Future[None], int]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and place in queue:
            queue.remove(place)
        self._hand_out()

    def _hand_out(self) -> None:
        """Whoever is next, as long as there is room. A tenant that has its half waits for itself;
        where all have too much for the next one, nobody goes before it."""
        handed = True
        while handed:
            handed = False
            for tenant in list(self._waiting):
                queue = self._waiting[tenant]
                if not queue:
                    del self._waiting[tenant]
                    continue
                turn, size = queue[0]
                own, taken = self._taken.get(tenant, 0), sum(self._taken.values())
                if own and own + size > self._total // 2:
                    continue
                if taken and taken + size > self._total:
                    return
                queue.popleft()
                self._waiting.move_to_end(tenant)
                self._taken[tenant] += size
                turn.set_result(None)
                handed = True


def settle_memory() -> None:
    """Tell the C library, where it is glibc, to keep little of what is freed: by itself it raises
    the size from which memory goes back to the system up to 32 MiB, and has eight arenas per core,
    each with what its threads have freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _OWN_PAGES)
        mallopt(_ARENA_MAX, _ARENAS)


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

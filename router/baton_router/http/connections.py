"""The connections below the application: errors of aiohttp's parser get OpenAI's format, and a
connection whose headers take too long is closed.

In: bytes that are not a request the router accepts. Out: an error that repeats none of these bytes,
with the usual headers. Nothing is logged above DEBUG, because a header may hold a key and anybody
could fill the log. The code uses only aiohttp's public classes and methods, so it does not see
bytes that break the framing of a body in progress: the body's own timeout ends that.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from baton_protocol.errors import (
    BodiesFull,
    BodyTimeout,
    ErrorRecord,
    InternalError,
    MalformedBody,
    TooLarge,
)
from baton_router.openai.answers import ErrorAnswer
from baton_router.openai.json_body import check_size
from baton_router.requests.context import refusal_line
from baton_router.settings import RouterSettings

PLACEMENT_HEADER = "x-baton-placement"
EXACT_HEADER = "x-baton-exact"
POLICY_HEADER = "x-baton-policy"
OWN_ID_HEADER = "x-baton-request-id"
ID_HEADER = "x-request-id"  # the client's own id of the request, or the router's
# Limits for aiohttp: bytes of a request line or of a header, and the number of headers.
MAX_LINE = 8190
MAX_HEADERS = 128
SHUTDOWN_S = 0.1  # seconds for connections that still write at shutdown
BACKLOG = 128  # connections that wait to be accepted
# Errors of the client. Their messages contain the offending line, so they are not logged.
_CLIENT_ERRORS = (HttpProcessingError, web.PayloadAccessError, web.RequestPayloadError)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Timeouts for headers and for idle connections, in seconds. `new_id` makes an id for the
    answer to bytes that are not a request."""

    header_timeout_s: float
    idle_timeout_s: float
    new_id: Callable[[], str]


class HttpServer:
    """Serves an application on the addresses that it listens on."""

    def __init__(self, app: web.Application, settings: ConnectionSettings) -> None:
        self._app = web.AppRunner(app)  # starts and ends the application; it has no site
        self._settings = settings
        self._listeners: list[asyncio.Server] = []
        self._server: _Server
        self.runner: web.ServerRunner

    async def setup(self) -> None:
        await self._app.setup()
        assert self._app.server is not None
        self._server = _Server(self._app.server, self._settings)
        self.runner = web.ServerRunner(self._server, shutdown_timeout=SHUTDOWN_S)
        await self.runner.setup()

    async def listen(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Listen on a TCP port, and return it. Raise OSError."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            self._server, host, port, reuse_port=reuse_port, backlog=BACKLOG
        )
        self._listeners.append(listener)
        return int(listener.sockets[0].getsockname()[1])

    async def listen_at(self, path: str) -> None:
        """Listen on a Unix socket. Raise OSError."""
        loop = asyncio.get_running_loop()
        self._listeners.append(await loop.create_unix_server(self._server, path, backlog=BACKLOG))

    async def stop_listening(self) -> None:
        """Accept no more connections. Accepted ones continue. Idempotent."""
        listeners, self._listeners = self._listeners, []
        loop = asyncio.get_running_loop()
        for listener in listeners:
            for accepting in listener.sockets:
                loop.remove_reader(accepting.fileno())
        # asyncio starts to read from an accepted connection one pass of the loop later. If the
        # listener is closed by then, the connection stays open and nobody reads from it.
        await asyncio.sleep(0)
        for listener in listeners:
            listener.close()

    async def cleanup(self) -> None:
        await self.stop_listening()
        await self.runner.cleanup()
        await self._app.cleanup()


_SLASHES = re.compile("/{2,}")
# Requests below this path change what nodes do. A proxy may guard them by this very beginning.
COMMANDS = "/nodes/"


def with_plain_path(message: RawRequestMessage) -> RawRequestMessage:
    """The request with the path that its client means: `//v1/models` and `/v1/models/` come from a
    base URL with a slash too many. The query stays as it is."""
    path = message.path.partition("?")[0]
    if not path.startswith("/") or not ("//" in path or path.endswith("/")):
        return message
    plain = _SLASHES.sub("/", path).rstrip("/") or "/"
    if plain == path or f"{plain}/".startswith(COMMANDS):
        return message
    url = message.url.with_path(plain, encoded=True, keep_query=True)
    return message._replace(path=plain + message.path[len(path) :], url=url)


class _Server(web.Server):
    def __init__(self, app: web.Server, settings: ConnectionSettings) -> None:
        self.settings = settings
        super().__init__(
            self._tracked(app.request_handler),
            request_factory=lambda message, *rest: app.request_factory(
                with_plain_path(message), *rest
            ),
            handler_cancellation=True,
        )

    def _tracked(self, handler: Handler) -> Handler:
        async def track(request: web.BaseRequest) -> web.StreamResponse:
            connection = request.protocol
            assert isinstance(connection, _Connection)
            connection.begin_request()
            try:
                return await handler(request)
            except web.HTTPExpectationFailed:
                # aiohttp answers an unknown `Expect` before any middleware runs.
                message = "the router supports no Expect but 100-continue; leave it out"
                return self.error_response(_refusal(message, 417, code="http_error"))
            finally:
                connection.end_request()

        return track

    def error_response(self, error: ErrorRecord) -> web.Response:
        """The answer to an error outside any handler. As the route is unknown, it carries the
        headers of every kind of answer."""
        request_id = self.settings.new_id()
        return web.Response(
            body=msgspec.json.encode(ErrorAnswer.of(error)),
            status=error.status,
            content_type="application/json",
            headers={
                ID_HEADER: request_id,
                OWN_ID_HEADER: request_id,
                PLACEMENT_HEADER: refusal_line(error),
            },
        )

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self.settings, asyncio.get_running_loop())


class _Connection(web.RequestHandler):
    """Closes a connection whose headers take too long. aiohttp alone would treat a half-sent
    request like an idle connection."""

    __slots__ = ("_answering", "_headers_due", "_server", "_settings")

    def __init__(
        self, server: _Server, settings: ConnectionSettings, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # aiohttp takes it as "no access log"
            keepalive_timeout=settings.idle_timeout_s,
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            max_headers=MAX_HEADERS,
        )
        self._server = server
        self._settings = settings
        self._answering = False
        self._headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._cancel_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if data and not self._answering and self._headers_due is None:
            self._start_header_timer()
        super().data_received(data)

    def begin_request(self) -> None:
        self._answering = True
        self._cancel_header_timer()

    def end_request(self) -> None:
        self._answering = False

    def _start_header_timer(self) -> None:
        loop, delay_s = asyncio.get_running_loop(), self._settings.header_timeout_s
        self._headers_due = loop.call_later(delay_s, self.force_close)

    def _cancel_header_timer(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        self._cancel_header_timer()
        logger.debug("a client sent an invalid request: %s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has already begun")
        response = self._server.error_response(_record(status, exc))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        error = kw.get("exc_info")
        if isinstance(error, _CLIENT_ERRORS):
            logger.debug("a client sent bytes that are not HTTP: %s", type(error).__name__)
        else:
            super().log_exception(*args, **kw)


def _record(status: int, exc: BaseException | None) -> ErrorRecord:
    if status >= 500:
        return InternalError("the router failed before it could read the request").record()
    if isinstance(exc, LineTooLong):
        message = f"the request line or a header is longer than {MAX_LINE} bytes; shorten it"
        return _refusal(message, 431, code="headers_too_large")
    message = "this is not an HTTP/1.1 request that the router can read"
    return _refusal(message, 400, code="malformed_request")


def _refusal(message: str, status: int, *, code: str) -> ErrorRecord:
    return ErrorRecord(message, code, status=status, type="invalid_request_error")


T = TypeVar("T")
SMALL = 64 << 10  # bytes; such a body costs a few ms and at most 2 MB
HUGE = 1 << 20  # bytes; larger bodies are processed one at a time
MAX_WAITING = 100  # large bodies of one tenant; more are refused at once
RETRY_AFTER_S = 1.0
# Parameters of mallopt in malloc.h.
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
_OWN_PAGES = 256 << 10  # bytes; larger allocations return to the system when freed
_ARENAS = 2


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
        self._budget = _BytesBudget(settings.max_bodies_bytes, settings.queue_timeout_s)
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

    def give_back(self) -> None:
        """Return freed memory to the system, in a thread, as that takes milliseconds."""
        if self._trimming is None or self._trimming.done():
            self._trimming = asyncio.create_task(asyncio.to_thread(_trim))

    @property
    def budget(self) -> _BytesBudget:
        return self._budget

    @property
    def huge_body_lock(self) -> asyncio.Lock:
        return self._huge_body_lock


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
        if len(data) <= SMALL:
            return parse(data)

        def checked() -> T:
            check_size(data)
            return parse(data)

        async with self.turn():
            return await asyncio.to_thread(checked)

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
            self._bodies.budget.free(self._tenant, self._held)
            if self._held > HUGE:
                self._bodies.give_back()
            self._held = 0

    async def _hold(self, size: int) -> None:
        await self._bodies.budget.take(self._tenant, size)
        self._held = size


class _BytesBudget:
    """Shares `total` bytes among bodies. Several bodies of one tenant get at most half. A body that
    is alone always fits."""

    def __init__(self, total: int, wait_s: float) -> None:
        self._total = total
        self._wait_s = wait_s
        self._taken: defaultdict[str, int] = defaultdict(int)
        # Waiting bodies by tenant; the tenant without a turn for longest comes first.
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()

    async def take(self, tenant: str, size: int) -> None:
        """Wait for `size` bytes. Raise BodiesFull on timeout, or at once if too many wait."""
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= MAX_WAITING:
            raise BodiesFull(
                f"{len(queue)} of your large bodies already wait to be read; send fewer at a time",
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
                    f"other large bodies took all the room for {self._wait_s:g} s; send fewer "
                    "at a time, or smaller ones",
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
        """Give room to waiting bodies in turn. Skip a tenant that has its half. If the next body
        does not fit into the total, stop, so that smaller ones do not overtake it forever."""
        progress = True
        while progress:
            progress = False
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
                progress = True


def settle_memory() -> None:
    """Tell glibc to keep little freed memory. By default it raises the size from which memory
    returns to the system up to 32 MiB, and uses eight arenas per core, each with its own free
    memory. No effect with other C libraries."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _OWN_PAGES)
        mallopt(_ARENA_MAX, _ARENAS)


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

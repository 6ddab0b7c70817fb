"""Which streams can be resumed: what clients ask in headers, and what the index has.

    x-baton-resume: SECONDS    keep this stream: it outlives its client and its router
    Last-Event-ID: ID:N        send what comes after event N of stream ID
    Last-Event-ID: ID:N:TOKENS the same, of a repeatable stream (see `requests/kept_stream`)

In: requests, and the streams of all routers on the index. Out: KeptStreams. Errors are raised.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass

from aiohttp import web

from baton_kvstore.errors import StoreUnavailable
from baton_protocol.errors import InvalidRequest, NotFound, Unavailable
from baton_protocol.resume import ResumeHead, ResumeState
from baton_router.http.dialects import DIALECTS
from baton_router.http.headers import LAST_EVENT_HEADER, RESUME_HEADER
from baton_router.metrics.router_metrics import ResumeOutcome, RouterMetrics
from baton_router.openai.call import Call
from baton_router.openai.dialect import Dialect
from baton_router.requests.kept_stream import GRACE_S, MAX_STREAM_BYTES, KeptStream, LastEvent
from baton_router.requests.prepared import Prepared
from baton_router.requests.resume_writer import ResumeWriter

logger = logging.getLogger(__name__)
EVENTS_PATH = "/requests/{id}/events"
_SECONDS = re.compile(r"[0-9]{1,9}", re.ASCII)
_EVENT_ID = re.compile(r"([0-9a-f]{32}):([0-9]{1,9})(?::([0-9a-f]{1,8}))?", re.ASCII)
_STREAM_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a call needs to be kept for `seconds`: its route and its body."""

    seconds: int
    route: str
    body: bytes


class Resumes:
    """`writer` is None without an index. A stream may outlive its client by `max_s` seconds; 0
    refuses it."""

    def __init__(self, writer: ResumeWriter | None, metrics: RouterMetrics, max_s: float) -> None:
        self._writer = writer
        self._metrics = metrics
        self._max_s = int(max_s)

    def wish_of(self, request: web.Request, route: str, data: bytearray) -> Wish | None:
        """The wish in the request's header; `data` is its body. Raise InvalidRequest."""
        header = request.headers.get(RESUME_HEADER)
        if header is None:
            return None
        if self._writer is None or not self._max_s:
            why = "has --max-resume 0" if self._writer is not None else "has no index"
            raise _invalid(f"this router {why}, so it keeps no streams; leave the header out")
        if not _SECONDS.fullmatch(header) or not 1 <= int(header) <= self._max_s:
            raise _invalid(
                f"{RESUME_HEADER} is {header[:40]!r}; use 1 to {self._max_s}, in whole seconds"
            )
        return Wish(int(header), route, bytes(data))

    def check(self, call: Call) -> None:
        """Raise InvalidRequest for a call that cannot be kept."""
        if not call.options.stream:
            raise _invalid(f"{RESUME_HEADER} keeps streams; add stream, or leave the header out")
        if not call.options.generates:
            raise _invalid(
                f"{RESUME_HEADER} keeps generated tokens, and the call only asks about its prompt;"
                " leave the header out"
            )

    def new_stream(self, wish: Wish, prepared: list[Prepared]) -> KeptStream:
        """A stream that begins. Raise InvalidRequest."""
        assert self._writer is not None, "wish_of() refuses without an index"
        if len(prepared) > 1:
            raise _invalid(
                f"{RESUME_HEADER} keeps the stream of one prompt, and the call has"
                f" {len(prepared)}; send one at a time"
            )
        [item] = prepared
        size = len(wish.body) + 5 * len(item.request.prompt_ids)
        if size > MAX_STREAM_BYTES // 2:
            raise _invalid(
                f"a stream that {RESUME_HEADER} keeps may begin with {MAX_STREAM_BYTES // 2} bytes"
                f" of body and prompt, and this one has {size}; leave the header out"
            )
        head = ResumeHead(
            route=wish.route,
            body=wish.body,
            model=item.serving.name,
            kind=item.kind,
            created=int(time.time()),
            seconds=wish.seconds,
            request=item.request,
        )
        return KeptStream(self._writer, head.with_request(item.request))

    async def find(self, id: str, tenant: str, route: str | None) -> ResumeHead:
        """How the tenant's stream began. Raise NotFound, also if it is another tenant's, or if it
        is not of this route; Unavailable if the index does not answer."""
        head = None
        if self._writer is not None and _STREAM_ID.fullmatch(id):
            try:
                head = await self._writer.log.head(id)
            except StoreUnavailable as error:
                raise _index_fails(error) from error
        if head is None or head.request.tenant != tenant or route not in (None, head.route):
            self.count("not_found")
            raise _not_found(id)
        return head

    def dialect_of(self, head: ResumeHead) -> Dialect:
        """The dialect of a stream. Raise NotFound for one that this version does not speak."""
        dialect = DIALECTS.get(head.route)
        if dialect is None:
            raise _not_found(str(head.request.id))
        return dialect

    async def claim(self, head: ResumeHead, seen: LastEvent) -> KeptStream:
        """The stream, which this call owns from now on. Raise NotFound, Unavailable."""
        assert self._writer is not None, "find() has found it"
        id = str(head.request.id)
        self._writer.write_out()  # what this router has of the stream need not be computed again
        await self._writer.written()
        self._writer.take(id)
        try:
            claim = await self._writer.log.claim(id, int((head.seconds + GRACE_S) * 1000))
        except StoreUnavailable as error:
            raise _index_fails(error) from error
        if claim is None:
            self.count("not_found")
            raise _not_found(id)
        try:
            state = ResumeState.of(head, claim.entries, begun=seen.number > 0)
        except ValueError as error:
            logger.warning("stream %s on the index is wrong: %s", id, error)
            raise _not_found(id) from error
        self.count("ended" if state.over else "continued")
        return KeptStream(self._writer, head, seen=seen, claim=claim, resumed=state)

    def count(self, outcome: ResumeOutcome) -> None:
        self._metrics.resumed(outcome)


def last_event(request: web.Request) -> LastEvent | None:
    """The last event that the client has; None if it names none. Raise InvalidRequest."""
    header = request.headers.get(LAST_EVENT_HEADER)
    if not header:
        return None
    parts = _EVENT_ID.fullmatch(header)
    if parts is None:
        raise InvalidRequest(
            f"{LAST_EVENT_HEADER} is {header[:60]!r}, which is no id of this pool's events; send"
            " that of the last event that arrived",
            param=LAST_EVENT_HEADER,
        )
    stream, number, digest = parts.groups()
    return LastEvent(stream, int(number), None if digest is None else int(digest, 16))


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param=RESUME_HEADER)


def _not_found(id: str) -> NotFound:
    return NotFound(
        f"no stream {id[:40]!r} can be resumed: its time is over, it was not sent with"
        f" {RESUME_HEADER}, or it is another tenant's or route's",
        code="stream_not_found",
    )


def _index_fails(error: StoreUnavailable) -> Unavailable:
    return Unavailable(f"the index, which keeps the streams, does not answer now: {error}")

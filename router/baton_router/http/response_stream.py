"""Streams the events of a response that is kept, or that is being made in the background.

In: a response's id, and the number of the last event that the client has. Out: an event stream that
ends with the response, whichever router makes it. If its events were logged, they are sent as they
come; else they follow from the response once it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import web

from baton_protocol.errors import BatonError, Unavailable
from baton_router.http.event_stream import EventStream
from baton_router.http.generation import GenerationRoutes
from baton_router.http.observers import CONTEXT
from baton_router.responses.call import RESPONSES
from baton_router.responses.event_log import EventReader
from baton_router.responses.events import StreamError, end_event, event_bytes
from baton_router.responses.kept import UNFINISHED, KeptResponses
from baton_router.responses.records import Response
from baton_router.responses.replay import ReplayedResponse

POLL_S = 0.1  # between two looks for new events
_SEPARATOR = b"\n\n"


class ResponseStreams:
    """The streams of kept responses."""

    def __init__(self, kept: KeptResponses, generation: GenerationRoutes) -> None:
        self._kept = kept
        self._generation = generation

    async def send(
        self, request: web.Request, tenant: str, id: str, seen: int
    ) -> web.StreamResponse:
        """Send the events after the first `seen` ones. Raise NotFound, Unavailable; once the stream
        has begun, an error is its last event."""
        keepalive_s = self._generation.settings.keepalive_s
        events = EventStream(request, keepalive_s, RESPONSES)
        reader = EventReader(seen)
        try:
            return await self._follow(tenant, id, seen, events, reader)
        except BatonError as error:
            if not events.begun:
                raise
            record = request[CONTEXT].failure = error.record()
            number = max(seen, reader.count)
            last = StreamError(
                sequence_number=number,
                code=record.code,
                message=record.message,
                param=record.param,
            )
            return await events.end_stream(event_bytes(last))

    async def _follow(
        self, tenant: str, id: str, seen: int, events: EventStream, reader: EventReader
    ) -> web.StreamResponse:
        clock: Callable[[], float] = self._generation.clock
        position, quiet_since = 0, clock()
        while True:
            # The state first: what is logged after the end is in the log by then.
            state = await self._kept.read(tenant, id)
            over = state["status"] not in UNFINISHED
            piece = await self._kept.read_events(tenant, id, position)
            if piece:
                position += len(piece)
                if shown := reader.read(piece):
                    await events.write_event(shown)
                    quiet_since = clock()
                continue
            if over:
                return await events.end_stream(_rest(state, seen, piece is not None, reader))
            if self._generation.draining:
                raise Unavailable(
                    "the router is shutting down; ask again for the response's stream, with"
                    " starting_after"
                )
            if clock() - quiet_since >= events.keepalive_s:
                await events.keep_alive()
                quiet_since = clock()
            await asyncio.sleep(POLL_S)


def _rest(state: object, seen: int, logged: bool, reader: EventReader) -> bytes:
    """What the client lacks of the stream of a response that has ended, after the log was read."""
    response = msgspec.convert(state, Response)
    if not logged:
        *all_events, _ = ReplayedResponse(response).events().split(_SEPARATOR)
        return b"".join([event + _SEPARATOR for event in all_events[seen:]])
    if reader.ended:
        return b""
    # It failed or was cancelled, or the log had no room.
    return event_bytes(end_event(response, max(seen, reader.count)))

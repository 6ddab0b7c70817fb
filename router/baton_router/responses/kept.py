"""The responses that clients keep: written and read for their tenants, at any router of the pool.

In: responses with their input. Out: their JSON, or the conversation that a later response
continues. They are on the index, so a router without one keeps none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import msgspec

from baton_kvstore.errors import StoreError
from baton_kvstore.index.responses import Responses
from baton_protocol.errors import ErrorRecord, InvalidRequest, NotFound, Unavailable
from baton_router.openai.fields.kinds import Json
from baton_router.responses.event_log import EventLog
from baton_router.responses.items import INPUT, MAX_ID
from baton_router.responses.records import ID_PREFIX, Response, ResponseError, ResponseStatus

T = TypeVar("T")
UNFINISHED: Sequence[ResponseStatus] = ("queued", "in_progress")
CONTINUABLE: Sequence[ResponseStatus] = ("completed", "incomplete")
# A response in the background counts as failed after this number of seconds without its router.
LEASE_S = 15.0
MOST_READ = 1 << 14  # bytes of a log at once, which are up to some MB of events
_RESPONSE, _INPUT, _EVENTS = "response", "input", "events"
_ID = re.compile(rf"{ID_PREFIX}[0-9a-f]{{32}}")

logger = logging.getLogger(__name__)


class KeptResponses:
    """The responses of all tenants. `index` is None if the router keeps none; `most_bytes` is the
    limit of one response."""

    def __init__(self, index: Responses | None, most_bytes: int) -> None:
        self._index = index
        self._most_bytes = most_bytes

    async def close(self) -> None:
        if self._index is not None:
            await self._index.close()

    def check_keeps(self, items: Sequence[Json]) -> None:
        """Raise InvalidRequest if a response with this input cannot be kept."""
        self._opened("store")
        size = len(msgspec.json.encode(items))
        if size > self._most_bytes:
            raise InvalidRequest(
                f"store is true, and the input has {size} bytes with the items before it; a"
                f" response that is kept may have {self._most_bytes} at most: leave out store",
                param="store",
            )

    async def write(
        self,
        tenant: str,
        response: Response,
        items: Sequence[Json],
        log: EventLog | None = None,
    ) -> None:
        """Write a response with its input, and the log of its events if it is streamed. Raise
        Unavailable."""
        name = response.id.removeprefix(ID_PREFIX)
        named = [{"id": f"item_{name}{at:04x}", **item} for at, item in enumerate(items)]
        encode = msgspec.json.encode
        values = {_RESPONSE: encode(response), _INPUT: encode(named)}
        # A log that has no room is left empty: the response alone may have it.
        for logged in [b""] if log is None else [log.data(), b""]:
            if log is not None:
                values[_EVENTS] = logged
            if await _answer(self._opened("store").put(tenant, response.id, values)):
                return
        logger.warning("response %s is too large to be kept", response.id)

    async def keep(
        self,
        tenant: str,
        response: Response,
        items: Sequence[Json],
        log: EventLog | None = None,
    ) -> None:
        """The same for a response that its client gets in any case."""
        try:
            await self.write(tenant, response, items, log)
        except Unavailable as error:
            logger.warning("response %s is not kept: %s", response.id, error)

    async def read(self, tenant: str, id: str) -> Json:
        """The response. One in the background whose router is lost has failed. Raise NotFound,
        Unavailable."""
        response = await self._read(tenant, id)
        if response["status"] not in UNFINISHED or await self._is_leased(tenant, id):
            return response
        response = await self._read(tenant, id)  # its router may have finished it just now
        if response["status"] in UNFINISHED:
            lost = Unavailable("the router that made it has stopped; send the request again")
            response |= {"status": "failed", "error": error_of(lost.record())}
        return response

    async def read_input(self, tenant: str, id: str) -> list[Json]:
        """The items of its input, each with an id. Raise NotFound, Unavailable."""
        [items] = await self._values(tenant, id, _INPUT)
        decoded: list[Json] = msgspec.json.decode(items)
        return decoded

    async def append_events(self, tenant: str, id: str, start: int, data: bytes) -> bool:
        """Let the log of events go on with this data from byte `start` on. False: there is no room.
        Raise Unavailable."""
        return await _answer(self._opened("stream").append(tenant, id, _EVENTS, start, data))

    async def read_events(self, tenant: str, id: str, start: int) -> bytes | None:
        """The next piece of the log of events; None if the response has none. Raise NotFound,
        Unavailable."""
        return await _answer(self._index_of(id).read(tenant, id, _EVENTS, start, MOST_READ))

    async def read_conversation(self, tenant: str, id: str) -> list[Json]:
        """Its input and its output, for a response that continues it. Raise InvalidRequest,
        NotFound, Unavailable."""
        self._opened("previous_response_id")
        try:
            response, items = map(
                msgspec.json.decode, await self._values(tenant, id, _RESPONSE, _INPUT)
            )
        except NotFound as error:
            raise NotFound(error.message, param="previous_response_id", code=error.reason) from None
        if response["status"] not in CONTINUABLE:
            raise InvalidRequest(
                f"previous_response_id names a response that is {response['status']}; one that is"
                f" {' or '.join(CONTINUABLE)} can be continued",
                param="previous_response_id",
            )
        conversation: list[Json] = items + INPUT.read("output", response["output"])
        return conversation

    async def delete(self, tenant: str, id: str) -> None:
        """Raise NotFound, Unavailable."""
        index = self._index_of(id)
        if not await _answer(index.delete(tenant, id)):
            raise _not_kept(id)

    # --- in the background ------------------------------------------------------------------------

    async def lease(self, tenant: str, id: str) -> bool:
        """Say that this router makes the response. True: a client has cancelled it. Raise
        Unavailable."""
        return await _answer(self._opened("background").lease(tenant, id, LEASE_S))

    async def release(self, tenant: str, id: str) -> None:
        """The response is finished. Raise Unavailable."""
        await _answer(self._opened("background").release(tenant, id))

    async def cancel(self, tenant: str, id: str) -> None:
        """Ask the router that makes the response to stop. Raise Unavailable."""
        await _answer(self._opened("background").cancel(tenant, id))

    # --- the index --------------------------------------------------------------------------------

    async def _read(self, tenant: str, id: str) -> Json:
        [response] = await self._values(tenant, id, _RESPONSE)
        decoded: Json = msgspec.json.decode(response)
        return decoded

    async def _is_leased(self, tenant: str, id: str) -> bool:
        return await _answer(self._opened("background").is_leased(tenant, id))

    async def _values(self, tenant: str, id: str, *names: str) -> list[bytes]:
        values = await _answer(self._index_of(id).get(tenant, id, *names))
        if values is None:
            raise _not_kept(id)
        return values

    def _index_of(self, id: str) -> Responses:
        """The index, which may keep this response. Raise NotFound."""
        if self._index is None or _ID.fullmatch(id) is None:
            raise _not_kept(id)
        return self._index

    def _opened(self, field: str) -> Responses:
        """The index. Raise InvalidRequest without one, naming the field that needs it."""
        if self._index is None:
            raise InvalidRequest(
                f"{field} needs responses that are kept, and this router keeps none: it has no"
                " index (--redis-index), or --response-ttl is 0",
                param=field,
            )
        return self._index


def error_of(error: ErrorRecord) -> ResponseError:
    """The error as a failed response has it."""
    return ResponseError(code=error.code, message=error.message)


async def _answer(command: Awaitable[T]) -> T:
    """The index's answer. Raise Unavailable."""
    try:
        return await command
    except StoreError as error:
        raise Unavailable(f"the index with the kept responses fails: {error}") from error


def _not_kept(id: str) -> NotFound:
    return NotFound(
        f"response {id[:MAX_ID]!r} is not kept: it was sent without store, its time is over,"
        " newer ones needed its room, or it is another tenant's",
        code="response_not_found",
    )

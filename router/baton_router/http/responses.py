"""The routes of OpenAI's Responses API.

    POST /v1/responses                    answer; with `store` the response is kept
    GET /v1/responses/{id}                a kept response; with `stream` its events
    DELETE /v1/responses/{id}
    POST /v1/responses/{id}/cancel        stop one that is made in the background
    GET /v1/responses/{id}/input_items    what a kept response answers
    POST /v1/responses/input_tokens       the number of tokens of a prompt

In: aiohttp requests; the middleware has set their tenant. Out: responses. A response in the
background is made by a task of this router, which says so on the index, with its events if it has a
stream; if it stops, the response has failed for all routers.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
from aiohttp import web

from baton_protocol.errors import (
    BatonError,
    InternalError,
    InvalidRequest,
    QueueFull,
    Unavailable,
)
from baton_router.errors import RequestFailed, error_record
from baton_router.http.generation import GenerationRoutes
from baton_router.http.headers import RESUME_HEADER
from baton_router.http.json_response import json_response
from baton_router.http.observers import CONTEXT
from baton_router.http.response_stream import ResponseStreams
from baton_router.http.resumes import last_event
from baton_router.openai.answers import CommonFields
from baton_router.requests.context import RequestContext
from baton_router.requests.detached import DetachedWork
from baton_router.requests.tokenize import tokenize_prompt
from baton_router.responses.call import RESPONSES, ResponseCall
from baton_router.responses.event_log import EventLog
from baton_router.responses.events import ResponseCreated, event_bytes
from baton_router.responses.kept import UNFINISHED, KeptResponses, error_of
from baton_router.responses.records import (
    DeletedResponse,
    InputItemList,
    InputTokens,
    Response,
    ResponseStatus,
)

ROUTE = RESPONSES.route
ONE = f"{ROUTE}/{{response}}"
CANCEL, INPUT_ITEMS, INPUT_TOKENS = f"{ONE}/cancel", f"{ONE}/input_items", f"{ROUTE}/input_tokens"
# ONE without the routes that begin like it: a method that they lack is not theirs.
_ONE_ALONE = f"{ROUTE}/{{response:(?!input_tokens$)[^{{}}/]+}}"
MAX_BACKGROUND = 256  # responses that one router makes in the background at a time
RENEW_S = 1.0  # between two renewals of a lease, each of which notices that a client cancels
SHARE_S = 0.2  # between two writes of new events to the index
CANCEL_S = 5.0  # that a client waits for the end of a response that it cancels
POLL_S = 0.05
FAREWELL_S = 1.0  # for the last states of responses when the router stops
LIMIT, MAX_LIMIT = 20, 100  # items of a page

_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)

logger = logging.getLogger(__name__)


class ResponseRoutes:
    """The routes. `new_id` makes the ids of requests in the background."""

    def __init__(
        self, kept: KeptResponses, generation: GenerationRoutes, new_id: Callable[[], str]
    ) -> None:
        self._kept = kept
        self._generation = generation
        self._new_id = new_id
        self._making = DetachedWork()
        self._streams = ResponseStreams(kept, generation)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(ROUTE, self.create),
            web.post(INPUT_TOKENS, self.count_tokens),
            web.get(_ONE_ALONE, self.retrieve),
            web.delete(_ONE_ALONE, self.delete),
            web.post(CANCEL, self.cancel),
            web.get(INPUT_ITEMS, self.list_input),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        tenant = request[CONTEXT].tenant_name
        async with self._generation.intake.bodies.of(request, tenant) as body:
            if (last := last_event(request)) is not None:
                return await self._generation.resume(request, body, last)
            wish = self._generation.resumes.wish_of(request, ROUTE, body.data)
            call = await body.parsed(ResponseCall.parse)
            if wish is not None:
                _check_resumable(call)
            call = await self._continued(tenant, call)
            if call.keeps:
                self._kept.check_keeps(call.items)
            if not call.background:
                keep = partial(self._keep, tenant, call) if call.keeps else None
                return await self._generation.respond(request, body, call, keep=keep, wish=wish)
            begun = await self._start(call, request[CONTEXT])
        if call.options.stream:
            return await self._streams.send(request, tenant, begun.id, 0)
        return json_response(begun)

    async def count_tokens(self, request: web.Request) -> web.Response:
        tenant = request[CONTEXT].tenant_name
        async with self._generation.intake.bodies.of(request, tenant) as body:
            call = await self._continued(tenant, await body.parsed(ResponseCall.of_prompt))
            serving = self._generation.fleet.offers.choose(call.options.model)
            async with body.turn():
                ids = await tokenize_prompt(call, serving)
        return json_response(InputTokens(object="response.input_tokens", input_tokens=len(ids)))

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        stream, after = request.query.get("stream", "false"), request.query.get("starting_after")
        if stream not in ("true", "false"):
            raise InvalidRequest(f"stream is {stream!r}; use true or false", param="stream")
        if after is not None and (_NUMBER.fullmatch(after) is None or stream == "false"):
            raise InvalidRequest(
                f"starting_after is {after[:40]!r}; use the number of the last event that arrived,"
                " with stream=true",
                param="starting_after",
            )
        if stream == "true" and request.method == "GET":
            seen = 0 if after is None else int(after) + 1
            return await self._streams.send(request, *_named(request), seen)
        return json_response(await self._kept.read(*_named(request)))

    async def delete(self, request: web.Request) -> web.Response:
        tenant, id = _named(request)
        await self._kept.delete(tenant, id)
        return json_response(DeletedResponse(id=id, object="response", deleted=True))

    async def cancel(self, request: web.Request) -> web.Response:
        tenant, id = _named(request)
        response = await self._kept.read(tenant, id)
        if not response["background"]:
            raise InvalidRequest(
                f"response {id!r} was not made in the background, so it cannot be cancelled"
            )
        if response["status"] in UNFINISHED:
            await self._kept.cancel(tenant, id)
            until = self._generation.clock() + CANCEL_S
            while response["status"] in UNFINISHED and self._generation.clock() < until:
                await asyncio.sleep(POLL_S)
                response = await self._kept.read(tenant, id)
        return json_response(response)

    async def list_input(self, request: web.Request) -> web.Response:
        query = request.query
        limit, order = query.get("limit", f"{LIMIT}"), query.get("order", "desc")
        if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= MAX_LIMIT:
            raise InvalidRequest(f"limit is {limit!r}; use 1 to {MAX_LIMIT}", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order is {order!r}; use asc or desc", param="order")
        items = await self._kept.read_input(*_named(request))
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        start = 0
        if after := query.get("after", ""):
            if after not in ids:
                raise InvalidRequest(f"after is {after!r}; no item has this id", param="after")
            start = ids.index(after) + 1
        page = items[start : start + int(limit)]
        return json_response(
            InputItemList(
                object="list",
                data=page,
                first_id=page[0]["id"] if page else None,
                last_id=page[-1]["id"] if page else None,
                has_more=start + len(page) < len(items),
            )
        )

    async def shut_down(self) -> None:
        """Wait until the responses in the background have noted how they ended; their requests
        have been ended before."""
        await self._making.cancel_all(FAREWELL_S)
        await self._kept.close()

    # --- one response -----------------------------------------------------------------------------

    async def _continued(self, tenant: str, call: ResponseCall) -> ResponseCall:
        """The call after the response that it continues, if any."""
        if call.previous is None:
            return call
        return call.continued(await self._kept.read_conversation(tenant, call.previous))

    async def _keep(self, tenant: str, call: ResponseCall) -> None:
        """Keep the answer."""
        await self._kept.keep(tenant, call.answered[-1], call.items, call.log)

    # --- in the background ------------------------------------------------------------------------

    async def _start(self, call: ResponseCall, asked: RequestContext) -> Response:
        """Begin a response in the background; its first state."""
        if self._generation.draining:
            raise Unavailable("the router is shutting down; send the request again")
        if len(self._making) >= MAX_BACKGROUND:
            raise QueueFull(
                f"this router makes {MAX_BACKGROUND} responses in the background already; send the"
                " request again later"
            )
        context = RequestContext(
            self._new_id(),
            self._generation.clock(),
            RESPONSES,
            asked.client_id,
            tenant=asked.tenant,
        )
        response = call.response(
            CommonFields(
                id=RESPONSES.prefix + context.id,
                created=int(time.time()),
                model=self._model_name(call),
                system_fingerprint="",
            ),
            "queued",
        )
        call = replace(call, created=response.created_at)
        if call.log is not None:  # a client of the stream needs the id at once
            call.log.add(event_bytes(ResponseCreated(sequence_number=0, response=response)))
        tenant = context.tenant_name
        await self._kept.write(tenant, response, call.items, call.log)
        await self._kept.lease(tenant, response.id)
        self._making.start(self._make(call, context, response))
        return response

    def _model_name(self, call: ResponseCall) -> str:
        """The name of the model that serves the call. Raise NotFound for an unknown one."""
        try:
            return self._generation.fleet.offers.choose(call.options.model).name
        except Unavailable:  # the call waits for a node
            return call.options.model or ""

    async def _make(self, call: ResponseCall, context: RequestContext, response: Response) -> None:
        """Make a response in the background, and note how it ended."""
        tenant, id = context.tenant_name, response.id
        keep = partial(self._keep, tenant, call)
        work = asyncio.create_task(self._generation.ask(call, context, keep))
        sharing = None
        if call.log is not None:
            sharing = asyncio.create_task(self._share_events(tenant, id, call.log))
        try:
            cancelled = await self._watch(work, call, context, response)
            error = None if work.cancelled() else work.exception()
            if cancelled and work.cancelled():
                await self._note(tenant, call, response, "cancelled")
            elif error is not None:
                failure = InternalError("the router failed; its log has the cause").record()
                if isinstance(error, BatonError | RequestFailed):
                    failure = error_record(error)
                else:
                    logger.error("response %s failed", id, exc_info=error)
                failed = msgspec.structs.replace(response, error=error_of(failure))
                await self._note(tenant, call, failed, "failed")
            await self._kept.release(tenant, id)
        except Unavailable as error:
            logger.warning("response %s: %s", id, error)
        finally:
            work.cancel()
            if sharing is not None:
                sharing.cancel()

    async def _share_events(self, tenant: str, id: str, log: EventLog) -> None:
        """Write new events to the index until cancelled, for the clients of the stream."""
        known = len(log.data())
        while True:
            await asyncio.sleep(SHARE_S)
            data = log.data(known)
            try:
                if data and await self._kept.append_events(tenant, id, known, data):
                    known += len(data)
            except Unavailable as error:  # the next try, or the end of the response, has them
                logger.warning("events of response %s: %s", id, error)

    async def _watch(
        self,
        work: asyncio.Task[bytes],
        call: ResponseCall,
        context: RequestContext,
        response: Response,
    ) -> bool:
        """Renew the lease until the work is done. True: a client has cancelled it."""
        tenant, cancelled, noted = context.tenant_name, False, False
        while not work.done():
            await asyncio.wait({work}, timeout=RENEW_S)
            if work.done():
                break
            try:
                cancelled = await self._kept.lease(tenant, response.id)
                if cancelled:
                    work.cancel()
                elif context.in_flight and not noted:
                    noted = True
                    await self._note(tenant, call, response, "in_progress")
            except Unavailable as error:  # the lease may end; the answer is written all the same
                logger.warning("response %s: %s", response.id, error)
        return cancelled

    async def _note(
        self, tenant: str, call: ResponseCall, response: Response, status: ResponseStatus
    ) -> None:
        changed = msgspec.structs.replace(response, status=status)
        await self._kept.write(tenant, changed, call.items, call.log)


def _check_resumable(call: ResponseCall) -> None:
    """Raise InvalidRequest if another router could not continue the stream from its body alone."""
    if call.keeps:
        raise InvalidRequest(
            f"{RESUME_HEADER} keeps no response with store; leave out one of both", param="store"
        )
    if call.previous is not None:
        raise InvalidRequest(
            f"{RESUME_HEADER} needs the whole conversation in the body, and this one continues"
            f" {call.previous[:40]!r}; send its items as input, or leave the header out",
            param="previous_response_id",
        )


def _named(request: web.Request) -> tuple[str, str]:
    """The tenant, and the id of the response in the path."""
    return request[CONTEXT].tenant_name, request.match_info["response"]

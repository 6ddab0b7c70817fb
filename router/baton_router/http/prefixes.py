"""/prefixes: prompts whose KV all nodes keep in their caches until a time.

    POST /prefixes           pin the beginning of a chat or of a text; again: another end
    GET /prefixes            all of them, and how far each node is
    DELETE /prefixes/{id}    unpin one

In: authorized HTTP requests (see `app`). The body is that of a chat or of a completion, whose
prompt is rendered and tokenized as theirs, and the fields of PrefixFields. Out: changes of
PrefixPins, and an answer once a node has begun, or the reason of the last node that refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Literal

import msgspec
from aiohttp import web

from baton_kvstore.keys import LONGEST_PIN_S
from baton_protocol.errors import InvalidRequest, NotFound, Unavailable
from baton_protocol.link import PinState
from baton_protocol.store import MAX_PINS, PinnedPrefix
from baton_router.auth import Tenant, Tenants
from baton_router.http.generation import GenerationRoutes
from baton_router.http.json_response import json_response
from baton_router.http.observers import CONTEXT
from baton_router.nodes.pin_keeper import PinKeeper
from baton_router.nodes.prefix_pins import PrefixPins
from baton_router.openai.answers import Closed
from baton_router.openai.call import Call
from baton_router.openai.chat import ChatCall
from baton_router.openai.completions import CompletionCall
from baton_router.openai.fields.kinds import Json, integer, text
from baton_router.openai.fields.table import FieldTable, optional, read_fields, required
from baton_router.openai.json_body import decode_object
from baton_router.requests.tokenize import prepare

PREFIXES_PATH = "/prefixes"
MAX_NAME = 64
POLL_S = 0.02
ANSWER_S = 5.0  # a node reports within a step that it begins

logger = logging.getLogger(__name__)


class PrefixFields(FieldTable, route=PREFIXES_PATH, open=True):
    """The fields of the body beside those of a chat or of a completion."""

    ttl_s = required(integer(1, LONGEST_PIN_S), "seconds that nodes keep the prefix")
    tenant = optional(
        text(MAX_NAME), "whose requests find it, if tenants do not share KV", "the caller's"
    )


class PrefixNode(Closed):
    """`waiting`: the node was not asked, or has not answered yet. The others are as in the node's
    report; `reason` says why it is refused or released."""

    node: str
    state: PinState | Literal["waiting"]
    reason: str


class Prefix(Closed):
    """A pinned prefix. `tokens` fill whole blocks of the cache, and `chunks` of the store. `until`
    is in Unix seconds. `tenant` is null if all share it."""

    id: str
    model: str
    tenant: str | None
    tokens: int
    chunks: int
    until: int
    nodes: list[PrefixNode]


class PrefixList(Closed):
    prefixes: list[Prefix]


class PrefixRoutes:
    """The routes. `tenants` returns those of the keys as last read."""

    def __init__(
        self,
        pins: PrefixPins,
        keeper: PinKeeper,
        generation: GenerationRoutes,
        tenants: Callable[[], Tenants],
    ) -> None:
        self._pins = pins
        self._keeper = keeper
        self._generation = generation
        self._tenants = tenants

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(PREFIXES_PATH, self.pin),
            web.get(PREFIXES_PATH, self.list_all),
            web.delete(f"{PREFIXES_PATH}/{{id}}", self.unpin),
        ]

    async def pin(self, request: web.Request) -> web.Response:
        async with self._generation.intake.bodies.of(request, "") as body:
            given = await body.parsed(decode_object)
            record = await self._record(request, given)
        del given
        known = self._pins.find(record.id)
        if known is None and len(self._pins.pinned()) >= MAX_PINS:
            raise _refused(f"{MAX_PINS} prefixes are pinned, and there may be no more; delete one")
        self._pins.learn(record)
        await self._keeper.save(record)
        await self._wait_until_begun(record)
        logger.info("prefix %s of %d tokens is pinned", record.id, len(record.prompt_ids))
        return json_response(self._describe(record))

    async def list_all(self, request: web.Request) -> web.Response:
        return json_response(
            PrefixList(prefixes=[self._describe(each) for each in self._pins.pinned()])
        )

    async def unpin(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        record = self._pins.find(id)
        if record is None:
            raise NotFound(f"prefix {id!r} is not pinned; GET {PREFIXES_PATH} lists them")
        answer = self._describe(record)
        await self._keeper.save(self._pins.remove(record))
        logger.info("prefix %s is unpinned", id)
        return json_response(answer)

    async def _record(self, request: web.Request, given: Json) -> PinnedPrefix:
        """Render and tokenize the body's prompt. Raise InvalidRequest."""
        fields = read_fields(PrefixFields, given)
        tenant = self._tenant(request, fields.tenant)
        call = _call_of({name: given[name] for name in given if name not in PrefixFields.FIELDS})
        serving = self._generation.fleet.offers.choose(call.options.model)
        prompts = await prepare(
            *(call, serving, request[CONTEXT].id),
            tenant=tenant,
            deadline=self._generation.clock(),
            rng=self._generation.rng,
        )
        field, size = call.names.get("prompt", "prompt"), serving.sample.layout.block_size
        ids = prompts[0].request.prompt_ids
        if len(prompts) > 1:
            raise InvalidRequest("a prefix is one prompt; send one at a time", param=field)
        if len(ids) < size:
            raise InvalidRequest(
                f"the prefix has {len(ids)} tokens, and caches have whole blocks of {size}",
                param=field,
            )
        ids = ids[: len(ids) // size * size]
        name = tenant.name if tenant.salt else ""
        now = self._pins.now()
        return PinnedPrefix(
            id=_id_of(serving.name, name, ids),
            model=serving.name,
            tokenizer=serving.kind.tokenizer,
            tenant=name,
            prompt_ids=ids,
            until=int(now) + fields.ttl_s,
            changed=int(now * 1000),
        )

    def _tenant(self, request: web.Request, name: str | None) -> Tenant:
        """Whose requests find the prefix: by default the caller's."""
        caller = request[CONTEXT].tenant
        assert caller is not None, "the middleware sets the tenant"
        tenant = self._tenants().named(caller.name if name is None else name)
        if tenant is None:
            raise InvalidRequest(
                f"tenant {name!r} has no key here"
                if name
                else "name the tenant whose requests"
                " are to find the prefix: tenants share no KV here, and this key is of none",
                param="tenant",
            )
        return tenant

    async def _wait_until_begun(self, record: PinnedPrefix) -> None:
        """Wait until a node has begun. Raise InvalidRequest if all refuse, Unavailable if there is
        none that could."""
        until = self._generation.clock() + ANSWER_S
        while self._generation.clock() < until:
            self._pins.send_missing()
            reports = list(self._pins.reports(record).values())
            if any(
                report is not None and report.state in ("loading", "pinned") for report in reports
            ):
                return
            refusals = [report.reason for report in reports if report is not None]
            if len(refusals) == len(reports):
                await self._keeper.save(self._pins.remove(record))
                if not refusals:
                    raise Unavailable("no node is ready that can pin a prefix")
                raise _refused(f"no node pins it: {refusals[-1]}")
            await asyncio.sleep(POLL_S)

    def _describe(self, record: PinnedPrefix) -> Prefix:
        reports = self._pins.reports(record)
        sample = self._generation.fleet.view.sample()
        chunk = sample.report.layout.chunk_tokens if sample is not None else 0
        tokens = len(record.prompt_ids)
        return Prefix(
            id=record.id,
            model=record.model,
            tenant=record.tenant or None,
            tokens=tokens,
            chunks=tokens // chunk if chunk else 0,
            until=record.until,
            nodes=[
                PrefixNode(node=node, state="waiting", reason="")
                if report is None
                else PrefixNode(node=node, state=report.state, reason=report.reason)
                for node, report in reports.items()
            ],
        )


def _call_of(given: Json) -> Call:
    """The chat or completion that has this prompt. A chat's prefix ends with its last message."""
    fields = {**given, "max_tokens": 1}
    fields.pop("max_completion_tokens", None)
    if "messages" in fields:
        fields.setdefault("add_generation_prompt", False)
        return ChatCall.from_body(fields)
    return CompletionCall.from_body(fields)


def _id_of(model: str, tenant: str, ids: tuple[int, ...]) -> str:
    """The same prefix of the same tenant has one id, so that it can be renewed."""
    return hashlib.sha256(msgspec.msgpack.encode((model, tenant, ids))).hexdigest()[:16]


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="prefix_refused")

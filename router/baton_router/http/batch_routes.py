"""/v1/batches: requests of a file that run when the pool has room.

    POST /v1/batches                 queue a batch
    GET /v1/batches                  the tenant's batches, the newest first
    GET /v1/batches/{id}             one of them
    POST /v1/batches/{id}/cancel     start no more of its requests

In: aiohttp requests; the middleware has set their tenant. Out: OpenAI's objects. The routers of the
pool run the batches themselves (`batches/keeper`).
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from baton_protocol.errors import InvalidRequest
from baton_router.batches.files import Files
from baton_router.batches.journal import Journal
from baton_router.batches.records import BatchList
from baton_router.http.body_limits import BodyLimits
from baton_router.http.dialects import DIALECTS
from baton_router.http.file_routes import (
    EXPIRES_AFTER,
    no_file_store,
    read_page,
    tenant_of,
)
from baton_router.http.json_response import json_response
from baton_router.openai.fields.errors import show, wrong
from baton_router.openai.fields.kinds import ValueKind, choice, object_at, text
from baton_router.openai.fields.table import FieldTable, optional, read_fields, required
from baton_router.openai.json_body import decode_object, decode_optional_object

BATCHES_PATH = "/v1/batches"
MOST_LISTED = 100
USUALLY_LISTED = 20
MOST_PAIRS, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512  # of metadata
LONGEST_WINDOW_S = 30 * 86_400
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = r"[1-9][0-9]{0,6}[smhd]"


def _read_metadata(at: str, value: Any) -> dict[str, str]:
    given = object_at(at, value)
    if len(given) > MOST_PAIRS:
        raise InvalidRequest(f"{at} has {len(given)} pairs; at most {MOST_PAIRS}", param=at)
    for key, item in given.items():
        if not 0 < len(key) <= LONGEST_KEY:
            raise wrong(at, key, f"keys have 1 to {LONGEST_KEY} characters")
        if not isinstance(item, str) or len(item) > LONGEST_VALUE:
            raise wrong(f"{at}.{key}", item, f"use a string of up to {LONGEST_VALUE} characters")
    return given


METADATA = ValueKind(
    _read_metadata,
    {
        "type": "object",
        "maxProperties": MOST_PAIRS,
        "propertyNames": {"minLength": 1, "maxLength": LONGEST_KEY},
        "additionalProperties": {"type": "string", "maxLength": LONGEST_VALUE},
    },
)


class BatchFields(FieldTable, route=BATCHES_PATH):
    """The fields of a batch."""

    input_file_id = required(text(64), "a file with the purpose `batch`")
    endpoint = required(choice(*DIALECTS), "the route of all its requests")
    completion_window = required(
        text(8, _WINDOW, "use a number and s, m, h or d, such as 24h"),
        "a number and `s`, `m`, `h` or `d`, up to 30 days: what has not run by then expires",
    )
    metadata = optional(METADATA, "pairs of texts that the batch repeats")
    output_expires_after = optional(
        EXPIRES_AFTER,
        "when the files with its answers expire",
        "`--file-ttl` after their creation",
    )


class BatchRoutes:
    """The routes. Without a store (`journal` None), each answers with how to get one."""

    def __init__(self, files: Files | None, journal: Journal | None, bodies: BodyLimits) -> None:
        self._files = files
        self._journal = journal
        self._bodies = bodies

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(BATCHES_PATH, self.create),
            web.get(BATCHES_PATH, self.list_batches),
            web.get(f"{BATCHES_PATH}/{{id}}", self.describe),
            web.post(f"{BATCHES_PATH}/{{id}}/cancel", self.cancel),
        ]

    async def create(self, request: web.Request) -> web.Response:
        files, journal = self._parts()
        tenant = tenant_of(request)
        async with self._bodies.of(request, tenant) as body:
            fields = read_fields(BatchFields, await body.parsed(decode_object))
        window = fields.completion_window
        window_s = int(window[:-1]) * _UNITS[window[-1]]
        if window_s > LONGEST_WINDOW_S:
            raise wrong("completion_window", window, "use up to 30 days, 30d")
        file = await files.find(tenant, fields.input_file_id)
        if file.purpose != "batch":
            raise InvalidRequest(
                f"file {file.id} has the purpose {file.purpose}; upload one with the purpose batch",
                param="input_file_id",
            )
        expiry = fields.output_expires_after
        batch = await journal.add(
            tenant,
            endpoint=fields.endpoint,
            input_file_id=file.id,
            input_bytes=file.bytes,
            window=window,
            window_s=window_s,
            metadata=fields.metadata,
            output_ttl_s=files.limits.ttl_s if expiry is None else expiry,
        )
        return json_response(batch)

    async def list_batches(self, request: web.Request) -> web.Response:
        _, journal = self._parts()
        tenant = tenant_of(request)
        page = read_page(request, MOST_LISTED, USUALLY_LISTED)
        ids, more = page.of(await journal.ids(tenant))
        batches = await journal.describe_all(tenant, ids)
        return json_response(
            BatchList(
                object="list",
                data=batches,
                first_id=batches[0].id if batches else None,
                last_id=batches[-1].id if batches else None,
                has_more=more,
            )
        )

    async def describe(self, request: web.Request) -> web.Response:
        _, journal = self._parts()
        state = await journal.find(tenant_of(request), request.match_info["id"])
        return json_response(await journal.describe(state))

    async def cancel(self, request: web.Request) -> web.Response:
        _, journal = self._parts()
        tenant, id = tenant_of(request), request.match_info["id"]
        given = decode_optional_object(await self._bodies.read(request))
        if given:
            raise InvalidRequest(f"the body is {show(given)}; cancelling needs none")
        await journal.cancel(await journal.find(tenant, id))
        return json_response(await journal.describe(await journal.find(tenant, id)))

    def _parts(self) -> tuple[Files, Journal]:
        if self._files is None or self._journal is None:
            raise no_file_store()
        return self._files, self._journal

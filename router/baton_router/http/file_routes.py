"""/v1/files: inputs of batches, and their answers.

    POST /v1/files                   upload a file
    GET /v1/files                    the tenant's files
    GET /v1/files/{id}               one of them
    GET /v1/files/{id}/content       its bytes
    DELETE /v1/files/{id}            delete it

In: aiohttp requests; the middleware has set their tenant. An upload is a form of type
multipart/form-data; its file is stored as it arrives, so memory holds none. Out: OpenAI's objects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from baton_protocol.errors import BodyTimeout, InvalidRequest, MalformedBody, NotFound, TooLarge
from baton_router.batches.files import Files, WrittenBytes
from baton_router.batches.object_store import ObjectStoreFailed
from baton_router.batches.records import FileDeleted, FileList
from baton_router.http.json_response import json_response
from baton_router.http.media_types import BYTES_TYPE, FORM_TYPE
from baton_router.http.observers import CONTEXT
from baton_router.openai.fields.errors import show, wrong
from baton_router.openai.fields.kinds import Json, ValueKind, choice, integer, object_at
from baton_router.openai.fields.table import FieldTable, optional, read_fields, required, schema_of
from baton_router.settings import RouterSettings

T = TypeVar("T")
FILES_PATH = "/v1/files"
PURPOSES = ("batch", "batch_output")
MOST_LISTED = 10_000
CHUNK = 1 << 20  # bytes read or written at a time
SHORTEST_S, LONGEST_S = 3600, 30 * 86_400  # lifetime of a file
MOST_PARTS = 16  # of a form
LONGEST_PART = 1024  # bytes of a form's other parts


# What aiohttp raises for bytes that are no form.
_NO_FORM = (ValueError, RuntimeError, web.RequestPayloadError, HttpProcessingError)


class ExpiryFields(FieldTable):
    """The members of `expires_after`."""

    anchor = required(choice("created_at"), "from when on the seconds count")
    seconds = required(integer(SHORTEST_S, LONGEST_S), "lifetime of the file")


def _read_expires_after(at: str, value: Any) -> int:
    """Seconds that a file lives."""
    return read_fields(ExpiryFields, object_at(at, value), at).seconds


# Read as the seconds that a file lives.
EXPIRES_AFTER = ValueKind(_read_expires_after, schema_of(ExpiryFields), ExpiryFields)


def _read_bytes(at: str, value: Any) -> WrittenBytes:
    if not isinstance(value, WrittenBytes):
        raise wrong(at, value, "it must be a file, with a file name")
    return value


class FileFields(FieldTable, route=FILES_PATH):
    """The fields of an upload."""

    file = required(
        ValueKind(_read_bytes, {"type": "string", "format": "binary"}),
        "the bytes; a batch's input is JSON lines ([below](batches.md#input))",
    )
    purpose = required(choice("batch"), "what the file is for")
    expires_after = optional(
        EXPIRES_AFTER,
        "when it expires",
        "`--file-ttl` after its creation",
    )


@dataclass(frozen=True, slots=True)
class Page:
    """What part of a list a client asks for: `limit` items after the item `after`."""

    limit: int
    after: str | None

    def of(self, ids: Sequence[str]) -> tuple[list[str], bool]:
        """The page's ids, and whether more follow. Raise InvalidRequest for an unknown `after`."""
        begin = 0
        if self.after is not None:
            if self.after not in ids:
                raise wrong("after", self.after, "it must be the id of an item of the list")
            begin = ids.index(self.after) + 1
        return list(ids[begin : begin + self.limit]), begin + self.limit < len(ids)


class FileRoutes:
    """The routes. Without a store (`files` None), each answers with how to get one."""

    def __init__(self, files: Files | None, settings: RouterSettings) -> None:
        self._files = files
        self._settings = settings

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(FILES_PATH, self.upload),
            web.get(FILES_PATH, self.list_files),
            web.get(f"{FILES_PATH}/{{id}}", self.describe),
            web.get(f"{FILES_PATH}/{{id}}/content", self.content),
            web.delete(f"{FILES_PATH}/{{id}}", self.delete),
        ]

    async def upload(self, request: web.Request) -> web.Response:
        files, tenant = self._store(), tenant_of(request)
        if request.content_type != FORM_TYPE:
            raise InvalidRequest(
                f"an upload is a form: send it with 'Content-Type: {FORM_TYPE}'",
                code="unsupported_content_type",
            )
        form = _Form(files, tenant, self._settings)
        try:
            try:
                given = await form.read(request)
            except _NO_FORM as error:
                reason = str(error).strip().rpartition("\n")[2][:200] or "it breaks off"
                raise MalformedBody(f"the form cannot be read: {reason}") from error
            fields = read_fields(FileFields, given)
            written = fields.file
            file = files.describe(written, form.name, "batch", fields.expires_after)
            await files.publish(tenant, file)
        except BaseException:
            if form.written is not None:
                await asyncio.shield(files.discard(tenant, form.written))
            raise
        return json_response(file)

    async def list_files(self, request: web.Request) -> web.Response:
        files = self._store()
        page = read_page(request, MOST_LISTED, MOST_LISTED)
        purpose = _query_choice(request, "purpose", PURPOSES)
        order = _query_choice(request, "order", ("asc", "desc"))
        found = {
            file.id: file
            for file in await files.list_files(tenant_of(request))
            if purpose in (None, file.purpose)
        }
        ids, more = page.of(list(found) if order == "asc" else list(found)[::-1])
        return json_response(
            FileList(
                object="list",
                data=[found[id] for id in ids],
                first_id=ids[0] if ids else None,
                last_id=ids[-1] if ids else None,
                has_more=more,
            )
        )

    async def describe(self, request: web.Request) -> web.Response:
        return json_response(await self._store().find(tenant_of(request), request.match_info["id"]))

    async def content(self, request: web.Request) -> web.StreamResponse:
        files, tenant = self._store(), tenant_of(request)
        file = await files.find(tenant, request.match_info["id"])
        first = await files.read_range(tenant, file.id, 0, CHUNK) if file.bytes else b""
        if first is None:
            raise ObjectStoreFailed(f"the bytes of {file.id} are missing")
        # A browser must never show what a client has uploaded.
        headers = {"Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff"}
        response = web.StreamResponse(headers=headers)
        response.content_type, response.content_length = BYTES_TYPE, file.bytes
        await response.prepare(request)
        chunk, at = first, 0
        while chunk:
            await response.write(chunk)
            at += len(chunk)
            if at >= file.bytes:
                break
            # A failure from here on breaks the connection: the client sees that bytes are missing.
            chunk = await files.read_range(tenant, file.id, at, CHUNK) or b""
        if at < file.bytes and request.transport is not None:
            request.transport.close()
            return response
        await response.write_eof()
        return response

    async def delete(self, request: web.Request) -> web.Response:
        files, tenant = self._store(), tenant_of(request)
        file = await files.find(tenant, request.match_info["id"])
        await files.delete(tenant, file.id)
        return json_response(FileDeleted(id=file.id, object="file", deleted=True))

    def _store(self) -> Files:
        if self._files is None:
            raise no_file_store()
        return self._files


class _Form:
    """One upload. `written` are its file's bytes, once they are there; `name` is the file's."""

    def __init__(self, files: Files, tenant: str, settings: RouterSettings) -> None:
        self.written: WrittenBytes | None = None
        self.name = ""
        self._files = files
        self._tenant = tenant
        self._settings = settings
        self._size = 0
        self._waited_s = 0.0  # for the client's bytes

    async def read(self, request: web.Request) -> Json:
        """The form's fields. Raise BatonError, and aiohttp's errors for what is no form."""
        parts = await request.multipart()
        given: Json = {}
        for _ in range(MOST_PARTS):
            part = await self._in_time(parts)
            if part is None:
                return given
            if isinstance(part, MultipartReader) or not part.name:
                raise MalformedBody("a part of the form has no name, or is a form itself")
            name = _plain(part.name)
            if name in given:
                raise InvalidRequest(f"the form has {show(name)} twice", param=name)
            if name == "file" and part.filename is not None:
                _check_purpose(given)
                self.name = _plain(part.filename)
                self.written = await self._files.receive(self._tenant, self._chunks(part))
                given["file"] = self.written
            else:
                _add_field(given, name, await self._text(part, name))
        raise MalformedBody(f"the form has more than {MOST_PARTS} parts")

    async def _chunks(self, part: BodyPartReader) -> AsyncIterator[bytes]:
        while chunk := await self._chunk(part):
            yield chunk

    async def _text(self, part: BodyPartReader, name: str) -> str:
        data = b""
        while chunk := await self._chunk(part):
            data += chunk
            if len(data) > LONGEST_PART:
                raise TooLarge(f"{show(name)} has more than {LONGEST_PART} bytes")
        return data.decode()

    async def _chunk(self, part: BodyPartReader) -> bytes:
        """The next bytes of a part. Raise BodyTimeout if they come too slowly."""
        loop, settings = asyncio.get_running_loop(), self._settings
        since = loop.time()
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                chunk: bytes = await part.read_chunk(CHUNK)
        except TimeoutError:
            raise self._too_slow() from None
        self._waited_s += loop.time() - since  # the time that the store takes is not the client's
        self._size += len(chunk)
        if self._waited_s > self._size / settings.body_bytes_per_s + settings.body_timeout_s:
            raise self._too_slow()
        return chunk

    async def _in_time(self, parts: MultipartReader) -> MultipartReader | BodyPartReader | None:
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await parts.next()
        except TimeoutError:
            raise self._too_slow() from None

    def _too_slow(self) -> BodyTimeout:
        return BodyTimeout(
            f"the form did not arrive in time: {self._size} bytes arrived; send it without pauses "
            f"of {self._settings.body_timeout_s:g} s, at {self._settings.body_bytes_per_s} bytes "
            "per second or more"
        )


def tenant_of(request: web.Request) -> str:
    return request[CONTEXT].tenant_name


def no_file_store() -> NotFound:
    return NotFound(
        "this router keeps no files; start it with --file-store, and a folder or a bucket",
        code="no_file_store",
    )


def read_page(request: web.Request, most: int, usual: int) -> Page:
    """The page that a list's query asks for. Raise InvalidRequest."""
    given = _query(request, "limit")
    if given is None:
        return Page(usual, _query(request, "after"))
    limit = int(given) if given.isascii() and given.isdigit() and len(given) < 9 else 0
    if not 0 < limit <= most:
        raise wrong("limit", given, f"use 1 to {most}")
    return Page(limit, _query(request, "after"))


def _query(request: web.Request, name: str) -> str | None:
    values = request.query.getall(name, [])
    if len(values) > 1:
        raise wrong(name, values, "give one value")
    return values[0] if values else None


def _query_choice(request: web.Request, name: str, allowed: Sequence[str]) -> str | None:
    value = _query(request, name)
    if value is not None and value not in allowed:
        raise wrong(name, value, f"use one of {', '.join(allowed)}")
    return value


def _plain(header: str) -> str:
    """A text of a header that can be written again: it may hold bytes that are not UTF-8."""
    return header.encode(errors="replace").decode()


def _check_purpose(given: Mapping[str, Any]) -> None:
    """Refuse a wrong purpose that comes before the file without reading the file."""
    if "purpose" in given:
        FileFields.READERS["purpose"]("purpose", given["purpose"])


def _add_field(given: Json, name: str, value: str) -> None:
    """Add a field of a form. `expires_after` may be JSON, or one field for each member."""
    outer, bracket, inner = name.partition("[")
    if outer == "expires_after" and bracket and inner.endswith("]"):
        whole = value.isascii() and value.isdigit() and len(value) < 19
        member: Any = int(value) if whole else value
        given.setdefault(outer, {})[inner[:-1]] = member
    elif name == "expires_after":
        try:
            given[name] = msgspec.json.decode(value, type=dict[str, Any])  # a form has no null
        except msgspec.MsgspecError:
            raise wrong(name, value, "it must be a JSON object") from None
    else:
        given[name] = value

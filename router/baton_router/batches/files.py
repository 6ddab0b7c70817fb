"""The files of tenants: uploaded inputs of batches, and the answers of batches.

In: bytes as they arrive. Out: files that only their tenant finds, until they expire or are deleted.
A file's bytes are written first, then its record; without a record there is no file. `sweep`
deletes what has expired, and bytes whose record never came.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from baton_protocol.errors import InvalidRequest, NotFound, TooLarge
from baton_router.batches.object_store import ObjectStore, ObjectStoreFailed
from baton_router.batches.records import FileObject, Purpose

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)
LONGEST_NAME = 255
READ_AT_ONCE = 16  # records
# An upload may take hours at the slowest rate that the router allows.
UPLOAD_S = 86_400.0
_ID = re.compile(r"[0-9a-f]{24}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """The most bytes of one file, and the most bytes and files of one tenant. A file lives for
    `ttl_s` seconds unless its upload says otherwise."""

    file_bytes: int
    tenant_bytes: int
    tenant_files: int
    ttl_s: int


@dataclass(frozen=True, slots=True)
class WrittenBytes:
    """Bytes that are in the store, without a record yet."""

    id: str
    size: int


class Files:
    """`now` returns Unix seconds."""

    def __init__(self, store: ObjectStore, limits: FileLimits, now: Callable[[], float]) -> None:
        self.limits = limits
        self.store = store
        self._now = now
        self._arriving: dict[str, _Arriving] = {}  # by tenant

    # --- writing ----------------------------------------------------------------------------------

    async def receive(self, tenant: str, chunks: AsyncIterator[bytes]) -> WrittenBytes:
        """Write the bytes of an upload. Raise TooLarge, and InvalidRequest for a tenant that has
        all the files that it may have."""
        stored = await self.store.list_objects(_data_prefix(tenant))
        arriving = self._arriving.setdefault(tenant, _Arriving())
        arriving.files += 1
        try:
            if len(stored) + arriving.files > self.limits.tenant_files:
                raise InvalidRequest(
                    f"this tenant may have {self.limits.tenant_files} files, and has them; "
                    "delete some",
                    code="too_many_files",
                )
            room = self.limits.tenant_bytes - sum(each.size for each in stored)
            return await self.write(tenant, self._bounded(chunks, arriving, room))
        finally:
            arriving.files -= 1
            if not arriving.files:
                del self._arriving[tenant]

    async def write(self, tenant: str, chunks: AsyncIterator[bytes]) -> WrittenBytes:
        """Write bytes of a file that counts against no limit."""
        id, size = new_id("file-", self._now()), 0

        async def counted() -> AsyncIterator[bytes]:
            nonlocal size
            async for chunk in chunks:
                size += len(chunk)
                yield chunk

        await self.store.write(_data_key(tenant, id), counted())
        return WrittenBytes(id, size)

    async def discard(self, tenant: str, written: WrittenBytes) -> None:
        """Delete bytes that get no record."""
        await self.store.delete(_data_key(tenant, written.id))

    def describe(
        self, written: WrittenBytes, name: str, purpose: Purpose, ttl_s: int | None = None
    ) -> FileObject:
        """The record of written bytes."""
        now = int(self._now())
        return FileObject(
            id=written.id,
            object="file",
            bytes=written.size,
            created_at=now,
            expires_at=now + (self.limits.ttl_s if ttl_s is None else ttl_s),
            filename=safe_name(name),
            purpose=purpose,
            status="processed",
        )

    async def publish(self, tenant: str, file: FileObject) -> None:
        """Write a file's record: from now on, its tenant finds it."""
        await self.store.create(_record_key(tenant, file.id), msgspec.json.encode(file))

    # --- reading ----------------------------------------------------------------------------------

    async def find(self, tenant: str, id: str) -> FileObject:
        """Raise NotFound for an unknown or expired file, and for another tenant's."""
        file = await self._read(tenant, id) if is_id(id, "file-") else None
        if file is None:
            raise NotFound(f"file {id[:64]!r} does not exist; GET /v1/files lists yours")
        return file

    async def list_files(self, tenant: str) -> list[FileObject]:
        """The tenant's files, the oldest first."""
        stored = await self.store.list_objects(_record_prefix(tenant))
        ids = [each.key.rpartition("/")[2] for each in stored]
        files = await read_all(lambda id: self._read(tenant, id), ids)
        return [file for file in files if file is not None]

    async def read_range(self, tenant: str, id: str, start: int, size: int) -> bytes | None:
        """Up to `size` of the file's bytes; None if it is gone."""
        return await self.store.read_range(_data_key(tenant, id), start, size)

    async def delete(self, tenant: str, id: str) -> None:
        await self.store.delete(_record_key(tenant, id))
        await self.store.delete(_data_key(tenant, id))

    async def sweep(self) -> None:
        """Delete expired files, and bytes whose upload broke off."""
        now = self._now()
        kept = set()
        for each in await self.store.list_objects("files"):
            owner_and_id = each.key.partition("/")[2]
            value = await self.store.read(each.key)
            if value is None or decode(value, FileObject).expires_at > now:
                kept.add(owner_and_id)
                continue
            await self.store.delete(each.key)
            await self.store.delete(f"data/{owner_and_id}")
        for each in await self.store.list_objects("data"):
            if each.key.partition("/")[2] not in kept and each.changed < now - UPLOAD_S:
                await self.store.delete(each.key)
        await self.store.delete_rests(now - UPLOAD_S)

    async def _read(self, tenant: str, id: str) -> FileObject | None:
        value = await self.store.read(_record_key(tenant, id))
        if value is None:
            return None
        file = decode(value, FileObject)
        return file if file.expires_at > self._now() else None

    async def _bounded(
        self, chunks: AsyncIterator[bytes], arriving: _Arriving, room: int
    ) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in chunks:
                size += len(chunk)
                arriving.bytes += len(chunk)
                if size > self.limits.file_bytes:
                    raise TooLarge(f"the file exceeds the limit of {self.limits.file_bytes} bytes")
                if arriving.bytes > room:
                    raise TooLarge(
                        f"this tenant's files would exceed {self.limits.tenant_bytes} bytes "
                        "together; delete some"
                    )
                yield chunk
        finally:
            arriving.bytes -= size


@dataclass(slots=True)
class _Arriving:
    """A tenant's uploads that have not ended."""

    files: int = 0
    bytes: int = 0


def decode(value: bytes, record: type[R]) -> R:
    """A record of the store. Raise ObjectStoreFailed for one that this router cannot read."""
    try:
        return msgspec.json.decode(value, type=record)
    except msgspec.MsgspecError as error:
        raise ObjectStoreFailed(f"a {record.__name__} cannot be read: {error}") from error


def new_id(prefix: str, now: float) -> str:
    """An id that sorts by time."""
    return f"{prefix}{int(now * 1000) & (1 << 48) - 1:012x}{secrets.token_hex(6)}"


def is_id(text: str, prefix: str) -> bool:
    return text.startswith(prefix) and _ID.fullmatch(text[len(prefix) :]) is not None


def tenant_folder(tenant: str) -> str:
    """The word of the tenant in keys: its name may be empty, or begin with a dot."""
    return f"t-{tenant}"


def safe_name(name: str) -> str:
    """The last part of a client's file name, without what no file name should hold."""
    last = re.split(r"[/\\]", name)[-1]
    return "".join(char for char in last if char.isprintable())[:LONGEST_NAME] or "file"


async def read_all(read: Callable[[str], Awaitable[T]], ids: Iterable[str]) -> list[T]:
    """Read some at a time."""
    turns = asyncio.Semaphore(READ_AT_ONCE)

    async def one(id: str) -> T:
        async with turns:
            return await read(id)

    return list(await asyncio.gather(*map(one, ids)))


def _record_prefix(tenant: str) -> str:
    return f"files/{tenant_folder(tenant)}"


def _record_key(tenant: str, id: str) -> str:
    return f"{_record_prefix(tenant)}/{id}"


def _data_prefix(tenant: str) -> str:
    return f"data/{tenant_folder(tenant)}"


def _data_key(tenant: str, id: str) -> str:
    return f"{_data_prefix(tenant)}/{id}"

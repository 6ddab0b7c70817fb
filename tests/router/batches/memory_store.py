"""Objects in memory, in a store whose user may be killed between any two operations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton_router.batches.object_store import StoredObject


class Killed(Exception):
    """The process has ended here."""


class MemoryStore:
    """`objects` outlive the process, of which `dies_in` more operations succeed."""

    def __init__(self, objects: dict[str, bytes], dies_in: float = float("inf")) -> None:
        self.objects = objects
        self.dies_in = dies_in

    async def create(self, key: str, data: bytes) -> bool:
        await self._live()
        return self.objects.setdefault(key, data) is data

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        data = b"".join([chunk async for chunk in chunks])
        await self._live()
        self.objects[key] = data

    async def read(self, key: str) -> bytes | None:
        await self._live()
        return self.objects.get(key)

    async def read_range(self, key: str, start: int, size: int) -> bytes | None:
        await self._live()
        data = self.objects.get(key)
        return None if data is None else data[start : start + size]

    async def list_objects(self, prefix: str) -> list[StoredObject]:
        await self._live()
        found = sorted(key for key in self.objects if key.startswith(f"{prefix}/"))
        return [StoredObject(key, len(self.objects[key]), 0.0) for key in found]

    async def delete(self, key: str) -> None:
        await self._live()
        self.objects.pop(key, None)

    async def delete_rests(self, older_than: float) -> None:
        await self._live()

    async def _live(self) -> None:
        await asyncio.sleep(0)  # let another router do something here
        self.dies_in -= 1
        if self.dies_in < 0:
            raise Killed

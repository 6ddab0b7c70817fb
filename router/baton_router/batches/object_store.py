"""Where files and batches are kept: objects by key, in a folder or in a bucket.

Keys are words of letters, digits, `.`, `_` and `-`, joined by `/`, and no word begins with a dot.
An object is whole or not there: a write that breaks off leaves nothing that a reader sees. All
routers of a pool use the same store, so what must happen once is an object that only one of them
can create.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from baton_protocol.errors import Unavailable

KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")


logger = logging.getLogger(__name__)


class ObjectStoreFailed(Unavailable):
    """The store cannot be read or written now. The log has the reason, which may hold addresses."""

    def __init__(self, reason: object) -> None:
        super().__init__(
            "the router cannot use its file store now; its log has the reason; send the request "
            "again later",
            code="file_store_failed",
        )
        logger.warning("the file store fails: %s", reason)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in a list. `changed` is in Unix seconds."""

    key: str
    size: int
    changed: float


class ObjectStore(Protocol):
    """Each method raises ObjectStoreFailed."""

    async def create(self, key: str, data: bytes) -> bool:
        """Write an object durably. False, without effect, if there is one of this key."""
        ...

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """Write an object durably, or replace it, once all chunks are there. An error that the
        iterator raises leaves no object and is raised again."""
        ...

    async def read(self, key: str) -> bytes | None:
        """The object's bytes; None if there is none."""
        ...

    async def read_range(self, key: str, start: int, size: int) -> bytes | None:
        """Up to `size` bytes from `start` on; None if there is no object."""
        ...

    async def list_objects(self, prefix: str) -> list[StoredObject]:
        """The objects whose keys begin with these words, `prefix` and a slash, sorted by key."""
        ...

    async def delete(self, key: str) -> None:
        """Delete an object. No effect if there is none."""
        ...

    async def delete_rests(self, older_than: float) -> None:
        """Delete what broken-off writes left, if it has not changed since this Unix time."""
        ...


def checked_key(key: str) -> str:
    """The key, if it can leave no folder."""
    assert KEY.fullmatch(key), f"{key!r} is no key"
    return key

"""Objects in a bucket of S3 or of a server that speaks its protocol.

The address is `s3://BUCKET/PREFIX`. Login, region and endpoint come from the usual variables, such
as AWS_ACCESS_KEY_ID, AWS_REGION and AWS_ENDPOINT_URL. The server must support conditional writes
(`If-None-Match`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from datetime import timedelta
from typing import TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from baton_router.batches.object_store import ObjectStoreFailed, StoredObject, checked_key
from baton_router.errors import StartError

T = TypeVar("T")
PART = 8 << 20  # bytes of one part of a large object's upload
TIMEOUT = "60s"
RETRY_S = 20
NO_BUCKET = "NoSuchBucket"


class BucketStore:
    """The store in a bucket. Raise StartError if the address is wrong."""

    def __init__(self, url: str) -> None:
        try:
            # Plain HTTP is what servers inside a cluster speak.
            self._store = S3Store.from_url(
                url,
                client_options={"allow_http": True, "timeout": TIMEOUT},
                retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=RETRY_S)},
            )
        except BaseError as error:
            raise StartError(f"--file-store {url}: {_reason(error)}") from None

    async def create(self, key: str, data: bytes) -> bool:
        try:
            await obstore.put_async(self._store, checked_key(key), data, mode="create")
        except AlreadyExistsError:
            return False
        except (BaseError, FileNotFoundError) as error:
            raise ObjectStoreFailed(_reason(error)) from error
        return True

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        failure: list[BaseException] = []

        async def watched() -> AsyncIterator[bytes]:
            try:
                async for chunk in chunks:
                    yield chunk
            except BaseException as error:
                failure.append(error)
                raise

        try:
            await obstore.put_async(
                self._store, checked_key(key), watched(), chunk_size=PART, use_multipart=True
            )
        except BaseException as error:
            if failure:
                raise failure[0] from None
            if isinstance(error, BaseError | FileNotFoundError):
                raise ObjectStoreFailed(_reason(error)) from error
            raise

    async def read(self, key: str) -> bytes | None:
        async def whole() -> bytes:
            found = await obstore.get_async(self._store, checked_key(key))
            return bytes(await found.bytes_async())

        return await self._found(whole())

    async def read_range(self, key: str, start: int, size: int) -> bytes | None:
        async def part() -> bytes:
            found = await obstore.get_range_async(
                self._store, checked_key(key), start=start, length=size
            )
            return bytes(found)

        return await self._found(part())

    async def list_objects(self, prefix: str) -> list[StoredObject]:
        found = []
        try:
            async for page in obstore.list(self._store, checked_key(prefix)):
                found += [
                    StoredObject(each["path"], each["size"], each["last_modified"].timestamp())
                    for each in page
                ]
        except BaseError as error:
            raise ObjectStoreFailed(_reason(error)) from error
        return sorted(found, key=lambda each: each.key)

    async def delete(self, key: str) -> None:
        try:
            await obstore.delete_async(self._store, checked_key(key))
        except FileNotFoundError:
            return
        except BaseError as error:
            raise ObjectStoreFailed(_reason(error)) from error

    async def delete_rests(self, older_than: float) -> None:
        """A bucket shows nothing of a broken-off upload; its own rules delete it."""

    async def _found(self, reading: Awaitable[bytes]) -> bytes | None:
        try:
            return await reading
        except FileNotFoundError as error:
            if NO_BUCKET in str(error):
                raise ObjectStoreFailed(_reason(error)) from error
            return None
        except BaseError as error:
            raise ObjectStoreFailed(_reason(error)) from error


def _reason(error: Exception) -> str:
    """One line: the libraries add the request's whole history."""
    return str(error).strip().partition("\n")[0][:200]

"""Objects in a folder: one file each, written beside its place, synced and renamed.

The folder may be a volume that several machines mount. Renames and hard links are the operations
that such volumes do at once. File operations block, so they run in threads.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TypeVar

from baton_router.batches.object_store import ObjectStoreFailed, StoredObject, checked_key
from baton_router.errors import StartError

T = TypeVar("T")
UNFINISHED = ".unfinished"  # no key begins so


class FolderStore:
    """The store in a folder, which is made if it is missing. Raise StartError if that fails."""

    def __init__(self, path: str) -> None:
        self._folder = Path(path).absolute()
        self._unfinished = self._folder / UNFINISHED
        try:
            self._unfinished.mkdir(parents=True, exist_ok=True)
            probe = self._new_path()
            with _new_file(probe):
                probe.unlink()
        except OSError as error:
            raise StartError(
                f"--file-store {path}: cannot write there: {error.strerror or error}"
            ) from None

    async def create(self, key: str, data: bytes) -> bool:
        return await self._in_thread(partial(self._create, self._path(key), data))

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        target, path = self._path(key), self._new_path()
        file = await self._in_thread(partial(_new_file, path))
        try:
            async for chunk in chunks:
                await self._in_thread(partial(_write_all, file, chunk))
            await self._in_thread(partial(_finish, file, path, target))
        finally:
            file.close()
            path.unlink(missing_ok=True)

    async def read(self, key: str) -> bytes | None:
        return await self._in_thread(partial(_read, self._path(key), 0, -1))

    async def read_range(self, key: str, start: int, size: int) -> bytes | None:
        return await self._in_thread(partial(_read, self._path(key), start, size))

    async def list_objects(self, prefix: str) -> list[StoredObject]:
        return await self._in_thread(partial(self._list, self._path(prefix)))

    async def delete(self, key: str) -> None:
        await self._in_thread(partial(self._delete, self._path(key)))

    async def delete_rests(self, older_than: float) -> None:
        await self._in_thread(partial(self._delete_rests, older_than))

    def _path(self, key: str) -> Path:
        return self._folder / checked_key(key)

    def _new_path(self) -> Path:
        return self._unfinished / secrets.token_hex(16)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise ObjectStoreFailed(error) from error

    def _create(self, target: Path, data: bytes) -> bool:
        path = self._new_path()
        with _new_file(path) as file:
            try:
                _write_all(file, data)
                _sync(file)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, target)
            except FileExistsError:
                return False
            finally:
                path.unlink(missing_ok=True)
        _sync_folder(target.parent)
        return True

    def _list(self, folder: Path) -> list[StoredObject]:
        found = []
        for parent, _, names in os.walk(folder):
            for name in names:
                path = Path(parent, name)
                try:
                    status = path.stat()
                except FileNotFoundError:  # deleted since
                    continue
                key = path.relative_to(self._folder).as_posix()
                found.append(StoredObject(key, status.st_size, status.st_mtime))
        return sorted(found, key=lambda each: each.key)

    def _delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == self._folder:
                return
            try:
                parent.rmdir()
            except OSError:  # it holds other objects
                return

    def _delete_rests(self, older_than: float) -> None:
        for path in self._unfinished.iterdir():
            try:
                if path.stat().st_mtime < older_than:
                    path.unlink()
            except FileNotFoundError:  # its write has ended
                continue


def _new_file(path: Path) -> FileIO:
    return open(path, "xb", buffering=0)


def _finish(file: FileIO, path: Path, target: Path) -> None:
    _sync(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(path, target)
    _sync_folder(target.parent)


def _write_all(file: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _sync(file: FileIO) -> None:
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, start: int, size: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(size)
    except (FileNotFoundError, NotADirectoryError):
        return None

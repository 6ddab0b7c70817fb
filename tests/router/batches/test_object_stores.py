"""Objects in a folder and in a bucket: whole or not there, created once, listed by prefix."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton_router.batches.object_store import ObjectStore, ObjectStoreFailed
from baton_router.batches.open_store import open_store
from baton_router.errors import StartError
from tests.support.stores.s3_server import BUCKET, s3_server, use_server

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture(params=["folder", "bucket"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ObjectStore:
    if request.param == "folder":
        return open_store(str(tmp_path / "new" / "folder"))
    use_server(monkeypatch, request.getfixturevalue("server"))
    return open_store(f"s3://{BUCKET}/{tmp_path.name}")


async def chunks(*parts: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    if error is not None:
        raise error


async def test_an_object_is_created_once_however_many_try(store: ObjectStore) -> None:
    created = await asyncio.gather(*(store.create("a/b", b"%d" % number) for number in range(8)))
    assert created.count(True) == 1
    assert await store.read("a/b") == b"%d" % created.index(True)
    await store.delete("a/b")
    await store.delete("a/b")
    assert await store.read("a/b") is None
    assert await store.create("a/b", b"again")


async def test_a_written_object_has_all_chunks_and_replaces_an_earlier_one(
    store: ObjectStore,
) -> None:
    await store.write("data/x", chunks(b"old"))
    await store.write("data/x", chunks(*[b"0123456789" * 1000] * 1000, b"end"))
    assert await store.read_range("data/x", 9_999_995, 100) == b"56789end"
    assert await store.read_range("data/x", 3, 4) == b"3456"
    assert await store.read_range("data/y", 0, 4) is None
    await store.write("data/empty", chunks())
    assert await store.read("data/empty") == b""


async def test_a_write_that_breaks_off_leaves_the_object_as_it_was(store: ObjectStore) -> None:
    await store.write("data/x", chunks(b"old"))
    for key, size in (("data/x", 10), ("data/new", 10), ("data/new", 20 << 20)):
        with pytest.raises(KeyError, match="broken"):
            await store.write(key, chunks(b"x" * size, error=KeyError("broken")))
    assert [(each.key, each.size) for each in await store.list_objects("data")] == [("data/x", 3)]


async def test_a_list_has_the_objects_below_a_prefix_by_key(store: ObjectStore) -> None:
    for key in ("data/t-b/2", "data/t-b/1", "data/t-bb/3", "files/t-b/4"):
        assert await store.create(key, b"1")
    found = await store.list_objects("data/t-b")
    assert [each.key for each in found] == ["data/t-b/1", "data/t-b/2"]
    assert all(abs(each.changed - time.time()) < 600 for each in found)
    assert await store.list_objects("nothing/here") == []


async def test_a_server_that_fails_is_no_missing_object(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_server(monkeypatch, server)
    missing = open_store("s3://no-such-bucket/x")
    use_server(monkeypatch, server, secret="wrong")
    for store in (missing, open_store(f"s3://{BUCKET}/x")):
        with pytest.raises(ObjectStoreFailed):
            await store.read("data/x")
    with pytest.raises(ObjectStoreFailed):
        await store.create("data/x", b"1")
    with pytest.raises(ObjectStoreFailed):
        await store.list_objects("data")


async def test_what_a_killed_writer_left_in_a_folder_is_deleted_later(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    left = tmp_path / ".unfinished" / "left"
    left.write_bytes(b"half")
    await store.delete_rests(time.time() - 60)
    assert left.exists()
    os.utime(left, (0, 0))
    await store.delete_rests(time.time() - 60)
    assert not left.exists()


def test_a_folder_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"--file-store .* cannot write there"):
        open_store(str(tmp_path / "file" / "below"))

"""/v1/files: what is stored, who finds it, how long, how much; and forms that are none."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import openai
import pytest

from baton_router.batches.files import UPLOAD_S, FileLimits, Files
from baton_router.batches.open_store import open_store
from tests.router import pools
from tests.router.batches.batch_clients import api_of
from tests.support.clock import Clock
from tests.support.nodes.fake_node import FakeNode

pytestmark = [
    pytest.mark.integration,
    # aiohttp warns of the headers that the tests break.
    pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionHeader"),
    pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionParam"),
]

LIMITS = FileLimits(file_bytes=100, tenant_bytes=1000, tenant_files=10, ttl_s=7200)
FORM = "multipart/form-data; boundary=xx"


async def upload(client: pools.Client, body: bytes, content_type: str = FORM) -> tuple[int, Any]:
    headers = {"Content-Type": content_type}
    async with client.session.post(
        f"{client.url}/v1/files", data=body, headers=headers
    ) as response:
        return response.status, await response.json()


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'--xx\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


FILE, PURPOSE, END = (
    part("file", b"{}", '; filename="in.jsonl"'),
    part("purpose", b"batch"),
    b"--xx--\r\n",
)


async def test_a_file_is_found_listed_read_and_deleted(decode: FakeNode, tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000
    async with pools.running(decode, file_store=str(tmp_path)) as client, api_of(client.url) as api:
        first = await api.files.create(file=("../a\\b.jsonl", data), purpose="batch")
        assert (first.bytes, first.purpose, first.filename) == (len(data), "batch", "b.jsonl")
        second = await api.files.create(
            file=("x", b""),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert second.expires_at == second.created_at + 3600
        assert (await api.files.content(first.id)).content == data
        assert (await api.files.content(second.id)).content == b""
        assert await api.files.retrieve(first.id) == first
        assert (await api.files.list()).data == [second, first]
        page = await api.files.list(limit=1, order="asc")
        assert (page.data, page.has_more) == ([first], True)
        assert (await page.get_next_page()).data == [second]
        assert (await api.files.list(purpose="batch_output")).data == []
        assert (await api.files.delete(first.id)).deleted
        for call in (api.files.retrieve, api.files.content, api.files.delete):
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await call(first.id)
        assert [path.name for path in (tmp_path / "data").rglob("file-*")] == [second.id]


async def test_a_tenant_finds_no_file_and_no_batch_of_another(
    decode: FakeNode, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme key-a\nacme.2 key-b\n")
    store = str(tmp_path / "store")
    async with pools.running(decode, file_store=store, api_keys=str(keys)) as client:
        async with api_of(client.url, "key-a") as acme, api_of(client.url, "key-b") as other:
            file = await acme.files.create(file=("x", b"{}"), purpose="batch")
            batch = await acme.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            assert (await other.files.list()).data == []
            assert (await other.batches.list()).data == []
            for call, id in (
                (other.files.retrieve, file.id),
                (other.files.content, file.id),
                (other.files.delete, file.id),
                (other.batches.retrieve, batch.id),
                (other.batches.cancel, batch.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call(id)
            with pytest.raises(openai.NotFoundError):
                await other.batches.create(
                    input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                )
        async with client.session.get(f"{client.url}/v1/files") as response:
            assert response.status == 401


async def test_bounds_of_a_file_and_of_a_tenants_files(decode: FakeNode, tmp_path: Path) -> None:
    settings = {"max_file_bytes": 100, "max_tenant_file_bytes": 150, "max_tenant_files": 3}
    async with pools.running(decode, file_store=str(tmp_path), **settings) as client:
        async with api_of(client.url) as api:
            with pytest.raises(openai.APIStatusError, match="exceeds the limit of 100 bytes"):
                await api.files.create(file=("x", b"x" * 101), purpose="batch")
            await api.files.create(file=("x", b"x" * 100), purpose="batch")
            with pytest.raises(openai.APIStatusError, match="would exceed 150 bytes together"):
                await api.files.create(file=("x", b"x" * 51), purpose="batch")
            for _ in range(2):
                last = await api.files.create(file=("x", b"x"), purpose="batch")
            with pytest.raises(openai.BadRequestError, match="may have 3 files"):
                await api.files.create(file=("x", b"x"), purpose="batch")
            await api.files.delete(last.id)
            await api.files.create(file=("x", b"x"), purpose="batch")
        assert len(list((tmp_path / "data").rglob("file-*"))) == 3
        assert list((tmp_path / ".unfinished").iterdir()) == []


async def test_without_a_store_each_route_says_how_to_get_one(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        for path in ("files", "files/x", "files/x/content", "batches", "batches/x"):
            status, body, _ = await client.get(f"/v1/{path}")
            assert (status, body["error"]["code"]) == (404, "no_file_store")
            assert "--file-store" in body["error"]["message"]
        assert (await client.post("/v1/batches/x/cancel", {}))[0] == 404
        assert (await upload(client, FILE + PURPOSE + END))[0] == 404


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (PURPOSE + END, "file is missing; it must be a file, with a file name"),
        (part("file", b"{}") + PURPOSE + END, "it must be a file"),
        (FILE + END, "purpose is missing"),
        (FILE + part("purpose", b"vision") + END, "use one of batch"),
        (part("purpose", b"batch_output") + FILE + END, "use one of batch"),
        (FILE + FILE + PURPOSE + END, "has \"file\" twice"),
        (FILE + PURPOSE + part("color", b"red") + END, "'color' is not a field of /v1/files"),
        (FILE + PURPOSE + part("purpose2", b"x" * 2000) + END, "more than 1024 bytes"),
        (FILE + PURPOSE + part("expires_after[seconds]", b"5") + END, "expires_after"),
        (FILE + PURPOSE + part("expires_after", b"null") + END, "it must be a JSON object"),
        (FILE + PURPOSE + part("expires_after", b"{") + END, "it must be a JSON object"),
        (b"".join(part(f"p{i}", b"") for i in range(20)) + END, "more than 16 parts"),
        (b"", "form"),
        (b"--xx", "form"),
        (FILE[:-10], "form"),
        (b"--xx\r\nContent-Disposition: form-data\r\n\r\nx\r\n--xx--", "has no name"),
        (b"--xx\r\nX: " + b"y" * 20_000 + b"\r\n\r\nx\r\n--xx--", "form"),
    ],
)  # fmt: skip
async def test_a_wrong_form_gets_a_400_and_leaves_nothing(
    decode: FakeNode, tmp_path: Path, body: bytes, complaint: str
) -> None:
    async with pools.running(decode, file_store=str(tmp_path)) as client:
        status, answer = await upload(client, body)
        assert status in (400, 413), answer
        assert complaint in answer["error"]["message"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_random_bytes_and_headers_get_a_4xx(decode: FakeNode, tmp_path: Path) -> None:
    rng = random.Random(7)
    whole = FILE + PURPOSE + END
    async with pools.running(decode, file_store=str(tmp_path)) as client:
        for number in range(200):
            body = bytearray(whole)
            for _ in range(rng.randrange(1, 6)):
                at = rng.randrange(len(body))
                body[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
            status, answer = await upload(client, bytes(body))
            assert status == 200 or 400 <= status < 500, (number, bytes(body), answer)
        for content_type in ("multipart/form-data", "multipart/form-data; boundary=", "text/plain"):
            assert (await upload(client, whole, content_type))[0] == 400
        assert (await upload(client, b'{"a": 1}', "application/json"))[0] == 400


async def test_a_page_of_a_foreign_origin_uploads_nothing(decode: FakeNode, tmp_path: Path) -> None:
    async with pools.running(decode, file_store=str(tmp_path)) as client:
        headers = {"Content-Type": FORM, "Origin": "https://evil.example"}
        body = FILE + PURPOSE + END
        url = f"{client.url}/v1/files"
        async with client.session.post(url, data=body, headers=headers) as response:
            assert response.status == 403


async def test_an_upload_that_pauses_or_breaks_off_leaves_nothing(
    decode: FakeNode, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"file_store": str(tmp_path), "body_timeout_s": 0.3}
    async with pools.running(decode, **settings) as client:
        _, port = client.url.rsplit(":", 1)
        for hangs in (True, False):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
            head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM}\r\n"
            head += "Content-Length: 100000\r\n\r\n"
            writer.write(head.encode() + FILE[:-4] + b"x" * 5000)
            await writer.drain()
            if hangs:
                assert b"408" in await reader.readline()
            writer.close()
        await asyncio.sleep(0.5)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_an_expired_file_is_gone_and_its_bytes_are_swept(tmp_path: Path) -> None:
    clock = Clock()
    files = Files(open_store(str(tmp_path)), LIMITS, clock)

    async def chunks() -> Any:
        yield b"data"

    kept = files.describe(await files.receive("acme", chunks()), "kept", "batch", 90_000)
    short = files.describe(await files.receive("acme", chunks()), "short", "batch", 3600)
    for file in (kept, short):
        await files.publish("acme", file)
    left = await files.receive("acme", chunks())
    clock.now += 3601
    assert await files.list_files("acme") == [kept]
    await files.sweep()
    names = {path.name for path in (tmp_path / "data").rglob("file-*")}
    assert names == {kept.id, left.id}
    clock.now = (tmp_path / "data" / "t-acme" / left.id).stat().st_mtime + UPLOAD_S + 1
    await files.sweep()
    assert left.id not in {path.name for path in (tmp_path / "data").rglob("file-*")}

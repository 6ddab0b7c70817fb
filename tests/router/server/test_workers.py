"""`baton router --workers N`: real processes on one port before a fake node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from baton_protocol.link import RunJob
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

pytestmark = pytest.mark.integration

READY = re.compile(r"listens on (http://\S+) with (\d+) workers")


class Workers:
    """A parent with its workers; `folder` is its TMPDIR."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self._flags = flags
        self._log = folder / "log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def url(self) -> str:
        found = READY.search(self.log)
        assert found, self.log
        return found[1]

    def workers(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children()
        return [each for each in found if each.status() != psutil.STATUS_ZOMBIE]

    async def start(self) -> None:
        words = [sys.executable, "-m", "baton_cli", "router", "--port=0", *self._flags]
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *words, f"--supervisor-pid={os.getpid()}", stderr=log, env=environment
            )

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def started_workers(folder: Path, *flags: str) -> AsyncIterator[Workers]:
    """All its workers listen."""
    workers = Workers(folder, *flags)
    await workers.start()
    try:
        await until(lambda: READY.search(workers.log) or workers.process.returncode is not None)
        yield workers
    finally:
        await workers.end()


async def get(url: str, path: str) -> Any:
    """On a connection of its own: the kernel may give it to any worker."""
    async with aiohttp.ClientSession() as session, session.get(url + path) as answer:
        return await (answer.json() if path == "/pool" else answer.text())


async def when(url: str, path: str, true: Callable[[Any], object]) -> Any:
    """The first answer of which it is true; connections may break meanwhile."""
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                if true(told := await get(url, path)):
                    return told
            await asyncio.sleep(0.05)


async def all_ready(one: Workers) -> None:
    """Each worker for itself: a link that is up is not yet a node that is ready."""
    sockets = sorted(one.folder.rglob("*.sock"))
    assert len(sockets) == len(one.workers())
    async with asyncio.timeout(120):
        for path in sockets:
            connector = aiohttp.UnixConnector(str(path))
            async with aiohttp.ClientSession(connector=connector) as session:
                while (await session.get("http://localhost/ready")).status != 200:
                    await asyncio.sleep(0.05)


async def complete(url: str, **fields: Any) -> str:
    body = {"prompt": "x", **fields}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=body) as answer,
    ):
        return await answer.text()


def numbers(page: str, metric: str) -> dict[str, float]:
    """Sums by worker."""
    found: dict[str, float] = {}
    for worker, value in re.findall(rf'^{metric}{{worker="(\d+)".*}} (\S+)$', page, re.MULTILINE):
        found[worker] = found.get(worker, 0.0) + float(value)
    return found


async def test_any_worker_answers_for_all(tmp_path: Path, decode: FakeNode) -> None:
    async with started_workers(tmp_path, "--workers=2", f"--nodes={decode.address}") as one:
        await until(lambda: decode.links == 2)
        await all_ready(one)
        for _ in range(20):
            assert '"finish_reason":"stop"' in await complete(one.url)
        pages = [await get(one.url, "/metrics") for _ in range(10)]
        for page in pages:
            answered = numbers(page, "baton_router_requests_total")
            assert sum(answered.values()) == 20
            assert set(numbers(page, "baton_asyncio_tasks")) == {"0", "1"}
            assert page.count('baton_node_ready{node="decode-0"') == 1
        pool = await get(one.url, "/pool")
        assert [each["worker"] for each in pool["workers"]] == ["0", "1"]
        assert one.log.count("listens on") == 1


async def test_all_is_ready_once_every_worker_has_every_node(
    tmp_path: Path, decode: FakeNode
) -> None:
    def state(told: str) -> bool:
        return bool(json.loads(told)["ready"])

    flags = ("--workers=2", f"--nodes={decode.address}", "--expect-nodes=decode-0")
    async with started_workers(tmp_path, *flags) as one:
        assert state(await when(one.url, "/ready?all=1", state))
        await all_ready(one)  # so the other one was asked, too
        decode.cut_links()
        await decode.stop()
        told = await when(one.url, "/ready?all=1", lambda told: not state(told))
        assert '"state":"lost"' in told or "worker" in told


async def test_a_worker_that_died_is_started_again_and_the_other_serves_on(
    tmp_path: Path, decode: FakeNode
) -> None:
    async with started_workers(tmp_path, "--workers=2", f"--nodes={decode.address}") as one:
        await until(lambda: decode.links == 2)
        first = {each.pid for each in one.workers()}
        os.kill(min(first), signal.SIGKILL)
        await until(lambda: "was killed by signal 9" in one.log)
        await when(one.url, "/pool", lambda pool: len(pool["workers"]) == 2)
        assert len({each.pid for each in one.workers()} & first) == 1
        for _ in range(20):  # also by the new one, which listens once it has a node
            assert '"finish_reason":"stop"' in await complete(one.url)


async def test_the_first_signal_drains_and_the_second_ends_at_once(
    tmp_path: Path, decode: FakeNode
) -> None:
    decode.script.run = "half"
    flags = ("--workers=2", f"--nodes={decode.address}", "--drain-timeout=3600")
    async with started_workers(tmp_path, *flags) as one:
        await all_ready(one)
        task = asyncio.create_task(complete(one.url, stream=True))
        await until(lambda: decode.got_of(RunJob))
        one.process.send_signal(signal.SIGTERM)
        await until(lambda: len(one.workers()) == 1)  # the idle one has ended
        assert one.process.returncode is None
        one.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(120):
            assert await one.process.wait() == 0
            assert '"code":"unavailable"' in await task
        assert [each.name for each in tmp_path.iterdir()] == ["log"]


async def test_workers_die_with_their_parent(tmp_path: Path, decode: FakeNode) -> None:
    async with started_workers(tmp_path, "--workers=2", f"--nodes={decode.address}") as one:
        workers = one.workers()
        one.process.kill()
        await until(
            lambda: (
                not any(
                    each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in workers
                )
            )
        )


async def test_a_worker_that_cannot_start_ends_it_all_with_its_own_line(tmp_path: Path) -> None:
    missing = tmp_path / "keys"
    workers = Workers(
        tmp_path, "--workers=2", "--nodes=http://127.0.0.1:1", f"--api-keys={missing}"
    )
    await workers.start()
    try:
        async with asyncio.timeout(120):
            assert await workers.process.wait() == 1
        assert f"{missing}" in workers.log
        assert "ended with exit code 1; see its log line for the cause" in workers.log
    finally:
        await workers.end()


async def test_a_port_in_use_is_one_line(tmp_path: Path, decode: FakeNode) -> None:
    port = decode.address.rpartition(":")[2]
    workers = Workers(tmp_path, "--workers=2", f"--nodes={decode.address}", f"--port={port}")
    await workers.start()
    try:
        async with asyncio.timeout(120):
            assert await workers.process.wait() == 1
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in workers.log
        assert "Traceback" not in workers.log
    finally:
        await workers.end()

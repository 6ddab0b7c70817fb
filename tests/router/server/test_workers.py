"""`baton router --workers N`: real processes on the same port, with a fake node."""

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
    """The parent process and its workers. `folder` is its TMPDIR."""

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
        match = READY.search(self.log)
        assert match, self.log
        return match[1]

    def children(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children()
        return [each for each in children if each.status() != psutil.STATUS_ZOMBIE]

    async def start(self) -> None:
        command = [sys.executable, "-m", "baton_cli", "router", "--port=0", *self._flags]
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, f"--supervisor-pid={os.getpid()}", stderr=log, env=environment
            )

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def started_workers(folder: Path, *flags: str) -> AsyncIterator[Workers]:
    """Workers that all listen, unless the parent has ended."""
    workers = Workers(folder, *flags)
    await workers.start()
    try:
        await until(lambda: READY.search(workers.log) or workers.process.returncode is not None)
        yield workers
    finally:
        await workers.end()


async def get(url: str, path: str) -> Any:
    """Get a page over a new connection, which the kernel may give to any worker."""
    async with aiohttp.ClientSession() as session, session.get(url + path) as answer:
        return await (answer.json() if path == "/pool" else answer.text())


async def until_page(url: str, path: str, holds: Callable[[Any], object]) -> Any:
    """Get a page until `holds` is true of it. Broken connections are retried."""
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                if holds(page := await get(url, path)):
                    return page
            await asyncio.sleep(0.05)


async def all_ready(workers: Workers) -> None:
    """Wait until each worker is ready; a node whose link is up may not be ready yet."""
    sockets = sorted(workers.folder.rglob("*.sock"))
    assert len(sockets) == len(workers.children())
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


def sums_by_worker(page: str, metric: str) -> dict[str, float]:
    """The metric's sum per worker."""
    sums: dict[str, float] = {}
    for worker, value in re.findall(rf'^{metric}{{worker="(\d+)".*}} (\S+)$', page, re.MULTILINE):
        sums[worker] = sums.get(worker, 0.0) + float(value)
    return sums


async def test_any_worker_answers_for_all_workers(tmp_path: Path, decode: FakeNode) -> None:
    async with started_workers(tmp_path, "--workers=2", f"--nodes={decode.address}") as workers:
        await until(lambda: decode.links == 2)
        await all_ready(workers)
        for _ in range(20):
            assert '"finish_reason":"stop"' in await complete(workers.url)
        pages = [await get(workers.url, "/metrics") for _ in range(10)]
        for page in pages:
            answered = sums_by_worker(page, "baton_router_requests_total")
            assert sum(answered.values()) == 20
            assert set(sums_by_worker(page, "baton_asyncio_tasks")) == {"0", "1"}
            assert page.count('baton_node_ready{node="decode-0"') == 1
        pool = await get(workers.url, "/pool")
        assert [each["worker"] for each in pool["workers"]] == ["0", "1"]
        assert workers.log.count("listens on") == 1


async def test_all_is_ready_once_every_worker_has_every_node(
    tmp_path: Path, decode: FakeNode
) -> None:
    def is_ready(page: str) -> bool:
        return bool(json.loads(page)["ready"])

    flags = ("--workers=2", f"--nodes={decode.address}", "--expect-nodes=decode-0")
    async with started_workers(tmp_path, *flags) as workers:
        assert is_ready(await until_page(workers.url, "/ready?all=1", is_ready))
        await all_ready(workers)  # so the answer above included the other worker
        decode.cut_links()
        await decode.stop()
        page = await until_page(workers.url, "/ready?all=1", lambda page: not is_ready(page))
        assert '"state":"lost"' in page or "worker" in page


async def test_a_dead_worker_is_restarted_while_the_other_serves(
    tmp_path: Path, decode: FakeNode
) -> None:
    async with started_workers(tmp_path, "--workers=2", f"--nodes={decode.address}") as workers:
        await until(lambda: decode.links == 2)
        first = {each.pid for each in workers.children()}
        os.kill(min(first), signal.SIGKILL)
        await until(lambda: "was killed by signal 9" in workers.log)
        await until_page(workers.url, "/pool", lambda pool: len(pool["workers"]) == 2)
        assert len({each.pid for each in workers.children()} & first) == 1
        for _ in range(20):  # the new worker serves too: it listens once it has a node
            assert '"finish_reason":"stop"' in await complete(workers.url)


async def test_the_first_signal_drains_and_the_second_ends_the_workers_at_once(
    tmp_path: Path, decode: FakeNode
) -> None:
    decode.script.run = "half"
    flags = ("--workers=2", f"--nodes={decode.address}", "--drain-timeout=3600")
    async with started_workers(tmp_path, *flags) as workers:
        await all_ready(workers)
        task = asyncio.create_task(complete(workers.url, stream=True))
        await until(lambda: decode.got_of(RunJob))
        workers.process.send_signal(signal.SIGTERM)
        await until(lambda: len(workers.children()) == 1)  # the idle worker has ended
        assert workers.process.returncode is None
        workers.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(120):
            assert await workers.process.wait() == 0
            assert '"code":"unavailable"' in await task
        assert [each.name for each in tmp_path.iterdir()] == ["log"]


async def test_workers_die_with_their_parent(tmp_path: Path, decode: FakeNode) -> None:
    async with started_workers(tmp_path, "--workers=2", f"--nodes={decode.address}") as workers:
        children = workers.children()
        workers.process.kill()
        await until(
            lambda: (
                not any(
                    each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in children
                )
            )
        )


async def test_a_worker_that_cannot_start_ends_the_parent_and_logs_the_cause(
    tmp_path: Path,
) -> None:
    server = "rediss://127.0.0.1:1"
    index = f"--redis-index={server}?ssl_ca_certs={tmp_path}/missing.crt"
    workers = Workers(tmp_path, "--workers=2", index)
    await workers.start()
    try:
        async with asyncio.timeout(120):
            assert await workers.process.wait() == 2
        assert f"TLS files of {server}" in workers.log
        assert "ended with exit code 2; see its log line for the cause" in workers.log
    finally:
        await workers.end()


async def test_a_port_in_use_is_one_log_line_without_a_traceback(
    tmp_path: Path, decode: FakeNode
) -> None:
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

"""Workers query each other over real unix sockets; the handlers behind them are stubs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from baton_protocol.errors import NotFound
from baton_router.server.peers import Peers, gathering
from tests.support.nodes.processes import free_port
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.integration


class Worker:
    """A worker that knows only the request with its own name. `received`: requests it got."""

    def __init__(self, path: Path, answer_s: float) -> None:
        self.name = path.stem
        self.port = free_port()
        self.received: list[web.Request] = []
        self.has_all = True
        self._path = path
        self._answer_s = answer_s

    async def start(self) -> web.AppRunner:
        app = web.Application(middlewares=[gathering(Peers(self._path, self._answer_s))])
        app.router.add_get("/requests/{id}", self.request)
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.ready)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        await web.UnixSite(runner, str(self._path)).start()
        return runner

    async def request(self, request: web.Request) -> web.Response:
        self.received.append(request)
        if request.headers.get("Authorization") != "Bearer key":
            return web.json_response({}, status=401)
        if request.match_info["id"] != self.name:
            raise NotFound("there is no such request")
        return web.json_response({"request": self.name})

    async def ready(self, request: web.Request) -> web.Response:
        self.received.append(request)
        body = {"ready": self.has_all, "reason": "", "not_ready": []}
        return web.json_response(body, status=200 if self.has_all else 503)

    async def health(self, request: web.Request) -> web.Response:
        self.received.append(request)
        return web.json_response({})


@asynccontextmanager
async def running(
    folder: Path, names: str, answer_s: float = WAIT_S
) -> AsyncIterator[list[Worker]]:
    workers = [Worker(folder / f"{name}.sock", answer_s) for name in names]
    runners = [await worker.start() for worker in workers]
    try:
        yield workers
    finally:
        for runner in runners:
            await runner.cleanup()


async def get(worker: Worker, path: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{worker.port}{path}"
    headers = {"Authorization": "Bearer key"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, await answer.text()


async def test_any_worker_finds_another_worker_s_request(tmp_path: Path) -> None:
    async with running(tmp_path, "abc") as workers:
        for worker in workers:
            assert await get(worker, "/requests/b") == (200, '{"request": "b"}')


async def test_an_unknown_request_is_queried_once_per_worker_and_not_found(tmp_path: Path) -> None:
    async with running(tmp_path, "abc") as workers:
        status, _ = await get(workers[0], "/requests/x")
        assert status == 500  # NotFound; the real router's middleware turns it into a 404
        assert [len(worker.received) for worker in workers] == [1, 1, 1]


async def test_health_is_answered_without_querying_other_workers(tmp_path: Path) -> None:
    async with running(tmp_path, "ab") as workers:
        assert (await get(workers[0], "/health"))[0] == 200
        assert [len(worker.received) for worker in workers] == [1, 0]


async def test_a_dead_or_silent_worker_is_left_out(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "ab", answer_s=0.2) as workers:
        (tmp_path / "dead.sock").touch()
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(tmp_path / "silent.sock"))
            silent.listen()
            async with asyncio.timeout(WAIT_S):  # at first b may not answer in time
                while (await get(workers[0], "/requests/b"))[0] != 200:
                    pass


async def test_all_is_ready_once_every_worker_is(tmp_path: Path) -> None:
    async with running(tmp_path, "abc") as workers, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{workers[0].port}/ready"
        for unready, status in (((), 200), (("b",), 503), (("b", "c"), 503)):
            for worker in workers:
                worker.has_all = worker.name not in unready
            async with session.get(url + "?all=1") as answer:
                body = await answer.json()
                assert (answer.status, body["ready"]) == (status, status == 200)
                assert all(name in body["reason"] for name in unready)
            async with session.get(url) as answer:
                assert answer.status == 200  # the worker that answers can serve
        assert [len(worker.received) for worker in workers] == [6, 3, 3]

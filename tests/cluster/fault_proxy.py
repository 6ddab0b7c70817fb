"""Between an operator and the API server: counts requests, and spoils those that a test wants.

In: an admin's kubeconfig. Out: one that leads through here, over plain HTTP and without a login.
Every request is shown to `watch` before it goes on; what that returns is done instead.

    Answer    the API server never sees it; this is answered
    RESET     the same, and the connection is reset
    ANSWERED_RESET   the API server has done it, but its answer never comes
    SILENCE   the API server never sees it, and nobody answers
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

import aiohttp
from aiohttp import web
from yarl import URL

from tests.cluster.machine.certificates import write_kubeconfig
from tests.support.needs import needs

T = TypeVar("T")
CALL_S = 120.0
_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "host", "keep-alive"}


class Call(NamedTuple):
    """`path` is without its query. A write is anything but GET."""

    method: str
    path: str
    query: Mapping[str, str]
    at: float

    @property
    def watches(self) -> bool:
        return self.query.get("watch") == "true"

    @property
    def writes(self) -> bool:
        return self.method != "GET"


class Answer(NamedTuple):
    """`content` is JSON; without any it is the Status of an error."""

    status: int
    headers: Mapping[str, str] = {}
    content: Mapping[str, Any] | None = None

    def body(self) -> Mapping[str, Any]:
        status = {"kind": "Status", "status": "Failure", "message": "made up by a test"}
        return self.content or {**status, "apiVersion": "v1", "code": self.status}


RESET: Literal["reset"] = "reset"
ANSWERED_RESET: Literal["answered reset"] = "answered reset"
SILENCE: Literal["silence"] = "silence"
Fault = Answer | Literal["reset", "answered reset", "silence"]
Watch = Callable[[Call], Fault | None]


class FaultProxy:
    """`with FaultProxy(kubeconfig, folder) as proxy:`; usable from any thread."""

    def __init__(self, upstream: Path, folder: Path) -> None:
        needs("own_cluster")  # it reads an own cluster's kind of kubeconfig, and makes trouble
        self.kubeconfig = folder / "proxied.conf"
        self.calls: list[Call] = []
        self._watch: Watch | None = None
        self._down = False
        self._upstream = upstream
        self._folder = folder
        # By identity: a request compares as the mapping that it is.
        self._open: dict[int, web.BaseRequest] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def watch(self, watch: Watch | None) -> None:
        """None: everything goes on."""
        self._watch = watch

    def drop_watches(self) -> None:
        self._call(self._drop(lambda request: "watch" in request.query))

    def down(self, down: bool) -> None:
        """Every connection is reset, and new ones are too."""
        self._down = down
        if down:
            self._call(self._drop(lambda request: True))

    def counted(self, since: float) -> list[Call]:
        """What came since that moment, watches left out."""
        return [call for call in list(self.calls) if call.at >= since and not call.watches]

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_S)

    async def _start(self) -> None:
        # JSON is YAML, and the tests' kubeconfigs are JSON.
        config = json.loads(self._upstream.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._url = cluster["server"]
        context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        context.load_cert_chain(user["client-certificate"], user["client-key"])
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        )
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        write_kubeconfig(
            self.kubeconfig, f"http://127.0.0.1:{port}", Path(user["client-key"]).parent, "admin"
        )

    async def _stop(self) -> None:
        self._down = True
        await self._drop(lambda request: True)
        await self._runner.cleanup()
        await self._session.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _drop(self, which: Callable[[web.BaseRequest], bool]) -> None:
        for request in [one for one in self._open.values() if which(one)]:
            _abort(request)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        call = Call(request.method, request.path, dict(request.query), time.monotonic())
        self._open[id(request)] = request
        try:
            # All of it: whoever is killed by `watch` sends no more.
            body = await request.read()
            fault = self._seen(call)
            if fault == SILENCE:
                await asyncio.sleep(CALL_S)
            if fault in (RESET, SILENCE):
                _abort(request)
                return web.Response(status=502)
            if isinstance(fault, Answer):
                return web.json_response(fault.body(), status=fault.status, headers=fault.headers)
            return await self._forward(request, body, lost=fault == ANSWERED_RESET)
        except (aiohttp.ClientError, ConnectionError):
            _abort(request)
            return web.Response(status=502)
        finally:
            self._open.pop(id(request))

    def _seen(self, call: Call) -> Fault | None:
        self.calls.append(call)
        if self._down:
            return RESET
        return self._watch(call) if self._watch is not None else None

    async def _forward(
        self, request: web.BaseRequest, body: bytes, *, lost: bool
    ) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        async with self._session.request(
            request.method,
            URL(self._url + request.raw_path, encoded=True),
            data=body or None,
            headers=headers,
            skip_auto_headers=("Content-Type",),
        ) as upstream:
            if lost:
                await upstream.read()
                _abort(request)
                return web.Response(status=502)
            kept = {k: v for k, v in upstream.headers.items() if k.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=upstream.status, headers=kept)
            await response.prepare(request)
            async for data in upstream.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response


def _abort(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()

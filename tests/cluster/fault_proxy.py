"""A proxy between the operator and the API server that records requests and injects faults.

In: an admin's kubeconfig. Out: a kubeconfig for the proxy, over plain HTTP and without a login.
A test's `watch` function gets every request before the proxy forwards it. If it returns a fault,
the proxy does this instead:

    Answer           answers with it; the API server does not get the request
    RESET            resets the connection; the API server does not get the request
    ANSWERED_RESET   forwards the request, but resets the connection instead of answering
    SILENCE          does not answer; the API server does not get the request
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
    """A request; `path` has no query, `at` is monotonic seconds. Any method but GET is a write."""

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
    """An answer. `content` is a JSON body; None means the Status object of an error."""

    status: int
    headers: Mapping[str, str] = {}
    content: Mapping[str, Any] | None = None

    def body(self) -> Mapping[str, Any]:
        status = {"kind": "Status", "status": "Failure", "message": "injected by a test"}
        return self.content or {**status, "apiVersion": "v1", "code": self.status}


RESET: Literal["reset"] = "reset"
ANSWERED_RESET: Literal["answered reset"] = "answered reset"
SILENCE: Literal["silence"] = "silence"
Fault = Answer | Literal["reset", "answered reset", "silence"]
Watch = Callable[[Call], Fault | None]


class FaultProxy:
    """`with FaultProxy(kubeconfig, folder) as proxy:`; usable from any thread."""

    def __init__(self, upstream: Path, folder: Path) -> None:
        needs("own_cluster")  # it needs our clusters' form of kubeconfig, and injects faults
        self.kubeconfig = folder / "proxied.conf"
        self.calls: list[Call] = []
        self._watch: Watch | None = None
        self._down = False
        self._upstream = upstream
        self._folder = folder
        # By id, because requests compare as mappings.
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
        """Set the function that injects faults; None forwards everything."""
        self._watch = watch

    def drop_watches(self) -> None:
        self._call(self._drop(lambda request: "watch" in request.query))

    def set_down(self, down: bool) -> None:
        """With True, reset all open connections and every new one until False is set."""
        self._down = down
        if down:
            self._call(self._drop(lambda request: True))

    def requests_since(self, since: float) -> list[Call]:
        """The requests since this moment, without watches."""
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
            # Read the whole body first: `watch` may kill the client, which then sends no more.
            body = await request.read()
            fault = self._fault_for(call)
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

    def _fault_for(self, call: Call) -> Fault | None:
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

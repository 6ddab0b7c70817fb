"""An in-memory API server for the operator's client. It stores objects by path, without validation
and without controllers.

In: requests over HTTP. Out: the API's answers, a record of the writes, and refusals that a test
scripts. Unlike Kubernetes, it keeps fields that are no longer applied.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from baton_operator.kube.kinds import kind_of

Body = dict[str, Any]


class ApiServer:
    """The server. `refuses` maps a request (method, path) to a status that refuses it, 0 to serve
    it. `writes` lists the requests that changed something, as "PATCH services/demo-router"."""

    def __init__(self) -> None:
        self.url = ""
        self.objects: dict[str, Body] = {}
        self.writes: list[str] = []
        self.requests = 0
        self.refuses: Callable[[str, str], int] = lambda method, path: 0
        self._version = 0

    def put(self, body: Body) -> Body:
        """Write as another client than the operator: create an object, or change its fields."""
        path = kind_of(body).path(body["metadata"]["namespace"], body["metadata"]["name"])
        return self._merge(path, body, "another-client")

    def remove(self, body: Body) -> None:
        metadata = body["metadata"]
        del self.objects[kind_of(body).path(metadata["namespace"], metadata["name"])]

    async def answer(self, request: web.BaseRequest) -> web.Response:
        self.requests += 1
        method, path = request.method, request.path
        if (status := self.refuses(method, path)) != 0:
            return _failure(status, "Refused", "not in this test")
        _, _, tail = path.partition("/namespaces/")
        _, plural, *name = tail.split("/")
        body = json.loads(await request.read() or b"{}")
        manager = request.query.get("fieldManager", "")
        if method == "GET" and not name:
            return web.json_response({"items": []})
        if method == "POST":
            name = [body["metadata"]["name"]]
            path += f"/{name[0]}"
            if path in self.objects:
                return _failure(409, "AlreadyExists", "the object exists")
        path = path.removesuffix("/status")
        known = self.objects.get(path)
        if known is None and (method in ("GET", "DELETE") or name[1:] == ["status"]):
            return _failure(404, "NotFound", "the object does not exist")
        if known is not None and not _is_intended(known, body):
            return _failure(409, "Conflict", "another object, or it was changed")
        if method == "GET":
            return web.json_response(known)
        before = self._version
        if method == "DELETE":
            merged = self.objects.pop(path)
            self._version += 1
        else:
            merged = self._merge(path, body, manager)
        if self._version != before:
            self.writes.append("/".join((f"{method} {plural}", *name)))
        return web.json_response(merged, status=201 if known is None else 200)

    def _merge(self, path: str, body: Body, manager: str) -> Body:
        known = self.objects.get(path, {})
        metadata_fields = {
            name: value for name, value in body["metadata"].items() if name not in _CHECKED
        }
        merged = _merged(known, body | {"metadata": metadata_fields})
        metadata = merged["metadata"]
        managers = metadata.setdefault("managedFields", [])
        if {"manager": manager} not in managers:
            managers.append({"manager": manager})
        if merged != known:
            self._version += 1
            metadata.setdefault("uid", body["metadata"].get("uid", f"uid-{self._version}"))
            metadata["resourceVersion"] = str(self._version)
            changed = merged.get("spec") != known.get("spec")
            metadata["generation"] = metadata.get("generation", 0) + changed
            self.objects[path] = merged
        return copy.deepcopy(merged)


_CHECKED = ("uid", "resourceVersion", "generation")


def _is_intended(known: Body, body: Body) -> bool:
    """Whether the stored object has the uid and resourceVersion that the request names, if any."""
    named = body.get("metadata", {}) | body.get("preconditions", {})
    checked = ("uid", "resourceVersion")
    return all(
        named.get(field, known["metadata"][field]) == known["metadata"][field] for field in checked
    )


def _merged(known: Body, body: Body) -> Body:
    merged = dict(known)
    for name, value in body.items():
        below = known.get(name)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[name] = _merged(below, value)
        else:
            merged[name] = copy.deepcopy(value)
    return merged


def _failure(status: int, reason: str, message: str) -> web.Response:
    status_body = {"kind": "Status", "reason": reason, "message": message}
    return web.json_response(status_body, status=status)


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    runner = web.ServerRunner(web.Server(server.answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()

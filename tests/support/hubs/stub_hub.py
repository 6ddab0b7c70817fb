"""A stub of a Hugging Face hub on this machine: serves listings, and files with Range requests.

In: files by name. Out: a real HTTP server at `url`, which tests can make refuse, break off, hold or
redirect. `file_requests` holds the path and Range of each file request; `tokens` holds the tokens
sent to the hub, `cdn_tokens` those sent to the address that it redirects to.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
WAIT_S = 180.0
POLL_S = 0.02  # poll interval of the servers, which bounds the time to close them


class StubHub:
    """A running hub: `with StubHub({"config.json": b"{}"}) as hub:`."""

    def __init__(
        self, files: Mapping[str, bytes], *, name: str = "org/model", host: str = "127.0.0.1"
    ) -> None:
        self.files = dict(files)
        self.name = name
        self.commit = COMMIT
        self.revisions = ["main", "v1"]
        self.tells_sizes = True
        self.tells_digests = True
        self.claimed_sizes: dict[str, int] = {}
        self.token = ""  # the token that requests need; "" accepts all
        self.refuses = 0  # if set, every request gets this status
        self.redirects = False
        self.ranges = True
        self.breaks: dict[str, int] = {}  # the number of answers per file that end in the middle
        self.garbles: dict[str, int] = {}  # the number of answers per file that end in zeros
        self.held: threading.Event | None = None  # file answers wait for it in the middle
        self.file_requests: list[tuple[str, str]] = []
        self.tokens: set[str] = set()
        self.cdn_tokens: set[str] = set()
        self._host = host
        self._server = self._serve(cdn=False)
        self._cdn = self._serve(cdn=True)

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._server.server_port}"

    @property
    def cdn_url(self) -> str:
        return f"http://{self._host}:{self._cdn.server_port}"

    def __enter__(self) -> StubHub:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.held is not None:
            self.held.set()
        for server in (self._server, self._cdn):
            server.shutdown()
            server.server_close()

    def ranges_of(self, name: str) -> list[str]:
        return [byte_range for path, byte_range in self.file_requests if path == name]

    def _serve(self, *, cdn: bool) -> ThreadingHTTPServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with suppress(ConnectionError):  # the client was killed
                    _answer(hub, self, cdn)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer((self._host, 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True).start()
        return server


def _answer(hub: StubHub, request: BaseHTTPRequestHandler, cdn: bool) -> None:
    authorization = request.headers.get("Authorization", "")
    (hub.cdn_tokens if cdn else hub.tokens).add(authorization)
    parts = urlsplit(request.path)
    listing, resolve = f"/api/models/{hub.name}/revision/", f"/{hub.name}/resolve/{hub.commit}/"
    if hub.refuses:
        _status(request, hub.refuses)
    elif not cdn and hub.token and authorization != f"Bearer {hub.token}":
        _status(request, HTTPStatus.UNAUTHORIZED)
    elif parts.path.startswith(listing):
        revision = unquote(parts.path.removeprefix(listing))
        if revision in hub.revisions:
            _body(request, json.dumps(_list(hub, "blobs=true" in parts.query)).encode())
        else:
            _status(request, HTTPStatus.NOT_FOUND)
    elif parts.path.removeprefix(resolve) not in hub.files:
        _status(request, HTTPStatus.NOT_FOUND)
    elif hub.redirects and not cdn:
        _status(request, HTTPStatus.FOUND, {"Location": hub.cdn_url + parts.path})
    else:
        _file(hub, request, parts.path.removeprefix(resolve))


def _list(hub: StubHub, blobs: bool) -> dict[str, Any]:
    sizes = {name: len(data) for name, data in hub.files.items()} | hub.claimed_sizes
    siblings: list[dict[str, Any]] = [{"rfilename": name} for name in hub.files]
    if blobs and hub.tells_sizes:
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
    if blobs and hub.tells_digests:
        siblings = [sibling | _digest(sibling["rfilename"], hub.files) for sibling in siblings]
    return {"id": hub.name, "sha": hub.commit, "siblings": siblings}


def _digest(name: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    """A file's digest as the hub lists it. Weights are LFS files, whose blob is only a pointer."""
    data = files[name]
    if name.endswith(".safetensors"):
        return {"blobId": "0" * 40, "lfs": {"sha256": hashlib.sha256(data).hexdigest()}}
    return {"blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}


def _file(hub: StubHub, request: BaseHTTPRequestHandler, name: str) -> None:
    data, byte_range = hub.files[name], request.headers.get("Range", "")
    hub.file_requests.append((name, byte_range))
    status, headers = HTTPStatus.OK, {}
    if byte_range and hub.ranges:
        first, _, last = byte_range.removeprefix("bytes=").partition("-")
        if int(first) >= len(data):
            _status(request, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            return
        status = HTTPStatus.PARTIAL_CONTENT
        headers = {"Content-Range": f"bytes {first}-{last or len(data) - 1}/{len(data)}"}
        data = data[int(first) : int(last) + 1 if last else None]
    if hub.garbles.get(name, 0):
        hub.garbles[name] -= 1
        data = data[: len(data) // 2].ljust(len(data), b"\0")
    breaks = hub.breaks.get(name, 0)
    hub.breaks[name] = max(0, breaks - 1)
    request.send_response(status)
    for key, value in (headers | {"Content-Length": str(len(data))}).items():
        request.send_header(key, value)
    request.end_headers()
    half = len(data) // 2
    request.wfile.write(data[:half])
    request.wfile.flush()
    if hub.held is not None:
        hub.held.wait(WAIT_S)
    if breaks:
        request.close_connection = True
        return
    request.wfile.write(data[half:])


def _status(
    request: BaseHTTPRequestHandler, status: int, headers: Mapping[str, str] | None = None
) -> None:
    request.send_response(status)
    for key, value in {"Content-Length": "0", **(headers or {})}.items():
        request.send_header(key, value)
    request.end_headers()


def _body(request: BaseHTTPRequestHandler, data: bytes) -> None:
    request.send_response(HTTPStatus.OK)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    request.wfile.write(data)

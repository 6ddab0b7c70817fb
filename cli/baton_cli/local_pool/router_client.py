"""The supervisor's client of the router: blocking HTTP with the standard library.

In: the router's address. Out: whether it is ready, and /pool as rows of the table. The supervisor
calls it in a thread. It does without aiohttp, which costs 0.2 s and 40 MB, because it starts before
everything else.
"""

from __future__ import annotations

import http.client
import socket
from dataclasses import dataclass, field

import msgspec

from baton_cli.local_pool.display import TableRow
from baton_node.server.transfer_summary import chunk_line
from baton_router.http.pool_records import Pool, PoolNode

POLL_TIMEOUT_S = 2.0
UNIX_HOST = "localhost"  # the host in requests over a unix socket


@dataclass(frozen=True)
class PoolState:
    """`ready` is the answer of /ready: a request would be served now. `requests` counts the
    router's running requests. `nodes` are the rows of the live table. `chunks` describes the chunks
    in which nodes exchange KV."""

    ready: bool
    requests: int
    nodes: tuple[TableRow, ...]
    chunks: str = ""


@dataclass(frozen=True)
class RouterAddress:
    """Where the router listens, and how to reach it from this machine; `key` is the admin key. A
    router with a unix socket, `uds`, listens only there."""

    host: str
    port: int
    key: str = field(default="", repr=False)
    uds: str = ""

    @property
    def dial(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        if self.uds:
            return f"http://{UNIX_HOST}"
        shown = f"[{self.dial}]" if ":" in self.dial else self.dial
        return f"http://{shown}:{self.port}"

    @property
    def shown(self) -> str:
        """The address for people."""
        return f"unix:{self.uds}" if self.uds else self.url

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.uds:
            return _UnixConnection(self.uds, timeout_s)
        return http.client.HTTPConnection(self.dial, self.port, timeout=timeout_s)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__(UNIX_HOST, timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(self._path)


def look(router: RouterAddress) -> PoolState | None:
    """Return the pool's state, or None if the router does not answer."""
    try:
        ready = get_page(router, "/ready")[0] == 200
        status, body = get_page(router, "/pool")
        if status != 200:
            return None
        pool = msgspec.json.decode(body, type=Pool)
    except (OSError, http.client.HTTPException, msgspec.DecodeError):
        return None
    return PoolState(
        ready=ready,
        requests=int(pool.totals["requests_running"]),
        nodes=tuple(_row(node) for node in pool.nodes),
        # Nodes that exchange KV all have the same layout.
        chunks=chunk_line(pool.nodes[0].layout) if pool.nodes else "",
    )


def get_page(router: RouterAddress, path: str) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {router.key}"} if router.key else {}
    link = router.connection(POLL_TIMEOUT_S)
    try:
        link.request("GET", path, headers=headers)
        response = link.getresponse()
        return response.status, response.read()
    finally:
        link.close()


def _row(node: PoolNode) -> TableRow:
    load = node.load
    requests = load.running + load.waiting + load.parked
    return TableRow(
        *(node.id, node.role, node.pid, node.state, requests, node.address), exact=node.exact
    )

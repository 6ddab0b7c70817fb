"""Data servers for all contenders: redis-servers that listen on TCP and on unix sockets.

In: their number and memory. Out: running servers and their addresses, until the block ends.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from baton_kvstore.embedded.servers import EmbeddedServers, ServerSpec

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Server:
    port: int
    tcp: str
    unix: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def data_servers(count: int, memory: int, binary: Path | None) -> Iterator[list[Server]]:
    """Run `count` servers of `memory` bytes each. `binary` None: the library finds redis-server."""
    ports = [free_port() for _ in range(count)]
    specs = [
        ServerSpec(f"data{n}", memory, "volatile-ttl", ("--bind", HOST, "--port", str(port)))
        for n, port in enumerate(ports)
    ]
    with EmbeddedServers(specs, binary=binary) as servers:
        yield [
            Server(port, f"redis://{HOST}:{port}", servers.url(spec.name))
            for spec, port in zip(specs, ports, strict=True)
        ]


def version(url: str) -> str:
    with redis.Redis.from_url(url, protocol=2) as client:
        about = client.info()
    return f"redis-server {about['redis_version']}, {about['mem_allocator']}"


def empty(urls: list[str]) -> None:
    """Delete all values. The server's allocator keeps its memory, which stays warm."""
    for url in urls:
        with redis.Redis.from_url(url, protocol=2) as client:
            client.flushall()

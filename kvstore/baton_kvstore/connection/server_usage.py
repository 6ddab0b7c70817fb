"""A server's memory usage: bytes used, bytes allowed, keys evicted."""

from __future__ import annotations

from dataclasses import dataclass

from baton_kvstore.connection.info import info_number, parse_info
from baton_kvstore.connection.resp_connection import RespConnection


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """Memory of one server, in bytes. `limit_bytes` 0 means no limit. `evicted_keys` counts since
    the server's start."""

    used_bytes: int
    limit_bytes: int
    evicted_keys: int


def read_usage(connection: RespConnection, deadline: float) -> ServerUsage:
    """Read the memory usage with two small commands. Raise StoreUnavailable."""
    memory = parse_info(connection.command(deadline, b"INFO", b"memory"))
    stats = parse_info(connection.command(deadline, b"INFO", b"stats"))
    return ServerUsage(
        used_bytes=info_number(memory.get("used_memory")),
        limit_bytes=info_number(memory.get("maxmemory")),
        evicted_keys=info_number(stats.get("evicted_keys")),
    )

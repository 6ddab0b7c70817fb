"""What one look at a server shows: identity, memory, settings to change, latency and clock.

In: a URL and the server's role. Out: a ServerReport. It changes nothing on the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from baton_kvstore.connection.endpoint import Endpoint, parse_endpoint
from baton_kvstore.connection.info import info_number, parse_info
from baton_kvstore.connection.resp_connection import RespConnection
from baton_kvstore.connection.server_settings import StoreRole, WantedSetting, read_wanted
from baton_kvstore.connection.server_usage import ServerUsage, read_usage
from baton_kvstore.errors import ProtocolBroken

PINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """`machine_bytes` is the memory of the server's machine, 0 if unknown. `ahead_s` is by how much
    the server's time of day is ahead of ours."""

    endpoint: Endpoint
    run_id: str
    version: str
    usage: ServerUsage
    machine_bytes: int
    wanted: tuple[WantedSetting, ...]
    round_trip_s: float
    ahead_s: float


def read_report(
    url: str,
    role: StoreRole,
    *,
    timeout_s: float,
    value_bytes: int = 0,
    clock: Callable[[], float] = time.time,
) -> ServerReport:
    """Connect and look. `value_bytes` is the size of one stored value; `clock` gives our time of
    day. Blocks for up to `timeout_s`. Raise StoreError."""
    endpoint = parse_endpoint(url)
    connection = RespConnection(endpoint, connect_timeout_s=timeout_s)
    deadline = time.monotonic() + timeout_s
    try:
        info = connection.open(deadline)
        memory = parse_info(connection.command(deadline, b"INFO", b"memory"))
        return ServerReport(
            endpoint=endpoint,
            run_id=info.run_id,
            version=info.version,
            usage=read_usage(connection, deadline),
            machine_bytes=info_number(memory.get("total_system_memory")),
            wanted=read_wanted(connection, deadline, role, value_bytes),
            round_trip_s=median(_round_trip_s(connection, deadline) for _ in range(PINGS)),
            ahead_s=_ahead_s(connection, deadline, clock),
        )
    finally:
        connection.close()


def _round_trip_s(connection: RespConnection, deadline: float) -> float:
    began = time.monotonic()
    connection.command(deadline, b"PING")
    return time.monotonic() - began


def _ahead_s(connection: RespConnection, deadline: float, clock: Callable[[], float]) -> float:
    before = clock()
    reply = connection.command(deadline, b"TIME")
    after = clock()
    if not (isinstance(reply, list) and len(reply) == 2):
        raise ProtocolBroken(f"{connection.label} answered TIME with {reply!r:.60}")
    seconds, micros = (info_number((part or b"").decode(errors="replace")) for part in reply)
    return seconds + micros / 1e6 - (before + after) / 2

"""Measures how fast this machine puts chunks to a data server and gets them back.

In: a URL, the size of a stored value. Out: bytes per second, with one connection. It puts a few
random values under a name of its own, with a TTL, and deletes them. A server that would evict
chunks for them is not measured.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass

from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp_connection import RespConnection
from baton_kvstore.connection.server_usage import read_usage
from baton_kvstore.errors import StoreUnavailable
from baton_kvstore.keys import room_key
from baton_protocol.ids import Fingerprint

CHUNKS = 4
TTL_MS = 30_000


class NoRoom(StoreUnavailable):
    """The server has no room for the values of a measurement."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    put_bytes_per_s: float
    get_bytes_per_s: float


def measure_link(url: str, value_bytes: int, timeout_s: float) -> LinkSpeed:
    """Blocks for up to `timeout_s`. Raise NoRoom, or another StoreError."""
    connection = RespConnection(parse_endpoint(url), connect_timeout_s=timeout_s)
    deadline = time.monotonic() + timeout_s
    prefix = room_key(Fingerprint(f"doctor-{secrets.token_hex(8)}"))
    keys = [prefix + b":%d" % number for number in range(CHUNKS)]
    value, into = memoryview(os.urandom(value_bytes)), memoryview(bytearray(value_bytes))
    try:
        connection.open(deadline)
        usage = read_usage(connection, deadline)
        # Twice: the server holds a value once more while it receives it.
        if usage.limit_bytes and usage.used_bytes + 2 * CHUNKS * value_bytes > usage.limit_bytes:
            raise NoRoom(
                f"{connection.label} uses {usage.used_bytes} of {usage.limit_bytes} bytes, and "
                f"{CHUNKS} values of {value_bytes} bytes would evict others"
            )
        try:
            connection.put(deadline, keys[0], [value], TTL_MS)  # opens the TCP window
            began = time.monotonic()
            for key in keys:
                connection.put(deadline, key, [value], TTL_MS)
            between = time.monotonic()
            for key in keys:
                connection.get(deadline, key, [into], TTL_MS)
            ended = time.monotonic()
        finally:
            if connection.is_open:
                with contextlib.suppress(StoreUnavailable):  # then the keys expire
                    connection.command(deadline, b"DEL", *keys)
    finally:
        connection.close()
    size = CHUNKS * value_bytes
    return LinkSpeed(size / (between - began), size / (ended - between))

"""The memory that a value takes on a real server equals the prediction of `charged_bytes`."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp_connection import RespConnection
from baton_kvstore.embedded.servers import EmbeddedServers, ServerSpec
from baton_protocol.layout import VALUE_HEADER_BYTES, charged_bytes
from tests.support.stores.kvstore import PATIENCE_S, plain_client
from tests.support.stores.redis_builds import redis_server

pytestmark = pytest.mark.integration

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    "payload",
    [100_000, MIB, 1440 * KIB, 1792 * KIB, 2 * MIB - 106, 2 * MIB - 105, 2 * MIB, 4 * MIB, 5 * MIB],
)
def test_a_stored_value_takes_the_predicted_size_class(
    payload: int, make_servers: Callable[..., EmbeddedServers]
) -> None:
    servers = make_servers(ServerSpec("data", 0, "noeviction"), binary=redis_server("debian"))
    connection = RespConnection(parse_endpoint(servers.url("data")))
    deadline = time.monotonic() + PATIENCE_S
    connection.open(deadline)
    connection.put(deadline, b"key", [memoryview(bytes(VALUE_HEADER_BYTES + payload))], 600_000)
    connection.close()
    with plain_client(servers.url("data")) as client:
        assert client.info("memory")["mem_allocator"].startswith("jemalloc")
        assert client.memory_usage("key", samples=0) == pytest.approx(
            charged_bytes(payload), rel=0.01
        )

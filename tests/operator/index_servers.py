"""A real Redis as a pool's external index, and pools that use it."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from baton_cli.commands.up import reserve_port
from baton_kvstore.embedded.redis_binary import find_redis_server
from baton_kvstore.index.registry import Registry
from baton_operator.api.pool import Pool
from baton_operator.builders.credentials import acl_file
from baton_operator.state.index_reader import Login
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner import observations as o

PASSWORD = "pass:word@with/signs%"
LOGIN = Login(password=PASSWORD)
START_S = 120.0
LOCAL = (ip_network("127.0.0.0/8"),)  # the Redis of these tests is on this network
PATIENT_S = 60.0  # timeout where an answer is expected


def external(url: str, **store: Any) -> Pool:
    urls = {"indexUrl": url, "dataUrls": ["redis://data.example"]}
    return sample_pool("sim", kvStore={"external": urls | store})


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Run a Redis that requires PASSWORD; yield its port."""
    (folder / "users.acl").write_text(acl_file(PASSWORD))
    args = [
        *("--bind", "127.0.0.1", "--save", "", "--dir", str(folder)),
        *("--aclfile", str(folder / "users.acl")),
    ]
    with reserve_port("127.0.0.1", 0) as held:
        port = int(held.getsockname()[1])
        args += ["--port", str(port)]
        with subprocess.Popen(
            [str(find_redis_server()), *args], stdout=subprocess.DEVNULL
        ) as process:
            try:
                await_port(port, process)
                yield port
            finally:
                process.kill()


def await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while True:
        assert process.poll() is None, "redis-server has ended"
        assert time.monotonic() < end, "redis-server does not listen"
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.01)


async def register(url: str, pool: Pool) -> None:
    async with Registry(url, pool.key) as registry:
        await registry.register(o.report(pool, "decode"), 60.0)
        await registry.announce_fetch(o.fetch(pool, "prefill", 1, 9), 60.0)

"""Reading an external index, whose address the author of a pool chooses: hostile servers and
addresses.
"""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import tracemalloc
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from time import monotonic
from typing import Any

import msgspec
import pytest
from kubernetes.aio.client import Configuration

from baton_kvstore.index import registry
from baton_operator.api.pool import Pool
from baton_operator.api.spec_reader import SpecError
from baton_operator.controller.index_poller import IndexPoller
from baton_operator.kube.client import Api
from baton_operator.kube.egress import Address, refusal
from baton_operator.state.cache import PoolKey
from baton_operator.state.index_reader import IndexReader
from baton_operator.state.lookups import LOOKUPS, Lookups
from baton_protocol.store import FetchReport, NodeReport
from baton_protocol.wire import Codec
from tests.operator.foreign_servers import (
    ForeignServer,
    Serve,
    array_reply,
    endless,
    foreign_server,
    nothing,
    replies,
)
from tests.operator.index_servers import LOCAL, LOGIN, PATIENT_S, external
from tests.support.clock import Clock
from tests.support.planner import observations as o
from tests.support.planner.observations import observed, status_of
from tests.support.waiting import until

pytestmark = pytest.mark.integration
MIB = 1 << 20
DEADLINE_S = 120.0
POOL = external("redis://index.example")
NODE = o.report(POOL, "decode")
FETCH = o.fetch(POOL, "prefill", 1, 9)
replaced = msgspec.structs.replace
LOADED = {
    "NaN": replaced(NODE.speeds, decode_step_ms=math.nan),
    "infinite": replaced(NODE.speeds, decode_step_ms=math.inf),
    "negative": replaced(NODE.speeds, decode_step_ms=-1.0),
    "absurd": replaced(NODE.speeds, decode_step_ms=1e300),
}
BAD = {
    **{f"a speed that is {name}": replaced(NODE, speeds=one) for name, one in LOADED.items()},
    "a counter that is negative": replaced(NODE, load=replaced(NODE.load, running=-1)),
    "a counter that is absurd": replaced(NODE, load=replaced(NODE.load, running=2**63)),
    "a long name": replaced(NODE, model="x" * 10_000),
    "many files": replaced(NODE, artifacts={f"file-{number}": "d" for number in range(10_000)}),
}


def url(server: ForeignServer, host: str = "127.0.0.1", scheme: str = "redis") -> str:
    return f"{scheme}://{host}:{server.port}"


async def read_index(pool: Pool, reader: IndexReader | None = None) -> object:
    reader = reader or IndexReader(Clock(), PATIENT_S, LOCAL)
    async with asyncio.timeout(DEADLINE_S):
        return await reader.read(pool, observed(pool), None)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.8.8.8", "localhost", "2130706433", "0177.0.0.1", "127.1", "0.0.0.0"],
)
async def test_no_name_of_the_operator_s_own_host_is_connected_to(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with foreign_server(nothing, "0.0.0.0") as server:
        pool = external(url(server, host))
        assert await read_index(pool, IndexReader(Clock(), PATIENT_S)) is None
        assert server.connections == 0
    [warning] = caplog.messages
    assert warning == f"not querying the index of pool {pool.key}: {host} is a loopback address"


@pytest.mark.parametrize("host", ["[::1]", "[::ffff:127.0.0.1]", "[::]"])
async def test_no_ipv6_address_of_the_operator_s_own_host_is_connected_to(host: str) -> None:
    async with foreign_server(nothing) as server:
        assert (
            await read_index(external(url(server, host)), IndexReader(Clock(), PATIENT_S)) is None
        )
        assert server.connections == 0


async def test_a_refused_address_is_logged_once_and_counts_as_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    pool, reader = external("redis://localhost"), IndexReader(clock, PATIENT_S)
    for _ in range(4):
        assert await read_index(pool, reader) is None
        clock.advance(1000.0)
    assert len(caplog.messages) == 1
    assert reader.silent


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("10.1.2.3", ""),
        ("172.16.0.1", ""),
        ("192.168.1.1", ""),
        ("100.64.3.4", ""),
        ("198.51.100.7", ""),
        ("8.8.8.8", ""),
        ("fd12:3456::1", ""),
        ("2001:4860:4860::8888", ""),
        ("::ffff:10.1.2.3", ""),
        ("64:ff9b::a01:203", ""),
        ("127.0.0.1", "loopback"),
        ("0.0.0.0", "loopback"),
        ("0.1.2.3", "loopback"),
        ("::1", "loopback"),
        ("::", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
        ("64:ff9b::7f00:1", "loopback"),
        ("2002:7f00:1::", "loopback"),
        ("169.254.169.254", "metadata"),
        ("169.254.1.1", "metadata"),
        ("::ffff:169.254.169.254", "metadata"),
        ("64:ff9b::a9fe:a9fe", "metadata"),
        ("2002:a9fe:a9fe::1", "metadata"),
        ("fe80::1", "metadata"),
        ("fd00:ec2::254", "metadata"),
        ("168.63.129.16", "metadata"),
        ("192.0.0.192", "metadata"),
        ("100.100.100.200", "metadata"),
        ("224.0.0.1", "multicast or reserved"),
        ("255.255.255.255", "multicast or reserved"),
        ("240.0.0.1", "multicast or reserved"),
        ("ff02::1", "multicast or reserved"),
        ("::7f00:1", "multicast or reserved"),
    ],
)
def test_loopback_metadata_and_multicast_addresses_are_refused(address: str, reason: str) -> None:
    message = refusal(ip_address(address))
    assert reason in message
    assert bool(message) == bool(reason)


def test_configured_networks_are_the_only_ones_allowed_and_may_be_any() -> None:
    networks = (ip_network("10.0.0.0/8"), ip_network("169.254.0.0/16"))
    assert refusal(ip_address("10.1.2.3"), networks) == ""
    assert refusal(ip_address("169.254.1.1"), networks) == ""
    for other in ("8.8.8.8", "127.0.0.1", "fd00::1"):
        assert "none of the networks" in refusal(ip_address(other), networks)


async def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """A second lookup of the name would return another address."""
    names: list[str] = []

    def resolve(host: str, port: int) -> tuple[Address, ...]:
        names.append(host)
        return (ip_address("127.0.0.1" if len(names) == 1 else "127.0.0.2"),)

    only = (ip_network("127.0.0.1/32"),)
    async with foreign_server(replies(*[array_reply()] * 3)) as server:
        pool = external(url(server, "rebinding.example"))
        reader = IndexReader(Clock(), PATIENT_S, only, Lookups(resolve))
        assert await read_index(pool, reader) is not None
        assert server.connections == 1
    assert names.count("rebinding.example") == 1


async def test_the_allowed_addresses_of_a_name_are_tried_in_turn() -> None:
    found = tuple(ip_address(one) for one in ("127.0.0.9", "127.0.0.3", "127.0.0.1"))
    allowed = (ip_network("127.0.0.3/32"), ip_network("127.0.0.1/32"))
    async with foreign_server(replies(*[array_reply()] * 3)) as server:
        pool = external(url(server, "many.example"))
        reader = IndexReader(Clock(), PATIENT_S, allowed, Lookups(lambda host, port: found))
        assert await read_index(pool, reader) is not None


@pytest.mark.parametrize("redirect", [b"-MOVED 1 %b\r\n", b"-ASK 1 %b\r\n", b"+%b\r\n"])
async def test_redirects_of_a_server_are_not_followed(redirect: bytes) -> None:
    async with foreign_server(nothing) as other:
        place = b"127.0.0.1:%d" % other.port
        async with foreign_server(replies(*[redirect % place] * 4)) as server:
            assert await read_index(external(url(server))) is None
        assert other.connections == 0


@pytest.mark.parametrize(
    "serve",
    [
        endless(b"$10737418240\r\n", b"x" * MIB),
        endless(b"*1\r\n$10737418240\r\n", b"x" * MIB),
        endless(b"+", b"x" * MIB),
        endless(b"$", b"1" * MIB),
        endless(b"*1000000\r\n", b"$1048576\r\n" + b"x" * MIB + b"\r\n"),
        endless(b"*1000000\r\n", b"$0\r\n\r\n" * 10_000),
        endless(b"*1000000\r\n", b"$-1\r\n$1\r\nx\r\n" * 10_000),
        endless(b"*99999999999999999999\r\n", b"x" * MIB),
        endless(b"*1\r\n", b"*1\r\n" * MIB),
        endless(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * MIB),
        endless(b"\x16\x03\x03", b"\x00" * MIB),
    ],
    ids=[
        "a value",
        "a value in a list",
        "a line",
        "a number",
        "long values",
        "empty values",
        "no values",
        "a huge count",
        "nested lists",
        "HTTP",
        "TLS",
    ],
)
async def test_at_most_a_few_megabytes_of_an_endless_answer_are_read(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with foreign_server(serve) as server:
        gc.collect()
        tracemalloc.start()
        try:
            assert await read_index(external(url(server))) is None
            # The server runs in the same process, so this includes its buffers.
            assert tracemalloc.get_traced_memory()[1] < 64 * MIB
        finally:
            tracemalloc.stop()
    assert len(caplog.messages) <= 1


def frames(record: NodeReport | FetchReport) -> bytes:
    codec: Codec[Any] = Codec(type(record))
    return codec.encode(record)


WRONG = {
    **{name: frames(one) for name, one in BAD.items()},
    "rubbish": b"rubbish",
    "nothing": b"",
    "invalid UTF-8": frames(NODE).replace(b"demo", b"\xff\xfe\xfd\xfc"),
    "nested arrays": b"\x92\x01\x81\xa1x" + b"\x91" * 100_000 + b"\xc0",
    "nested maps": b"\x92\x01" + b"\x81\xa1x" * 100_000 + b"\xc0",
    "an array with a huge length": b"\xdd\xff\xff\xff\xff",
    "another record": frames(FETCH),
}


@pytest.mark.parametrize("name", WRONG)
async def test_an_invalid_report_is_left_out_and_the_others_are_read(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, right = WRONG[name], frames(NODE)
    assert wrong != right
    answer = array_reply(*[wrong] * 3, right)
    async with foreign_server(replies(answer, array_reply(frames(FETCH)), array_reply())) as server:
        found: Any = await read_index(external(url(server)))
    assert found is not None
    assert found.nodes == (NODE,)
    assert found.fetches == (FETCH,)
    [warning] = caplog.messages
    assert "ignoring 3 reports" in warning
    assert len(warning) < 400


async def test_too_many_reports_give_no_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with foreign_server(
        replies(array_reply(*[b"x"] * (registry.MOST_REPORTS + 1)))
    ) as server:
        assert await read_index(external(url(server))) is None
    assert caplog.messages == []


async def test_reading_a_trickling_server_ends_at_the_timeout() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        while True:
            writer.write(b"+")
            await writer.drain()
            await asyncio.sleep(0.01)

    for scheme in ("redis", "rediss"):
        async with foreign_server(trickle) as server:
            pool = external(url(server, scheme=scheme))
            assert await read_index(pool, IndexReader(Clock(), 0.3, LOCAL)) is None


async def test_the_password_is_not_sent_to_a_refused_address() -> None:
    received: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(1 << 16))

    async with foreign_server(listen) as server:
        pool = external(url(server, "localhost"))
        reader = IndexReader(Clock(), PATIENT_S)
        assert await reader.read(pool, observed(pool), None, LOGIN) is None
    assert received == []


@pytest.mark.parametrize(
    "written",
    [
        "unix:///run/redis.sock",
        "http://index.example",
        "https://index.example",
        "file:///etc/passwd",
        "gopher://index.example/_x",
        "redis+sentinel://index.example",
        "redis://index.example?ssl_ca_certs=/etc/passwd",
        "redis://index.example,redis://other.example",
        "redis://:password@index.example",
        "redis://index.example/\r\nFLUSHALL",
    ],
)
def test_only_the_url_of_a_single_redis_is_accepted(written: str) -> None:
    with pytest.raises(SpecError, match="indexUrl"):
        external(written)


@pytest.mark.parametrize(
    "name", ["../../kube-system/secrets/admin", "a/b", "..", "", "UPPER", "a b", "x" * 254]
)
@pytest.mark.parametrize("field", ["secretRef", "caSecretRef"])
def test_a_login_must_be_a_secret_of_the_pool_s_own_namespace(field: str, name: str) -> None:
    """The operator checks this too: the API server may have an older definition."""
    with pytest.raises(SpecError, match=rf"{field}\.name"):
        external("rediss://index.example", **{field: {"name": name}})


async def test_lookups_that_never_end_do_not_delay_other_namespaces() -> None:
    end = threading.Event()

    def resolve(host: str, port: int) -> tuple[Address, ...]:
        if host == "never.example":
            end.wait(3 * DEADLINE_S)
        return (ip_address("127.0.0.1"),)

    answered = asyncio.Event()
    api, lookups = Api(Configuration(), lambda verb, code: None, 60.0), Lookups(resolve)

    def poller_of(pool: Pool, reader: IndexReader, answered: Callable[[], None]) -> IndexPoller:
        poller = IndexPoller(PoolKey(pool.namespace, pool.uid), api, reader, answered, monotonic)
        seen = observed(pool)
        poller.schedule_read(pool, seen, status_of(seen, pool))
        return poller

    async with foreign_server(replies(*[array_reply()] * 3)) as server:
        blocked = [
            replaced(
                external(url(server, "never.example")), namespace="blocked", uid=f"blocked-{number}"
            )
            for number in range(3 * LOOKUPS)
        ]
        readers = [IndexReader(monotonic, 1.0, LOCAL, lookups) for _ in blocked]
        pairs = list(zip(blocked, readers, strict=True))
        running = [
            asyncio.create_task(poller_of(pool, reader, lambda: None).run())
            for pool, reader in pairs
        ]
        # Every poller has tried once, and no lookup has ended.
        await until(
            lambda: all(reader.due_in(pool, observed(pool), None) for pool, reader in pairs)
        )
        healthy = replaced(external(url(server, "index.example")), namespace="other", uid="other")
        poller = poller_of(healthy, IndexReader(monotonic, 1.0, LOCAL, lookups), answered.set)
        running.append(asyncio.create_task(poller.run()))
        try:
            async with asyncio.timeout(DEADLINE_S):
                await answered.wait()
        finally:
            end.set()
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            lookups.close()
            await api.close()
    assert poller.take_answer() is not None
    assert poller.take_answer() is None

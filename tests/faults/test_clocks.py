"""Clocks that disagree change no answer: nodes, the router or the Redis host an hour off.

In each cell requests of all kinds are handed over from prefill to decode nodes, and a decode node
is killed in mid-stream, so that its streams fail over to a node with another time of day. Then the
clock is stepped to and fro while a row runs. Every answer must be the undisturbed one, and what the
fault does not touch stays where it is. The operator's cells are in tests/cluster.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import psutil
import pytest

from baton_kvstore.embedded.redis_binary import find_redis_server
from tests.faults.conftest import HASTY, SLOW_DECODE, SLOW_PREFILL, STALL
from tests.support.faults.rows import Row
from tests.support.faults.runs import run_row
from tests.support.pools.processes import Cluster
from tests.support.pools.role_process import RoleProcess
from tests.support.stores.store_faults import FaultyStore
from tests.support.wrong_clock import HOUR_S, WrongClock

Whose = Literal["nodes", "router", "redis"]
WHOSE: tuple[Whose, ...] = ("nodes", "router", "redis")
ROWS = (
    Row("decode", "mid-stream", "kill", "seeded"),
    *(
        pytest.param(row, marks=pytest.mark.long)
        for row in (
            Row("prefill", "half published", "kill", "stop"),
            Row("all decode", "mid-stream", "kill", "penalties"),
        )
    ),
)
STEP_S = 0.1


class Skewed:
    """A pool in which one clock is an hour ahead from the start: that of a prefill and a decode
    node beside two that are right, of the router, or of the Redis servers."""

    def __init__(self, whose: Whose, folder: Path) -> None:
        self.whose = whose
        self.clock = WrongClock(folder, HOUR_S)
        binary = self.clock.before(find_redis_server()) if whose == "redis" else None
        self.pool = Cluster(
            *(2, 2),
            prefill_flags=[*SLOW_PREFILL, HASTY],
            decode_flags=[*SLOW_DECODE, HASTY],
            router_flags=["--handoff=always", STALL],
            store=FaultyStore(binary=binary),
        )
        for one in self._off():
            one.environment = self.clock.environment

    def _off(self) -> list[RoleProcess]:
        nodes = self.pool.nodes
        if self.whose == "nodes":
            return [nodes["prefill-0"], nodes["decode-0"]]
        return self.pool.routers if self.whose == "router" else []

    def check_the_clock(self, ahead_s: int) -> None:
        """That the processes have it, and no others."""
        store = self.pool.store
        assert store is not None
        for name in store.names("both"):
            with store.client(name) as client:
                wrong = client.time()[0] - time.time()
            assert abs(wrong - (ahead_s if self.whose == "redis" else 0)) < HOUR_S / 2
        off = {one.name for one in self._off()}
        for one in self.pool.processes():
            family = psutil.Process(one.pid)
            for each in (family, *family.children()):  # an engine is its node's child
                assert _has_wrong_clock(each.pid) == (one.name in off), one.name

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Two hours back and forth, again and again."""
        done = threading.Event()

        def step() -> None:
            ahead_s = HOUR_S
            while not done.wait(STEP_S):
                ahead_s = -ahead_s
                self.clock.set(ahead_s)

        stepping = threading.Thread(target=step)
        stepping.start()
        try:
            yield
        finally:
            done.set()
            stepping.join()


def _has_wrong_clock(pid: int) -> bool:
    return "libfaketime" in Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture(
    scope="module",
    params=[
        "nodes",
        *(pytest.param(one, marks=pytest.mark.long) for one in WHOSE if one != "nodes"),
    ],
)
def skewed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Skewed]:
    one = Skewed(request.param, tmp_path_factory.mktemp("clock"))
    with one.pool:
        yield one


def test_only_the_time_of_day_is_wrong(tmp_path: Path) -> None:
    clock = WrongClock(tmp_path, -HOUR_S)
    words = "import time; time.sleep(0.1); print(time.time() - {}, time.monotonic() - {})"
    now = words.format(time.time(), time.monotonic())
    told = subprocess.run(
        [sys.executable, "-c", now], env=clock.environment, capture_output=True, check=True
    )
    wall_s, monotonic_s = map(float, told.stdout.split())
    assert abs(wall_s + HOUR_S) < HOUR_S / 2
    assert 0.1 <= monotonic_s < HOUR_S / 2


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("ahead_s", [HOUR_S, pytest.param(-HOUR_S, marks=pytest.mark.long)])
def test_a_clock_that_is_an_hour_off_changes_no_answer(
    skewed: Skewed, calm: Cluster, row: Row, ahead_s: int
) -> None:
    skewed.clock.set(ahead_s)
    skewed.check_the_clock(ahead_s)
    run_row(skewed.pool, row, calm, seed=f"{skewed.whose}/{ahead_s}")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_clock_that_steps_while_requests_run_changes_no_answer(
    skewed: Skewed, calm: Cluster, row: Row
) -> None:
    with skewed.steps():
        run_row(skewed.pool, row, calm, seed=f"{skewed.whose}/steps")

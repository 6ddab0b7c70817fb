"""Wrong clocks of nodes, of the router or of the Redis host change no answer.

Each test hands requests of all kinds off to decode nodes, and kills a decode node in mid-stream, so
that its streams fail over to a node with another time of day. Another test steps the clock while a
row runs. Every answer must be the undisturbed one, and requests that the fault does not hit must
stay on their nodes. tests/cluster has the operator's tests.
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
from tests.faults.conftest import SHORT_DRAIN, SLOW_DECODE, SLOW_PREFILL, STALL
from tests.support.faults.rows import Row
from tests.support.faults.runs import run_row
from tests.support.pools.processes import Cluster
from tests.support.pools.role_process import RoleProcess
from tests.support.stores.store_faults import FaultyStore
from tests.support.wrong_clock import HOUR_S, WrongClock

Skewed = Literal["nodes", "router", "redis"]
SKEWED: tuple[Skewed, ...] = ("nodes", "router", "redis")
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


class SkewedPool:
    """A pool in which one clock is an hour ahead from the start: that of one prefill and one decode
    node of two each, of the router, or of the Redis servers."""

    def __init__(self, skewed_part: Skewed, folder: Path) -> None:
        self.skewed_part = skewed_part
        self.clock = WrongClock(folder, HOUR_S)
        binary = self.clock.before(find_redis_server()) if skewed_part == "redis" else None
        self.pool = Cluster(
            *(2, 2),
            prefill_flags=[*SLOW_PREFILL, SHORT_DRAIN],
            decode_flags=[*SLOW_DECODE, SHORT_DRAIN],
            router_flags=["--handoff=always", STALL],
            store=FaultyStore(binary=binary),
        )
        for process in self._skewed_processes():
            process.environment = self.clock.environment

    def _skewed_processes(self) -> list[RoleProcess]:
        nodes = self.pool.nodes
        if self.skewed_part == "nodes":
            return [nodes["prefill-0"], nodes["decode-0"]]
        return self.pool.routers if self.skewed_part == "router" else []

    def check_clocks(self, ahead_s: int) -> None:
        """Assert that exactly the intended processes have the wrong clock."""
        store = self.pool.store
        assert store is not None
        for name in store.names("both"):
            with store.client(name) as client:
                offset_s = client.time()[0] - time.time()
            assert abs(offset_s - (ahead_s if self.skewed_part == "redis" else 0)) < HOUR_S / 2
        skewed = {role_process.name for role_process in self._skewed_processes()}
        for role_process in self.pool.processes():
            parent = psutil.Process(role_process.pid)
            for process in (parent, *parent.children()):  # an engine is its node's child
                assert _has_fake_clock(process.pid) == (role_process.name in skewed), (
                    role_process.name
                )

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Step the clock by two hours, back and forth, until the block ends."""
        done = threading.Event()

        def step() -> None:
            ahead_s = HOUR_S
            while not done.wait(STEP_S):
                ahead_s = -ahead_s
                self.clock.set(ahead_s)

        thread = threading.Thread(target=step)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _has_fake_clock(pid: int) -> bool:
    return "libfaketime" in Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture(
    scope="module",
    params=[
        "nodes",
        *(pytest.param(part, marks=pytest.mark.long) for part in SKEWED if part != "nodes"),
    ],
)
def skewed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SkewedPool]:
    skewed_pool = SkewedPool(request.param, tmp_path_factory.mktemp("clock"))
    with skewed_pool.pool:
        yield skewed_pool


def test_a_wrong_clock_changes_the_wall_clock_and_not_the_monotonic_clock(tmp_path: Path) -> None:
    clock = WrongClock(tmp_path, -HOUR_S)
    code = "import time; time.sleep(0.1); print(time.time() - {}, time.monotonic() - {})"
    code = code.format(time.time(), time.monotonic())
    process = subprocess.run(
        [sys.executable, "-c", code], env=clock.environment, capture_output=True, check=True
    )
    wall_s, monotonic_s = map(float, process.stdout.split())
    assert abs(wall_s + HOUR_S) < HOUR_S / 2
    assert 0.1 <= monotonic_s < HOUR_S / 2


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("ahead_s", [HOUR_S, pytest.param(-HOUR_S, marks=pytest.mark.long)])
def test_a_clock_that_is_an_hour_off_changes_no_answer(
    skewed: SkewedPool, undisturbed: Cluster, row: Row, ahead_s: int
) -> None:
    skewed.clock.set(ahead_s)
    skewed.check_clocks(ahead_s)
    run_row(skewed.pool, row, undisturbed, seed=f"{skewed.skewed_part}/{ahead_s}")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_clock_that_steps_while_requests_run_changes_no_answer(
    skewed: SkewedPool, undisturbed: Cluster, row: Row
) -> None:
    with skewed.steps():
        run_row(skewed.pool, row, undisturbed, seed=f"{skewed.skewed_part}/steps")

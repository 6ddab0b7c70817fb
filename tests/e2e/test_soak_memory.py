"""A soak test of memory: after minutes of mixed traffic, no process uses more memory.

The pool's caches are so small that all are full and evict after the warm-up. The warm-up ends when
its time is over, each data server of the store has evicted, and each node has computed or fetched
more tokens than its cache holds. After that, the resident memory of each node process and each
Redis, and each Redis' own count, must stay level: the mean of the last quarter is within 5 % of the
mean of the first, or within 1 MiB if that is more (an index has 6 MiB). Two things still grow
towards their limit at that time:

- torch compiles a matrix product for each number of rows, and keeps 1,024 of them with 0.4 MB each.
  The nodes of this pool keep only 128.
- glibc's heap in the router fragments: allocated memory stays level, but some MiB are not returned
  to the kernel. The router may grow by ROUTER_SPARE.

The short form finds only fast growth. Both forms run in `make test-long` only, because they take
minutes and depend on how much traffic the machine serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.clients.traffic import Traffic
from tests.support.pools.baton_up import Pool
from tests.support.pools.leaks import held_by_pool
from tests.support.pools.memory import MIB, Course, MemoryWatch, used

CLIENTS = 8
KV_BLOCKS, BLOCK = 300, 16
STORE_MIB, DATA_SERVERS = 8, 2
POOL = [
    *("--prefill", "1", "--decode", "2", "--handoff", "always", "--chunk-blocks", "1"),
    *("--kv-blocks", str(KV_BLOCKS), "--max-model-len", "720"),
    *("--store-memory", f"{STORE_MIB}MiB", "--store-instances", str(DATA_SERVERS)),
]
SIM = [
    *("--engine", "sim", "--sim-eos-every", "60", "--sim-decode-ms", "2"),
    *("--sim-prefill-ms-per-token", "0.02"),
]
TORCH_MODEL = "llama-gqa2-tied"
FEW_PRODUCTS = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
ROUTER, ROUTER_SPARE = "baton router", 12 * MIB
FULL_S = 180.0  # time limit until the caches are full
OVER_LIMIT = 1.1  # client buffers add to the memory of the values


@dataclass(frozen=True)
class Length:
    """Durations in seconds. Memory may change by `spare` (a share of its first value) or by
    `spare_bytes`, whichever is more."""

    warm_s: float
    measured_s: float
    spare: float
    spare_bytes: int
    marker_life_s: float

    def allowed(self, name: str, course: Course) -> float:
        """Bytes by which the memory of this process may change."""
        return max(
            self.spare * course.first, self.spare_bytes, ROUTER_SPARE if ROUTER in name else 0
        )


# Growth that is visible after half a minute is a leak of megabytes.
SHORT = Length(warm_s=10.0, measured_s=30.0, spare=0.25, spare_bytes=8 * MIB, marker_life_s=5.0)
LONG = Length(warm_s=90.0, measured_s=600.0, spare=0.05, spare_bytes=MIB, marker_life_s=10.0)


@pytest.fixture
def sim_pool() -> Iterator[Pool]:
    with Pool([*SIM, *POOL]) as pool:
        yield pool


@pytest.fixture
def torch_pool(tiny_model: Callable[[str], Path]) -> Iterator[Pool]:
    model = ("--model", str(tiny_model(TORCH_MODEL)), "--dtype", "float32", "--threads", "1")
    with Pool([*model, *POOL], environment=FEW_PRODUCTS) as pool:
        yield pool


def soak(pool: Pool, seed: int, length: Length, *, exact: bool) -> str:
    with (
        MemoryWatch(pool, length.marker_life_s) as watch,
        Traffic(pool.url, seed, CLIENTS, exact=exact) as traffic,
    ):
        traffic.run_for(length.warm_s)
        traffic.run_for(FULL_S, enough=lambda: caches_are_full(pool, watch))
        assert caches_are_full(pool, watch), f"not after {FULL_S:g} s: {traffic.done}"
        watch.begin()
        before = {name: watch.evicted(name) for name in watch.data}
        traffic.run_for(length.measured_s)
        courses = watch.courses()
        after = {name: watch.evicted(name) for name in watch.data}
    traffic.check()
    pool.wait(lambda: not held_by_pool(pool.pool()), "release everything")
    report = "\n".join(f"  {name}: {course}" for name, course in courses.items())
    print(f"{traffic.done}\n{report}")
    assert min(vars(traffic.done).values()) > 0, traffic.done
    for name in watch.data:
        assert after[name] > before[name], f"{name} did not evict"
        assert watch.highest(used(name)) < OVER_LIMIT * watch.limit(name)
    grown = {
        name: str(course)
        for name, course in courses.items()
        if abs(course.last - course.first) > length.allowed(name, course)
    }
    assert grown == {}, f"{traffic.done}\n{report}"
    worst = max(courses.values(), key=lambda course: abs(course.growth))
    return f"{length.measured_s:g} s: {traffic.done}; the largest change: {worst}"


def caches_are_full(pool: Pool, watch: MemoryWatch) -> bool:
    if not all(watch.evicted(name) for name in watch.data):
        return False
    return all(
        node["load"]["computed_prompt_tokens_total"] + node["load"]["fetched_prompt_tokens_total"]
        > KV_BLOCKS * BLOCK
        for node in pool.pool()["nodes"]
    )


@pytest.mark.long
def test_memory_stays_level_over_half_a_minute_of_traffic(
    sim_pool: Pool, record_property: Callable[[str, object], None]
) -> None:
    record_property("soak", f"sim, {soak(sim_pool, 1, SHORT, exact=True)}")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_memory_stays_level_over_ten_minutes_of_traffic(
    sim_pool: Pool, record_property: Callable[[str, object], None]
) -> None:
    record_property("soak", f"sim, {soak(sim_pool, 2, LONG, exact=True)}")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_memory_stays_level_over_ten_minutes_of_traffic_with_a_real_model(
    torch_pool: Pool, record_property: Callable[[str, object], None]
) -> None:
    """Not `exact`, because another batch may round a logit differently and change an id."""
    record_property("soak", f"torch, {soak(torch_pool, 3, LONG, exact=False)}")

"""A soak without a fault: minutes of mixed traffic, and no process has more memory at the end.

The pool's caches are so small that all of them are full, and evicting, after the warm-up: it ends
when each data server of the store has evicted and each node has computed or fetched more tokens
than its cache has room for, and not before its time. Then the resident memory of each node process
and each Redis, and each Redis' own count, have to stay level: the mean of the last quarter within
5 % of the first's, or 1 MiB where that is more (an index has 6 MiB). Two things are still on their
way to their bound by then:

- torch compiles a product for each number of rows it meets, and keeps 1,024 of them, 0.4 MB each;
  the pool's nodes are told to keep 128.
- glibc's heap in the router gets holes: what is allocated stays level, and some MiB are not given
  back to the kernel. It may grow by ROUTER_SPARE.

The short form only finds what grows fast. All of it is for `make test-long`: it takes its time, and
what it compares depends on how much traffic the machine serves.
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
FULL_S = 180.0  # the caches are full by then
OVER_LIMIT = 1.1  # a client's buffers may lie beside the values


@dataclass(frozen=True)
class Length:
    """Seconds; `spare`: as a share of what was there first, and in bytes, whichever is more."""

    warm_s: float
    measured_s: float
    spare: float
    spare_bytes: int
    marker_life_s: float

    def allowed(self, name: str, course: Course) -> float:
        """Bytes that may have come or gone."""
        return max(
            self.spare * course.first, self.spare_bytes, ROUTER_SPARE if ROUTER in name else 0
        )


# What shows growth in half a minute is a leak of megabytes.
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
        traffic.go_on(length.warm_s)
        traffic.go_on(FULL_S, enough=lambda: caches_are_full(pool, watch))
        assert caches_are_full(pool, watch), f"not after {FULL_S:g} s: {traffic.done}"
        watch.begin()
        before = {name: watch.evicted(name) for name in watch.data}
        traffic.go_on(length.measured_s)
        courses = watch.courses()
        after = {name: watch.evicted(name) for name in watch.data}
    traffic.check()
    pool.wait(lambda: not held_by_pool(pool.pool()), "give everything back")
    told = "\n".join(f"  {name}: {course}" for name, course in courses.items())
    print(f"{traffic.done}\n{told}")
    assert min(vars(traffic.done).values()) > 0, traffic.done
    for name in watch.data:
        assert after[name] > before[name], f"{name} was not at its bound"
        assert watch.highest(used(name)) < OVER_LIMIT * watch.limit(name)
    grown = {
        name: str(course)
        for name, course in courses.items()
        if abs(course.last - course.first) > length.allowed(name, course)
    }
    assert grown == {}, f"{traffic.done}\n{told}"
    worst = max(courses.values(), key=lambda course: abs(course.growth))
    return f"{length.measured_s:g} s: {traffic.done}; the most that changed: {worst}"


def caches_are_full(pool: Pool, watch: MemoryWatch) -> bool:
    if not all(watch.evicted(name) for name in watch.data):
        return False
    return all(
        node["load"]["computed_prompt_tokens_total"] + node["load"]["fetched_prompt_tokens_total"]
        > KV_BLOCKS * BLOCK
        for node in pool.pool()["nodes"]
    )


@pytest.mark.long
def test_half_a_minute_of_traffic_leaves_memory_where_it_was(
    sim_pool: Pool, record_property: Callable[[str, object], None]
) -> None:
    record_property("soak", f"sim, {soak(sim_pool, 1, SHORT, exact=True)}")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_minutes_of_traffic_leave_memory_where_it_was(
    sim_pool: Pool, record_property: Callable[[str, object], None]
) -> None:
    record_property("soak", f"sim, {soak(sim_pool, 2, LONG, exact=True)}")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_minutes_of_traffic_leave_memory_where_it_was_with_a_real_model(
    torch_pool: Pool, record_property: Callable[[str, object], None]
) -> None:
    """Not `exact`: another batch may round a logit, and so say another token."""
    record_property("soak", f"torch, {soak(torch_pool, 3, LONG, exact=False)}")

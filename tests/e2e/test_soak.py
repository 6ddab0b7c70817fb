"""A soak test: many requests of all kinds on a pool that is far too small.

The tight pool has 2 prefill and 2 decode nodes with the simulated engine, whose ids depend on every
byte of KV, and hardly more blocks than one request needs. Requests are preempted, parked requests
lose their blocks, and clients hang up. Each result must equal that of a roomy pool with one node.
At the end no block, booking, connection or file descriptor may remain.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import psutil
import pytest

from tests.support.clients.http import events, exchange, hang_up
from tests.support.clients.mix import ClientCall, Mix, Result, result_of
from tests.support.pools.baton_up import Pool
from tests.support.pools.leaks import held_by_pool

IN_FLIGHT = 24
SIM = [
    *("--engine", "sim", "--chunk-blocks", "1", "--max-model-len", "720"),
    *("--sim-eos-every", "60", "--max-batched-tokens", "128"),
]
TIGHT_BLOCKS = 46
# The number of pooled connections grows with the most requests in flight at one time. A leak grows
# with every request.
SPARE_FDS = 16
SETTLE_S = 120.0


@pytest.fixture(scope="module")
def roomy() -> Iterator[Pool]:
    flags = [*SIM, "--prefill", "0", "--decode", "1", "--kv-blocks", "4000"]
    with Pool(flags) as pool:
        yield pool


@pytest.fixture(scope="module")
def tight() -> Iterator[Pool]:
    flags = [
        *SIM,
        *("--prefill", "2", "--decode", "2", "--kv-blocks", str(TIGHT_BLOCKS)),
        *("--handoff", "always", "--sim-decode-ms", "1", "--sim-prefill-ms-per-token", "0.02"),
    ]
    with Pool(flags) as pool:
        yield pool


def send_unstreamed(pool: Pool, call: ClientCall) -> Result:
    """Send the call without streaming."""
    response = exchange(pool.url, call.path, call.body)
    assert response.status == 200, (call, response.body)
    return result_of([response.body])


def send(pool: Pool, call: ClientCall) -> Result:
    """Send the call as the client would. If the client hangs up, return what it received until
    then."""
    streamed = {**call.body, "stream": True, "stream_options": {"include_usage": True}}
    if call.leave == 0:
        body = streamed if call.stream else call.body
        hang_up(pool.url, call.path, body, after_s=0.01)
        return Result()
    if call.leave is not None:
        stream = events(pool.url, call.path, streamed)
        received = list(islice(stream, call.leave))
        stream.close()
        return result_of(received)
    if call.stream:
        return result_of(events(pool.url, call.path, streamed))
    return send_unstreamed(pool, call)


def check(actual: Result, reference: Result, call: ClientCall) -> None:
    if call.leave is not None:
        actual.check_begins(reference)
        return
    assert actual == reference, f"{call}\nactual    {actual}\nreference {reference}"


def run_round(tight: Pool, roomy: Pool, calls: list[ClientCall]) -> None:
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        references = list(threads.map(lambda call: send_unstreamed(roomy, call), calls))
        results = list(threads.map(lambda call: send(tight, call), calls))
    for call, actual, reference in zip(calls, results, references, strict=True):
        check(actual, reference, call)


def settle(pool: Pool) -> None:
    until = time.monotonic() + SETTLE_S
    while wrong := held_by_pool(pool.pool()):
        assert time.monotonic() < until, wrong
        time.sleep(0.05)


def handles(pool: Pool) -> dict[int, tuple[int, int]]:
    """(file descriptors, threads) of each process by pid."""
    counts = {}
    for one in pool.processes():
        try:
            counts[one.pid] = (one.num_fds(), one.num_threads())
        except psutil.NoSuchProcess:
            continue
    return counts


def soak(tight: Pool, roomy: Pool, seed: int, rounds: int, requests: int) -> None:
    mix = Mix(random.Random(seed))
    before: dict[int, tuple[int, int]] = {}
    for _ in range(rounds + 1):
        run_round(tight, roomy, [mix.request() for _ in range(requests)])
        settle(tight)
        before = before or handles(tight)  # after one round, when the connection pools are filled
    totals = tight.totals()
    assert totals["preemptions_total"] > 0
    assert totals["reused_chunks_total"] > 0
    after = handles(tight)
    assert after.keys() == before.keys(), "processes started or ended"
    for pid, (fds, threads) in after.items():
        name = psutil.Process(pid).cmdline()
        assert fds <= before[pid][0] + SPARE_FDS, f"{name}: {before[pid]} then {after[pid]}"
        assert threads <= before[pid][1] + SPARE_FDS, f"{name}: {before[pid]} then {after[pid]}"


def test_an_overloaded_pool_gives_the_results_of_a_roomy_one_and_leaks_nothing(
    tight: Pool, roomy: Pool
) -> None:
    soak(tight, roomy, seed=1, rounds=1, requests=60)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_an_overloaded_pool_stays_exact_and_leaks_nothing_for_minutes(
    tight: Pool, roomy: Pool, seed: int
) -> None:
    soak(tight, roomy, seed=seed, rounds=20, requests=150)

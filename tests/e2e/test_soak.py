"""A soak: many requests of all kinds on a pool that is far too small, and nothing wrong or left.

The pool has 2 prefill and 2 decode nodes with the simulated engine, whose next token depends on
every byte of the KV blocks before it, and hardly more blocks than one request needs: requests are
preempted, parked ones give blocks back, clients hang up. Each answer must be the one that a roomy
pool of one node gives, and at the end no block, booking, connection or file descriptor may be held.
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
# Connections of pools grow with what was in flight at most; a leak grows with each request.
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


def plain(pool: Pool, asked: ClientCall) -> Result:
    """The answer in one piece."""
    answer = exchange(pool.url, asked.path, asked.body)
    assert answer.status == 200, (asked, answer.body)
    return result_of([answer.body])


def delivered(pool: Pool, asked: ClientCall) -> Result:
    """The answer as the client asked for it; of one that left, what it had until then."""
    streamed = {**asked.body, "stream": True, "stream_options": {"include_usage": True}}
    if asked.leave == 0:
        body = streamed if asked.stream else asked.body
        hang_up(pool.url, asked.path, body, after_s=0.01)
        return Result()
    if asked.leave is not None:
        stream = events(pool.url, asked.path, streamed)
        seen = list(islice(stream, asked.leave))
        stream.close()
        return result_of(seen)
    if asked.stream:
        return result_of(events(pool.url, asked.path, streamed))
    return plain(pool, asked)


def check(got: Result, reference: Result, asked: ClientCall) -> None:
    if asked.leave is not None:
        got.check_begins(reference)
        return
    assert got == reference, f"{asked}\ngot       {got}\nreference {reference}"


def run_round(tight: Pool, roomy: Pool, asked: list[ClientCall]) -> None:
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        wanted = threads.map(lambda one: plain(roomy, one), asked)
        references = list(wanted)
        answers = list(threads.map(lambda one: delivered(tight, one), asked))
    for one, got, reference in zip(asked, answers, references, strict=True):
        check(got, reference, one)


def settle(pool: Pool) -> None:
    until = time.monotonic() + SETTLE_S
    while wrong := held_by_pool(pool.pool()):
        assert time.monotonic() < until, wrong
        time.sleep(0.05)


def handles(pool: Pool) -> dict[int, tuple[int, int]]:
    """File descriptors and threads of each process."""
    found = {}
    for one in pool.processes():
        try:
            found[one.pid] = (one.num_fds(), one.num_threads())
        except psutil.NoSuchProcess:
            continue
    return found


def soak(tight: Pool, roomy: Pool, seed: int, rounds: int, requests: int) -> None:
    mix = Mix(random.Random(seed))
    before: dict[int, tuple[int, int]] = {}
    for _ in range(rounds + 1):
        run_round(tight, roomy, [mix.request() for _ in range(requests)])
        settle(tight)
        before = before or handles(tight)  # after one round: pools of connections are filled
    totals = tight.totals()
    assert totals["preemptions_total"] > 0
    assert totals["reused_chunks_total"] > 0
    after = handles(tight)
    assert after.keys() == before.keys(), "processes came or went"
    for pid, (fds, threads) in after.items():
        name = psutil.Process(pid).cmdline()
        assert fds <= before[pid][0] + SPARE_FDS, f"{name}: {before[pid]} then {after[pid]}"
        assert threads <= before[pid][1] + SPARE_FDS, f"{name}: {before[pid]} then {after[pid]}"


def test_a_crowded_pool_gives_the_answers_of_a_roomy_one_and_keeps_nothing(
    tight: Pool, roomy: Pool
) -> None:
    soak(tight, roomy, seed=1, rounds=1, requests=60)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_crowded_pool_stays_exact_and_leaks_nothing_for_minutes(
    tight: Pool, roomy: Pool, seed: int
) -> None:
    soak(tight, roomy, seed=seed, rounds=20, requests=150)

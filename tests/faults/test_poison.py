"""A request that crashes each engine that gets it: it ends, and takes nobody with it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.clients.http import Json
from tests.support.clients.streams import ask
from tests.support.faults.breaker import Breaker
from tests.support.faults.cases import PATH, Sizes, make_cases
from tests.support.pools.leaks import settle
from tests.support.pools.processes import SIM, Cluster

POISON = 7
ATTEMPTS = 3
OTHERS = 20
# Long answers, so that nodes die under the others
SIZES = Sizes(target=96, answer=48)


@pytest.fixture(scope="module")
def pool() -> Iterator[Cluster]:
    flags = [*SIM, f"--sim-poison-token={POISON}", "--sim-decode-ms=15"]
    with Cluster(2, 2, flags=flags, router_flags=["--handoff=always"]) as cluster:
        yield cluster


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.long)])
def test_it_ends_with_a_final_error_after_three_attempts_while_twenty_others_finish(
    stream: bool, pool: Cluster, calm: Cluster
) -> None:
    cases = [
        make_cases(calm.url, "greedy", "mid-stream", f"poison {stream} {number}", SIZES, [])[0]
        for number in range(OTHERS)
    ]
    # Shorter than a chunk: one that is published before a node dies would be progress.
    poisonous: Json = {"prompt": [*[70] * 10, POISON], "max_tokens": 8, "stream": stream}
    starts = sum(node.starts for node in pool.nodes.values())
    with Breaker(pool, ()), ThreadPoolExecutor(OTHERS + 1) as threads:
        asked = [threads.submit(ask, pool.url, PATH, case.body) for case in cases]
        bad = threads.submit(ask, pool.url, PATH, poisonous).result()
        for case, answer in zip(cases, asked, strict=True):
            case.check(answer.result())
    assert bad.status == 500, bad
    assert bad.error is not None
    assert bad.error["code"] == "request_kills_nodes", bad.error
    pool.repair()
    settle(pool)
    # An attempt may have been lost before it came to its engine.
    deaths = sum(node.starts for node in pool.nodes.values()) - starts
    assert 0 < deaths <= ATTEMPTS

"""A request that crashes every engine ends with an error and harms no other request."""

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
# Long answers, so that nodes die while the other requests run
SIZES = Sizes(target=96, answer=48)


@pytest.fixture(scope="module")
def pool() -> Iterator[Cluster]:
    flags = [*SIM, f"--sim-poison-token={POISON}", "--sim-decode-ms=15"]
    with Cluster(2, 2, flags=flags, router_flags=["--handoff=always"]) as cluster:
        yield cluster


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_poisonous_request_fails_after_three_attempts_and_twenty_others_finish(
    stream: bool, pool: Cluster, undisturbed: Cluster
) -> None:
    seeds = [f"poison {stream} {number}" for number in range(OTHERS)]
    cases = [
        make_cases(undisturbed.url, "greedy", "mid-stream", seed, SIZES, [])[0] for seed in seeds
    ]
    # Shorter than a chunk: a chunk published before the node dies would count as progress.
    poisonous: Json = {"prompt": [*[70] * 10, POISON], "max_tokens": 8, "stream": stream}
    starts = sum(node.starts for node in pool.nodes.values())
    with Breaker(pool, ()), ThreadPoolExecutor(OTHERS + 1) as threads:
        answers = [threads.submit(ask, pool.url, PATH, case.body) for case in cases]
        bad = threads.submit(ask, pool.url, PATH, poisonous).result()
        for case, answer in zip(cases, answers, strict=True):
            case.check(answer.result())
    assert bad.status == 500, bad
    assert bad.error is not None
    assert bad.error["code"] == "request_kills_nodes", bad.error
    pool.repair()
    settle(pool)
    # An attempt may be lost before it reaches the engine.
    deaths = sum(node.starts for node in pool.nodes.values()) - starts
    assert 0 < deaths <= ATTEMPTS

"""A pinned prefix in a pool of real processes: computed once, kept under a flood, found by
placement, pinned again on a node that restarts, and free when its time is over."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton_router.http.prefixes import PREFIXES_PATH
from tests.support.clients.http import Answer, Json, complete, exchange
from tests.support.pools.processes import Cluster

# 160 blocks, of which 40 may be pinned. decode-1 pins nothing.
SIM = (
    *("--engine=sim", "--chunk-blocks=2", "--kv-blocks=160", "--max-model-len=2048"),
    *("--sim-prefill-ms-per-token=0.1", "--fetch=always"),
)
PREFIX = [32 + (7 * i) % 90 for i in range(512)]
KEEPERS = ("decode-0", "prefill-0")


@pytest.fixture(scope="module")
def pool() -> Iterator[Cluster]:
    with Cluster(1, 2, flags=SIM, own_flags={"decode-1": ["--max-pinned-fraction=0"]}) as cluster:
        yield cluster


def pin(pool: Cluster, ttl_s: int) -> Json:
    answer = exchange(pool.url, PREFIXES_PATH, {"prompt": PREFIX, "ttl_s": ttl_s})
    assert answer.status == 200, answer.body
    return answer.body


def states(pool: Cluster) -> list[tuple[str, str]]:
    """The nodes that have the pinned prefix, or say that they do not."""
    prefixes = exchange(pool.url, PREFIXES_PATH).body["prefixes"]
    return [(node["node"], node["state"]) for each in prefixes for node in each["nodes"]]


def wait_until_pinned(pool: Cluster) -> None:
    expected = dict.fromkeys(KEEPERS, "pinned") | {"decode-1": "refused"}
    pool.wait(lambda: dict(states(pool)) | {"decode-1": "refused"} == expected, "pin the prefix")


def loads(pool: Cluster) -> dict[str, Json]:
    return {node["id"]: node["load"] for node in pool.pool()["nodes"]}


def flood(pool: Cluster, seed: int) -> None:
    """Fill each node's cache with other prompts, at least twice."""

    def one(number: int) -> Answer:
        prompt = [32 + (number * seed + 11 * i + i * i) % 90 for i in range(1400)]
        return complete(pool.url, prompt, max_tokens=2)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one, range(seed, seed + 18)))


def test_a_pinned_prefix_is_computed_once_and_hit_on_its_node_after_a_flood(pool: Cluster) -> None:
    prefix = pin(pool, 3000)
    assert (prefix["tokens"], prefix["chunks"]) == (512, 16)
    wait_until_pinned(pool)
    before = loads(pool)
    # Followers fetch the prefix, and compute the last token or its block once more.
    computed = sum(load["computed_prompt_tokens_total"] for load in before.values())
    assert 512 <= computed <= 512 + 16
    assert [before[name]["pinned_blocks"] for name in ("prefill-0", "decode-0", "decode-1")] == [
        *(32, 32, 0)
    ]
    flood(pool, 101)
    answer = complete(pool.url, [*PREFIX, 1, 2, 3], max_tokens=4)
    assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 512
    id = answer.headers["x-baton-request-id"]
    [request] = exchange(pool.url, f"/requests/{id}").body["requests"]
    [attempt] = request["attempts"]
    assert (attempt["prefill"], attempt["decode"]) == (None, "decode-0")
    assert attempt["known"]["cached_tokens"] == 512
    [measured] = attempt["measured"]
    assert (measured["cached_tokens"], measured["computed_tokens"]) == (512, 3)


def test_a_node_that_restarts_gets_the_prefix_again_and_so_does_a_router_that_restarts(
    pool: Cluster,
) -> None:
    pin(pool, 3000)
    wait_until_pinned(pool)
    killed = pool.nodes["decode-0"]
    killed.kill()
    killed.start()
    pool.await_ready()
    wait_until_pinned(pool)
    load = loads(pool)["decode-0"]
    assert load["pinned_blocks"] == 32
    assert load["computed_prompt_tokens_total"] <= 16
    pool.router.kill()
    pool.router.start()
    pool.await_ready()
    wait_until_pinned(pool)


def test_a_prefix_whose_time_is_over_can_be_evicted(pool: Cluster) -> None:
    pin(pool, 3000)
    wait_until_pinned(pool)
    pin(pool, 2)
    pool.wait(
        lambda: (
            not states(pool) and not any(load["pinned_blocks"] for load in loads(pool).values())
        ),
        "end the pin",
    )
    for load in loads(pool).values():
        assert load["free_blocks"] == load["total_blocks"]

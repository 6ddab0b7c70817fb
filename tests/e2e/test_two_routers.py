"""Two routers share one pool: each owns its requests, and both give the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.clients.http import Json, complete, exchange
from tests.support.pools.processes import Cluster

SIM = ("--engine", "sim", "--chunk-blocks", "1", "--sim-decode-ms", "5", "--link-grace=0.5")
TOKEN = "t0ken-of-the-pool"


@pytest.fixture(scope="module")
def pool() -> Iterator[Cluster]:
    """A pool with two routers. The second does not wait for its streams when it is stopped."""
    cluster = Cluster(2, 2, flags=SIM, router_flags=["--handoff=always"], routers=2)
    for process in cluster.processes():
        process.environment = {"BATON_LINK_TOKEN": TOKEN}
    cluster.routers[1].words.append("--drain-timeout=0")
    with cluster:
        for url in urls_of(cluster):
            wait_for(cluster, url, lambda nodes: [one["state"] for one in nodes] == ["ready"] * 4)
        yield cluster


def urls_of(pool: Cluster) -> list[str]:
    return [router.url for router in pool.routers]


def wait_for(pool: Cluster, url: str, condition: Callable[[list[Json]], bool]) -> None:
    """Wait until `condition` holds for the pool's nodes as one router reports them."""

    def holds() -> bool:
        try:
            return condition(exchange(url, "/pool").body["nodes"])
        except OSError:  # the router does not listen yet
            return False

    pool.wait(holds, "reach the expected state")


def text_and_placement(url: str, number: int) -> tuple[str, str]:
    """The text of a completion and its placement header."""
    fields: Json = {"max_tokens": 24, "temperature": 1.0, "seed": number, "ignore_eos": True}
    completion = complete(url, [32 + (number * 7 + i) % 90 for i in range(100)], **fields)
    return completion.body["choices"][0]["text"], completion.headers["x-baton-placement"]


def test_concurrent_requests_to_both_routers_give_the_same_texts_as_alone(pool: Cluster) -> None:
    urls = urls_of(pool)
    alone = {number: text_and_placement(urls[0], number)[0] for number in range(8)}
    with ThreadPoolExecutor(16) as threads:
        calls = [(url, number) for number in alone for url in urls]
        results = list(threads.map(lambda call: text_and_placement(*call), calls))
    assert [text for text, _ in results] == [alone[number] for _, number in calls]
    assert all("prefill-" in placement and "decode-" in placement for _, placement in results)


def test_requests_of_both_routers_leave_a_node_that_one_router_drains(pool: Cluster) -> None:
    urls = urls_of(pool)
    fields: Json = {"max_tokens": 1000, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    prompt = [32 + i % 90 for i in range(100)]
    alone = complete(urls[0], prompt, **fields).body["choices"]
    admin(urls[0], "decode-1", "drain")
    for url in urls:
        wait_for(pool, url, lambda nodes: state_of(nodes, "decode-1") == ("draining", 0))
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(complete, url, prompt, **fields) for url in urls * 4]
        wait_for(pool, urls[0], lambda nodes: state_of(nodes, "decode-0") == ("ready", 8))
        admin(urls[1], "decode-1", "resume")
        admin(urls[1], "decode-0", "drain")
        for url in urls:
            wait_for(pool, url, lambda nodes: state_of(nodes, "decode-0") == ("draining", 0))
        completions = [future.result() for future in futures]
    admin(urls[0], "decode-0", "resume")
    assert [completion.body["choices"] for completion in completions] == [alone] * 8
    placements = [completion.headers["x-baton-placement"] for completion in completions]
    assert all("decode=decode-1" in placement for placement in placements)
    assert all(placement.endswith("placed again: drained") for placement in placements)


def test_a_router_that_stops_ends_only_its_own_requests(pool: Cluster) -> None:
    """This is the last test of the module, because it stops a router."""
    first, second = pool.routers
    alone = text_and_placement(first.url, 1)[0]
    long: Json = {"prompt": "x" * 50, "max_tokens": 2000, "ignore_eos": True, "seed": 1}
    with ThreadPoolExecutor(16) as threads:
        lost = [threads.submit(exchange, second.url, "/v1/completions", long) for _ in range(4)]
        wait_for(pool, first.url, lambda nodes: sum(one["load"]["running"] for one in nodes) == 4)
        kept = [threads.submit(text_and_placement, first.url, 1) for _ in range(4)]
        second.end()
        assert [one.result()[0] for one in kept] == [alone] * 4
        assert {one.result().status for one in lost} == {503}
    pool.wait(lambda: not second.alive, "end the router")
    assert second.returncode == 0
    kinds = ("running", "waiting", "parked")
    wait_for(
        pool,
        first.url,
        lambda nodes: not any(one["load"][kind] for one in nodes for kind in kinds),
    )


def admin(url: str, node: str, action: str) -> None:
    """Drain a node at once, or resume it. A call without the token is refused."""
    path, body = f"/nodes/{node}/{action}", {"deadline_s": 0} if action == "drain" else {}
    assert exchange(url, path, body).status == 401
    assert exchange(url, path, body, {"Authorization": f"Bearer {TOKEN}"}).status == 200


def state_of(nodes: list[Json], name: str) -> tuple[str, int]:
    [node] = [one for one in nodes if one["id"] == name]
    return node["state"], node["load"]["requests"]

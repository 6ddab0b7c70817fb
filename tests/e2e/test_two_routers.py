"""Two routers before one pool: each owns its requests, both give the tokens of one alone."""

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
    """The second router, told to end, ends its streams."""
    made = Cluster(2, 2, flags=SIM, router_flags=["--handoff=always"], routers=2)
    for one in made.processes():
        one.environment = {"BATON_LINK_TOKEN": TOKEN}
    made.routers[1].words.append("--drain-timeout=0")
    with made as cluster:
        for url in urls_of(cluster):
            wait_for(cluster, url, lambda nodes: [one["state"] for one in nodes] == ["ready"] * 4)
        yield cluster


def urls_of(pool: Cluster) -> list[str]:
    return [router.url for router in pool.routers]


def wait_for(pool: Cluster, url: str, condition: Callable[[list[Json]], bool]) -> None:
    """Until the pool's nodes, as one router sees them, are so."""

    def so() -> bool:
        try:
            return condition(exchange(url, "/pool").body["nodes"])
        except OSError:  # it does not listen yet
            return False

    pool.wait(so, "come to what was waited for")


def text(url: str, number: int) -> tuple[str, str]:
    """An answer's text and its placement."""
    fields: Json = {"max_tokens": 24, "temperature": 1.0, "seed": number, "ignore_eos": True}
    answer = complete(url, [32 + (number * 7 + i) % 90 for i in range(100)], **fields)
    return answer.body["choices"][0]["text"], answer.headers["x-baton-placement"]


def test_both_answer_at_once_as_one_does_alone(pool: Cluster) -> None:
    urls = urls_of(pool)
    alone = {number: text(urls[0], number)[0] for number in range(8)}
    with ThreadPoolExecutor(16) as threads:
        asked = [(url, number) for number in alone for url in urls]
        answers = list(threads.map(lambda one: text(*one), asked))
    assert [answer for answer, _ in answers] == [alone[number] for _, number in asked]
    assert all("prefill-" in placed and "decode-" in placed for _, placed in answers)


def test_a_node_that_one_router_drains_is_left_by_the_requests_of_both(pool: Cluster) -> None:
    urls = urls_of(pool)
    fields: Json = {"max_tokens": 1000, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    prompt = [32 + i % 90 for i in range(100)]
    alone = complete(urls[0], prompt, **fields).body["choices"]
    tell(urls[0], "decode-1", "drain")
    for url in urls:
        wait_for(pool, url, lambda nodes: state_of(nodes, "decode-1") == ("draining", 0))
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(complete, url, prompt, **fields) for url in urls * 4]
        wait_for(pool, urls[0], lambda nodes: state_of(nodes, "decode-0") == ("ready", 8))
        tell(urls[1], "decode-1", "resume")
        tell(urls[1], "decode-0", "drain")
        for url in urls:
            wait_for(pool, url, lambda nodes: state_of(nodes, "decode-0") == ("draining", 0))
        answers = [one.result() for one in asked]
    tell(urls[0], "decode-0", "resume")
    assert [answer.body["choices"] for answer in answers] == [alone] * 8
    placed = [answer.headers["x-baton-placement"] for answer in answers]
    assert all("decode=decode-1" in one for one in placed)
    assert all(one.endswith("placed again: drained") for one in placed)


def test_a_router_that_ends_takes_only_its_own_requests_with_it(pool: Cluster) -> None:
    """The last test here: one router is left."""
    first, second = pool.routers
    alone = text(first.url, 1)[0]
    long: Json = {"prompt": "x" * 50, "max_tokens": 2000, "ignore_eos": True, "seed": 1}
    with ThreadPoolExecutor(16) as threads:
        lost = [threads.submit(exchange, second.url, "/v1/completions", long) for _ in range(4)]
        wait_for(pool, first.url, lambda nodes: sum(one["load"]["running"] for one in nodes) == 4)
        kept = [threads.submit(text, first.url, 1) for _ in range(4)]
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


def tell(url: str, node: str, act: str) -> None:
    """At once; only who says the token may."""
    path, words = f"/nodes/{node}/{act}", {"deadline_s": 0} if act == "drain" else {}
    assert exchange(url, path, words).status == 401
    assert exchange(url, path, words, {"Authorization": f"Bearer {TOKEN}"}).status == 200


def state_of(nodes: list[Json], name: str) -> tuple[str, int]:
    [node] = [one for one in nodes if one["id"] == name]
    return node["state"], node["load"]["requests"]

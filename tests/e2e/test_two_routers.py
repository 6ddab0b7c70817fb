"""Two routers before one pool: each owns its requests, both give the tokens of one alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import psutil
import pytest

from baton_kvstore.embedded import EmbeddedStore
from tests.support.clients.http import Json, complete, exchange
from tests.support.pools.one_role import role, wait_ready

SIM = ("--engine", "sim", "--chunk-blocks", "1", "--sim-decode-ms", "5")
TOKEN = "t0ken-of-the-pool"
WAIT_S = 180.0


class Routers(NamedTuple):
    urls: tuple[str, str]
    second: int  # its process id


@pytest.fixture
def routers() -> Iterator[Routers]:
    """Of a pool of 2 prefill and 2 decode nodes; the second one, told to end, ends its streams."""
    with EmbeddedStore(64 << 20) as store, ExitStack() as stack:
        index = {"BATON_REDIS_INDEX": store.index_url, "BATON_LINK_TOKEN": TOKEN}
        where = {**index, "BATON_REDIS_DATA": ",".join(store.data_urls)}
        log: list[str] = []
        pids: list[int] = []
        for number in range(2):
            for name in ("prefill", "decode"):
                words = (name, *SIM, f"--node={name}-{number}", "--link-grace=0.5")
                stack.enter_context(role(*words, log=log, pids=pids, **where))
        urls = [
            stack.enter_context(
                role("router", "--port=0", "--handoff=always", *flags, log=log, pids=pids, **index)
            )
            for flags in ((), ("--drain-timeout=0",))
        ]
        for url in urls:
            wait_ready(url)
            wait_for(url, lambda nodes: sum(one["state"] == "ready" for one in nodes) == 4)
        yield Routers((urls[0], urls[1]), pids[-1])


def until_true(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def wait_for(url: str, condition: Callable[[list[Json]], bool]) -> None:
    """Until the pool's nodes, as one router sees them, are so."""
    until_true(lambda: condition(exchange(url, "/pool").body["nodes"]))


def text(url: str, number: int) -> tuple[str, str]:
    """An answer's text and its placement."""
    fields: Json = {"max_tokens": 24, "temperature": 1.0, "seed": number, "ignore_eos": True}
    answer = complete(url, [32 + (number * 7 + i) % 90 for i in range(100)], **fields)
    return answer.body["choices"][0]["text"], answer.headers["x-baton-placement"]


def test_both_answer_at_once_as_one_does_alone(routers: Routers) -> None:
    alone = {number: text(routers.urls[0], number)[0] for number in range(8)}
    with ThreadPoolExecutor(16) as threads:
        asked = [(url, number) for number in alone for url in routers.urls]
        answers = list(threads.map(lambda one: text(*one), asked))
    assert [answer for answer, _ in answers] == [alone[number] for _, number in asked]
    assert all("prefill-" in placed and "decode-" in placed for _, placed in answers)


def test_a_router_that_ends_takes_only_its_own_requests_with_it(routers: Routers) -> None:
    alone = text(routers.urls[0], 1)[0]
    long: Json = {"prompt": "x" * 50, "max_tokens": 2000, "ignore_eos": True, "seed": 1}
    with ThreadPoolExecutor(16) as threads:
        lost = [
            threads.submit(exchange, routers.urls[1], "/v1/completions", long) for _ in range(4)
        ]
        wait_for(routers.urls[0], lambda nodes: sum(one["load"]["running"] for one in nodes) == 4)
        kept = [threads.submit(text, routers.urls[0], 1) for _ in range(4)]
        os.kill(routers.second, signal.SIGTERM)
        assert [one.result()[0] for one in kept] == [alone] * 4
        assert {one.result().status for one in lost} == {503}
    ended = psutil.Process(routers.second)
    until_true(lambda: ended.status() == psutil.STATUS_ZOMBIE)
    wait_for(
        routers.urls[0],
        lambda nodes: (
            not any(one["load"][name] for one in nodes for name in ("running", "waiting", "parked"))
        ),
    )


def test_a_node_that_one_router_drains_is_left_by_the_requests_of_both(routers: Routers) -> None:
    fields: Json = {"max_tokens": 1500, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    prompt = [32 + i % 90 for i in range(100)]
    alone = complete(routers.urls[0], prompt, **fields).body["choices"]
    tell(routers.urls[0], "decode-1", "drain")
    for url in routers.urls:
        wait_for(url, lambda nodes: state_of(nodes, "decode-1") == ("draining", 0))
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(complete, url, prompt, **fields) for url in routers.urls * 4]
        wait_for(routers.urls[0], lambda nodes: state_of(nodes, "decode-0") == ("ready", 8))
        tell(routers.urls[1], "decode-1", "resume")
        tell(routers.urls[1], "decode-0", "drain")
        for url in routers.urls:
            wait_for(url, lambda nodes: state_of(nodes, "decode-0") == ("draining", 0))
        answers = [one.result() for one in asked]
    assert [answer.body["choices"] for answer in answers] == [alone] * 8
    placed = [answer.headers["x-baton-placement"] for answer in answers]
    assert all("decode=decode-1" in one for one in placed)
    assert all(one.endswith("placed again: drained") for one in placed)


def tell(url: str, node: str, act: str) -> None:
    """At once; only who says the token may."""
    path, words = f"/nodes/{node}/{act}", {"deadline_s": 0} if act == "drain" else {}
    assert exchange(url, path, words).status == 401
    assert exchange(url, path, words, {"Authorization": f"Bearer {TOKEN}"}).status == 200


def state_of(nodes: list[Json], name: str) -> tuple[str, int]:
    [node] = [one for one in nodes if one["id"] == name]
    return node["state"], node["load"]["requests"]

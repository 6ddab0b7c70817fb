"""Abandoned requests free their blocks: clients that leave, deadlines, routers that die.

Every node must report that its blocks are free, and most of the requested tokens must not have been
generated: the request did not end by itself.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.clients.http import Json
from tests.support.clients.raw_http import JSON_TYPE, raw_request
from tests.support.clients.streams import ask
from tests.support.faults.cases import PATH
from tests.support.pools.leaks import held_by_node, metrics_of, settle
from tests.support.pools.processes import SIM, Cluster

GRACE_S = 1.0
DEADLINE_S = 8.0
PROMPT, OUTPUT = 400, 1500  # tokens; at 0.1 s per step an answer takes 150 s
SLOW = [
    *SIM,
    *("--sim-prefill-ms-per-token=2", "--max-batched-tokens=32", "--sim-decode-ms=100"),
    f"--link-grace={GRACE_S:g}",
]


@pytest.fixture(scope="module")
def pool() -> Iterator[Cluster]:
    with Cluster(2, 2, flags=SLOW, router_flags=["--handoff=always"]) as cluster:
        yield cluster


def body_of(seed: str, **fields: Any) -> Json:
    """A request that takes minutes: a long prompt and a long answer."""
    rng = random.Random(seed)
    prompt = [rng.randrange(32, 127) for _ in range(PROMPT)]
    return {
        **{"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "stream": True},
        **{"return_token_ids": True, "ignore_eos": True, **fields},
    }


class LeavingClient:
    """A client that sends a request, reads some events and closes the connection."""

    def __init__(self, url: str, body: Json) -> None:
        self.prompt = body["prompt"]
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=240)
        data = json.dumps(body).encode()
        headers = {"Host": "localhost", "Content-Type": JSON_TYPE}
        self._socket.sendall(raw_request("POST", PATH, headers, data))

    def read(self, events: int) -> None:
        received = b""
        while received.count(b"data:") < events:
            data = self._socket.recv(1 << 16)
            assert data, received
            received += data

    def leave(self) -> None:
        self._socket.close()


def generated(pool: Cluster) -> float:
    """Return the number of tokens that all nodes have generated so far."""
    pages = [metrics_of(node.url) for node in pool.nodes.values()]
    return sum(page["baton_generated_tokens_total"] for page in pages)


@contextmanager
def freed_early(pool: Cluster) -> Iterator[None]:
    """Assert that the nodes release all resources of the block's requests, before any of them has
    generated its last token."""
    before = generated(pool)
    yield
    pool.wait(lambda: not any(held_by_node(node) for node in pool.nodes.values()), "free blocks")
    assert generated(pool) - before < OUTPUT


def holds_blocks(pool: Cluster, *roles: str) -> bool:
    """Return whether a node of each role reports held blocks."""
    return all(
        any("blocks" in line for node in pool.of_role(role) for line in held_by_node(node))
        for role in roles
    )


def test_a_client_that_leaves_in_mid_stream_frees_its_blocks(pool: Cluster) -> None:
    with freed_early(pool):
        client = LeavingClient(pool.url, body_of("mid-stream", n=2))
        client.read(events=8)
        pool.wait(lambda: holds_blocks(pool, "decode"), "hold blocks")
        client.leave()
    settle(pool)


def test_a_client_that_leaves_during_the_hand_off_frees_its_blocks(pool: Cluster) -> None:
    with freed_early(pool):
        client = LeavingClient(pool.url, body_of("hand-off"))
        # The decode node fetches the chunks that the prefill node has published so far.
        pool.wait(lambda: holds_blocks(pool, "prefill", "decode"), "be in the hand-off")
        client.leave()
    settle(pool)


def test_clients_that_leave_while_their_requests_are_queued_free_everything(pool: Cluster) -> None:
    with freed_early(pool):
        clients = [LeavingClient(pool.url, body_of(f"waiting {number}")) for number in range(12)]
        for client in clients:
            pool.wait(lambda: pool.witness.request(client.prompt), "place them all")  # noqa: B023
        for client in clients:
            client.leave()
    settle(pool)


def test_a_client_that_leaves_while_no_node_is_reachable_is_forgotten(pool: Cluster) -> None:
    with freed_early(pool):
        client = LeavingClient(pool.url, body_of("nowhere"))
        client.read(events=3)
        for node in pool.nodes.values():
            node.wire.hold()
        pool.wait(lambda: not ready_nodes(pool), "lose its nodes")
        client.leave()
        pool.wait(lambda: not pool.pool()["totals"]["requests_running"], "forget the request")
        pool.repair()
        # Either the delayed abort arrives, or the grace period of a lost link ends the request.
    settle(pool)


def ready_nodes(pool: Cluster) -> list[str]:
    return [node["id"] for node in pool.pool()["nodes"] if node["state"] == "ready"]


def test_requests_whose_router_died_are_aborted_after_the_grace_period(pool: Cluster) -> None:
    with freed_early(pool):
        client = LeavingClient(pool.url, body_of("orphan"))
        client.read(events=3)
        pool.wait(lambda: holds_blocks(pool, "decode"), "hold blocks")
        pool.router.kill()
    client.leave()
    pool.repair()


@pytest.fixture(scope="module")
def impatient_pool() -> Iterator[Cluster]:
    flags = ["--handoff=always", f"--request-timeout={DEADLINE_S:g}"]
    with Cluster(1, 1, flags=SLOW, router_flags=flags) as cluster:
        yield cluster


def test_requests_past_their_deadline_end_and_free_their_blocks(impatient_pool: Cluster) -> None:
    with freed_early(impatient_pool), ThreadPoolExecutor(2) as threads:
        streamed, whole = threads.map(
            lambda stream: ask(impatient_pool.url, PATH, body_of(f"late {stream}", stream=stream)),
            (True, False),
        )
    for answer, status in ((streamed, 200), (whole, 504)):
        assert answer.error is not None, answer
        assert answer.error["code"] == "deadline_exceeded", answer
        assert answer.status == status
    settle(impatient_pool)

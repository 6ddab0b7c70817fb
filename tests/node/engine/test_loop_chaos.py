"""Random orders of events leak no block, and every finished request has the right ids."""

from __future__ import annotations

import os
import random
import signal
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from baton_engine.sim.build import SimSettings
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_protocol.ids import RequestId
from baton_protocol.layout import KVGroup
from baton_protocol.link import Abort, FirstTokens, NoFirstTokens, PrefillJob, RunJob
from baton_protocol.request import Request
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import LoopNode, run_alone, settle, spin, store_node
from tests.support.stores.kvstore import plain_client

pytestmark = pytest.mark.integration

SMALL = SimSettings(chunk_blocks=1, num_blocks=40, max_batched_tokens=48)
# A prompt has up to 280 tokens, so windows of 40 and 70 tokens leave most of it.
FULL, WINDOWS = KVGroup((0,)), (KVGroup((1,), 40), KVGroup((2,), 70))
WINDOWED = [
    replace(SMALL, layers=3, groups=(FULL, *WINDOWS), num_blocks=120),
    replace(SMALL, layers=3, groups=(KVGroup((0,), 40), *WINDOWS), num_blocks=120, chunk_blocks=2),
]
PREFIXES = [bytes(range(32 + 3 * i, 122)) for i in range(4)]
REQUESTS = 60
WAITS: dict[str, Any] = {"lookup_wait_s": 0.1, "first_wait_s": 0.2, "blocks_wait_s": 1.0}


class Router:
    """Places random requests on two nodes, and aborts some or loses their first tokens."""

    def __init__(self, seed: int, prefill: LoopNode, decode: LoopNode) -> None:
        self.rng = random.Random(seed)
        self.prefill, self.decode = prefill, decode
        self.waiting: dict[RequestId, Request] = {}
        self.running: dict[RequestId, Request] = {}
        self.num_placed = 0
        self.reference = SimSettings(chunk_blocks=1)

    def act(self) -> None:
        match self.rng.randrange(6):
            case 0 | 1 if self.num_placed < REQUESTS and len(self.waiting) + self.unfinished() < 10:
                self.place()
            case 2 if self.waiting:
                request = self.rng.choice(list(self.waiting.values()))
                if self.rng.random() < 0.3:
                    self.abort(request)
                elif self.rng.random() < 0.2:
                    self.send_first(request, None)
        for request in list(self.waiting.values()):
            if ids := self.prefill.ids(request.id):
                self.send_first(request, ids[0])

    def unfinished(self) -> int:
        return sum(not any(t.finish for t in self.decode.tokens(r)) for r in self.running)

    def place(self) -> None:
        self.num_placed += 1
        prompt = self.rng.choice(PREFIXES) * self.rng.randrange(1, 4)
        prompt = prompt[: self.rng.randrange(1, len(prompt))] + bytes([48 + self.num_placed % 10])
        request = make_request(f"r{self.num_placed}", prompt, max_tokens=self.rng.randrange(2, 30))
        self.waiting[request.id] = request
        jobs: list[tuple[LoopNode, RunJob | PrefillJob]] = [
            (self.decode, RunJob(request, await_first=True)),
            (self.prefill, PrefillJob(request, self.decode.name, self.decode.epoch)),
        ]
        self.rng.shuffle(jobs)
        for node, job in jobs:
            node.take(job)
            for _ in range(self.rng.randrange(3)):
                node.loop.turn()

    def send_first(self, request: Request, first: int | None) -> None:
        del self.waiting[request.id]
        self.running[request.id] = request
        frame = FirstTokens(request.id, 1, ((first,),)) if first is not None else None
        self.decode.take(frame or NoFirstTokens(request.id, 1, "lost"))

    def abort(self, request: Request) -> None:
        del self.waiting[request.id]
        for node in (self.prefill, self.decode):
            node.take(Abort(request.id, 1))

    def done(self) -> bool:
        return not self.waiting and self.unfinished() == 0

    def check(self) -> None:
        reference = LoopNode("reference", self.reference)
        for request in self.running.values():
            tokens = self.decode.tokens(request.id)
            firsts = self.prefill.ids(request.id)[:1] if tokens[0].offset else []
            assert [firsts + self.decode.ids(request.id)] == run_alone(reference, request)
        reference.close()


def drive(router: Router, turns: int) -> None:
    for _ in range(turns):
        router.act()
        router.prefill.loop.turn()
        router.decode.loop.turn()


def place_rest(router: Router) -> None:
    """On a busy machine the store answers late, and few requests are placed in a fixed number of
    turns: too few to fill the cache."""

    def all_placed() -> bool:
        router.act()
        return router.num_placed == REQUESTS

    spin((router.prefill, router.decode), all_placed, f"{REQUESTS} requests")


def finish(router: Router) -> None:
    def finished() -> bool:
        for request in list(router.waiting.values()):
            if ids := router.prefill.ids(request.id):
                router.send_first(request, ids[0])
        return router.done()

    both = (router.prefill, router.decode)
    spin(both, finished, "all requests")
    settle(both)
    router.check()


@pytest.mark.parametrize(
    ("seed", "host_blocks"),
    [
        *((seed, 0) for seed in range(2)),
        *(pytest.param(seed, 0, marks=pytest.mark.long) for seed in range(2, 6)),
        (6, 20),
        pytest.param(7, 20, marks=pytest.mark.long),
        (8, 2000),
    ],
)
def test_random_requests_aborts_and_damaged_chunks_leak_no_block(
    store: EmbeddedStore, seed: int, host_blocks: int
) -> None:
    host_bytes = host_blocks * SMALL.layout().block_bytes
    settings = replace(SMALL, host_kv_memory=host_bytes)
    prefill = store_node("p0", store, settings, **WAITS)
    decode = store_node("d0", store, settings, **WAITS)
    router = Router(seed, prefill, decode)
    with closing(prefill), closing(decode):
        for _ in range(8):
            drive(router, 40)
            for url in store.data_urls:
                with plain_client(url) as client:
                    if key := client.randomkey():
                        client.setrange(key, router.rng.randrange(8000), b"\xff\x00\xff")
        place_rest(router)
        finish(router)
        assert len(router.running) > 5
        reloaded = [node.engine.load().host_loaded_blocks_total for node in (prefill, decode)]
        assert (sum(reloaded) > 0) == (host_blocks > 0)


@pytest.mark.parametrize("settings", WINDOWED, ids=["with a full group", "windows only"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
def test_random_requests_of_layers_with_windows_get_the_right_ids(
    store: EmbeddedStore, settings: SimSettings, seed: int
) -> None:
    """Write-behind puts values of all groups beside those without windows. Lost and damaged values
    make holes."""
    waits = {**WAITS, "write_behind": 1 << 20}
    prefill = store_node("p0", store, settings, **waits)
    decode = store_node("d0", store, settings, **waits)
    router = Router(seed, prefill, decode)
    router.reference = replace(settings, num_blocks=512)
    with closing(prefill), closing(decode):
        for round_ in range(8):
            drive(router, 40)
            for url in store.data_urls:
                with plain_client(url) as client:
                    key = client.randomkey()
                    if key and round_ % 2:
                        client.setrange(key, router.rng.randrange(1000), b"\xff\x00\xff")
                    elif key:
                        client.delete(key)
        place_rest(router)
        finish(router)
        assert len(router.running) > 5
        assert decode.loop.counters["reused_chunks"] > 0


@pytest.mark.parametrize("victims", [["data0"], ["index"], ["index", "data0", "data1"]])
def test_store_servers_that_die_do_not_change_the_tokens(victims: list[str]) -> None:
    with EmbeddedStore(64 << 20, data_instances=2) as store:
        prefill = store_node("p0", store, SMALL, **WAITS)
        decode = store_node("d0", store, SMALL, **WAITS)
        router = Router(99, prefill, decode)
        with closing(prefill), closing(decode):
            drive(router, 60)
            for victim in victims:
                os.kill(store.pid(victim), signal.SIGKILL)
            drive(router, 60)
            finish(router)

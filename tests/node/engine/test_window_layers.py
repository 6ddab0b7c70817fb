"""Layers with a window: of a long prompt only the last tokens' KV of these layers is stored and
fetched, and the tokens are those of a node that computes everything.

The simulated engine's tokens depend on every byte of KV that the windows still see.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from baton_engine.sim.build import SimSettings
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.keys import chunk_key
from baton_node.ipc.messages import Drain, Drained
from baton_protocol.hashing import chunk_hashes
from baton_protocol.layout import VALUE_HEADER_BYTES, KVGroup, KVLayout
from baton_protocol.link import Abort, NoFirstTokens, PrefillJob, RunJob
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import (
    LoopNode,
    NodeMaker,
    finish_hand_off,
    hand_off,
    publish_prompt,
    run_alone,
    settle,
    spin,
    undisturbed,
)
from tests.support.stores.kvstore import plain_client

pytestmark = pytest.mark.integration

WINDOW, CHUNK = 80, 32  # tokens
CHUNKS, TAIL = 31, 8
PROMPT = bytes((i * i * 7 + i) % 95 + 32 for i in range(CHUNKS * CHUNK + TAIL))
COMPLETE = 3  # chunks that reach into the last 80 of the 992 tokens in chunks: from token 912 on
OUTPUT = 80  # tokens
PLENTY = 1 << 30  # bytes per second
BOTH = SimSettings(
    layers=2,
    groups=(KVGroup((0,)), KVGroup((1,), WINDOW)),
    chunk_blocks=2,
    max_batched_tokens=200,
)
# The longest window decides what travels.
WINDOWS = replace(BOTH, layers=3, groups=(KVGroup((0, 1), WINDOW), KVGroup((2,), 40)))
KINDS = {
    "a group without a window": BOTH,
    "in head shards": replace(BOTH, kv_shards=2),
    "windows only": WINDOWS,
}


@dataclass(frozen=True)
class Pool:
    """Makes nodes on one store."""

    make_node: NodeMaker
    settings: SimSettings

    @property
    def store(self) -> EmbeddedStore:
        return self.make_node.store

    def node(self, name: str, **options: Any) -> LoopNode:
        return self.make_node(name, self.settings, **options)

    @property
    def layout(self) -> KVLayout:
        return self.settings.layout()

    @property
    def window_bytes(self) -> int:
        """Bytes of PROMPT's chunks in the store, if of the windows only the last one is there."""
        partial = (CHUNKS - COMPLETE) * self.layout.full_groups_bytes
        return int(partial + COMPLETE * self.layout.chunk_bytes)

    def stored_bytes(self) -> int:
        """Bytes of all values on the data servers, without their headers."""
        total = 0
        for url in self.store.data_urls:
            with plain_client(url) as client:
                keys = [key for key in client.scan_iter("kv1:*") if b":s" in key]
                total += sum(int(client.strlen(key)) - VALUE_HEADER_BYTES for key in keys)
        return total

    def delete(self, node: LoopNode, chunk: int) -> None:
        """Delete a chunk of PROMPT; its marker stays."""
        hashes = chunk_hashes(node.engine.block_hashes(make_request("r", PROMPT)), 2)
        key = chunk_key(node.engine.info.fingerprint, hashes[chunk])
        for url in self.store.data_urls:
            with plain_client(url) as client:
                client.delete(key)


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def pool(request: pytest.FixtureRequest, make_node: NodeMaker) -> Pool:
    return Pool(make_node, request.param)


def test_of_the_windows_only_the_last_tokens_travel(pool: Pool) -> None:
    prefill, decode = nodes = (pool.node("p"), pool.node("d"))
    request = make_request("r", PROMPT)
    hand_off(*nodes, request)
    assert finish_hand_off(nodes, request) == undisturbed(request, pool.settings)
    expected = pool.window_bytes
    assert pool.stored_bytes() == expected < CHUNKS * pool.layout.chunk_bytes * 0.6
    assert prefill.loop.counters["published_bytes"] == expected
    assert decode.loop.counters["fetched_bytes"] == expected
    assert decode.prompted("r").stats.computed_tokens == TAIL
    assert decode.loop.counters["lost_chunks"] == 0


def test_a_longer_prompt_continues_from_the_windows_of_a_shorter_one(pool: Pool) -> None:
    writer, reader = pool.node("w"), pool.node("r")
    publish_prompt(writer, make_request("first", PROMPT))
    request = make_request("next", PROMPT + PROMPT[:300])
    assert run_alone(reader, request) == undisturbed(request, pool.settings)
    settle([reader])
    assert reader.loop.counters["fetched_bytes"] == pool.window_bytes
    assert reader.prompted("next").stats.computed_tokens == TAIL + 300


def test_without_the_windows_at_its_end_a_stored_prefix_is_not_fetched(pool: Pool) -> None:
    writer, reader = pool.node("w"), pool.node("r")
    publish_prompt(writer, make_request("first", PROMPT))
    request = make_request("shorter", PROMPT[: 20 * CHUNK + TAIL])
    assert run_alone(reader, request) == undisturbed(request, pool.settings)
    settle([reader])
    assert reader.loop.counters["fetched_bytes"] == 0
    assert reader.loop.counters["lost_chunks"] == 0


def test_chunks_that_miss_windows_are_put_again_with_them(pool: Pool) -> None:
    publish_prompt(pool.node("w"), make_request("first", PROMPT))
    before, layout = pool.stored_bytes(), pool.layout
    prefill, decode = nodes = (pool.node("p"), pool.node("d"))
    request = make_request("shorter", PROMPT[: 20 * CHUNK + TAIL])
    hand_off(*nodes, request)
    assert finish_hand_off(nodes, request) == undisturbed(request, pool.settings)
    added = COMPLETE * (layout.chunk_bytes - layout.full_groups_bytes)
    assert pool.stored_bytes() == before + added
    assert prefill.loop.counters["published_chunks"] == COMPLETE
    assert decode.prompted("shorter").stats.computed_tokens == TAIL
    assert decode.loop.counters["lost_chunks"] == 0


@pytest.mark.parametrize("lost", [CHUNKS - 1, CHUNKS - COMPLETE, 5])
def test_a_lost_chunk_costs_computing_and_no_token(pool: Pool, lost: int) -> None:
    writer, decode = nodes = (pool.node("w"), pool.node("d"))
    publish_prompt(writer, make_request("first", PROMPT))
    pool.delete(writer, lost)
    request = make_request("r", PROMPT)
    hand_off(*nodes, request)
    assert finish_hand_off(nodes, request) == undisturbed(request, pool.settings)
    needed = lost >= CHUNKS - COMPLETE or pool.layout.num_full_groups
    assert decode.loop.counters["lost_chunks"] == bool(needed)


def test_after_a_failover_the_windows_at_the_end_of_the_output_are_there(pool: Pool) -> None:
    first, second = pool.node("a", write_behind=PLENTY), pool.node("b")
    request = make_request("r", PROMPT, max_tokens=OUTPUT)
    (ids,) = run_alone(first, request)
    settle([first])
    known = OUTPUT - 10
    chunks = (len(PROMPT) + known) // CHUNK
    count = first.loop.counters
    assert count["behind_bytes"] == count["behind_chunks"] * pool.layout.chunk_bytes
    resumed = msgspec.structs.replace(request, outputs=(tuple(ids[:known]),), attempt=2)
    second.take(RunJob(resumed))
    spin([second], lambda: len(second.ids("r")) == 10, "the rest of the answer")
    settle([second])
    assert second.ids("r") == ids[known:] == undisturbed(request, pool.settings)[0][known:]
    window = pool.layout.window or 0
    fetched = chunks if pool.layout.num_full_groups else window // CHUNK + 1
    assert second.loop.counters["fetched_chunks"] == fetched
    assert second.loop.counters["used_blocks"] == 2 * fetched


def test_a_draining_node_leaves_the_windows_that_its_requests_need(pool: Pool) -> None:
    first, second = pool.node("a"), pool.node("b")
    request = make_request("r", PROMPT, max_tokens=OUTPUT)
    first.take(RunJob(request))
    spin([first], lambda: len(first.ids("r")) >= 40, "some tokens")
    first.take(Drain())
    spin([first], lambda: any(isinstance(f, Drained) for f in first.port.sent), "the drain")
    ids = first.ids("r")
    settle([first])
    known = 45
    resumed = msgspec.structs.replace(request, outputs=(tuple(ids[:known]),), attempt=2)
    second.take(RunJob(resumed))
    spin([second], lambda: len(second.ids("r")) == OUTPUT - known, "the rest of the answer")
    settle([second])
    assert second.ids("r") == ids[known:] == undisturbed(request, pool.settings)[0][known:]
    assert second.loop.counters["fetched_chunks"] > 0
    assert second.prompted("r").stats.computed_tokens < CHUNK


def test_without_its_prefill_node_a_decode_node_computes_the_windows(pool: Pool) -> None:
    """The early chunks came without windows, and the node died before the last ones."""
    prefill, decode = nodes = (pool.node("p"), pool.node("d", first_wait_s=0.2))
    request = make_request("r", PROMPT)
    decode.take(RunJob(request, await_first=True))
    prefill.take(PrefillJob(request, decode.name, decode.epoch))
    spin(nodes, lambda: decode.loop.counters["fetched_chunks"] > 0, "some chunks")
    prefill.take(Abort(request.id, 1))
    decode.take(NoFirstTokens(request.id, 1, "it is gone"))
    spin([decode], lambda: len(decode.ids("r")) == 8, "the request's end")
    settle(nodes)
    assert [decode.ids("r")] == undisturbed(request, pool.settings)

"""A chunk lost in mid-prefix is a hole: a node fetches all other chunks and computes the hole."""

from __future__ import annotations

from contextlib import closing

import msgspec
import pytest

from baton_engine.sim.build import SimSettings
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.keys import chunk_key
from baton_protocol.hashing import chunk_hashes
from baton_protocol.link import Abort, RunJob
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import (
    LoopNode,
    NodeMaker,
    hand_off,
    publish_prompt,
    run_alone,
    settle,
    spin,
    store_node,
    undisturbed,
)
from tests.support.stores.kvstore import frozen, plain_client

pytestmark = pytest.mark.integration

SETTINGS = SimSettings(chunk_blocks=2, max_batched_tokens=48)
CHUNK = 32  # tokens
PROMPT = bytes((i * 7) % 95 + 32 for i in range(5 * CHUNK + 9))


@pytest.fixture
def pair(make_node: NodeMaker) -> tuple[LoopNode, LoopNode]:
    """A node that has published PROMPT's chunks, and a node with an empty cache."""
    writer, reader = make_node("writer", SETTINGS), make_node("reader", SETTINGS)
    assert publish_prompt(writer, make_request("filling", PROMPT)) == 5
    return writer, reader


def delete_chunks(store: EmbeddedStore, node: LoopNode, *chunks: int) -> None:
    """Delete chunks of PROMPT; their markers stay."""
    hashes = chunk_hashes(node.engine.block_hashes(make_request("r", PROMPT)), 2)
    for chunk in chunks:
        key, deleted = chunk_key(node.engine.info.fingerprint, hashes[chunk]), 0
        for url in store.data_urls:
            with plain_client(url) as client:
                deleted += client.delete(key)
        assert deleted == 1, f"chunk {chunk} is not in the store"


def test_a_node_fetches_and_uses_the_four_chunks_around_a_lost_one(
    pair: tuple[LoopNode, LoopNode], store: EmbeddedStore
) -> None:
    writer, reader = pair
    delete_chunks(store, writer, 2)
    request = make_request("r", PROMPT, max_tokens=24)
    assert run_alone(reader, request) == undisturbed(request, SETTINGS)
    settle(pair)
    stats, count = reader.prompted("r").stats, reader.loop.counters
    assert (stats.matched_tokens, stats.fetched_tokens) == (5 * CHUNK, 4 * CHUNK)
    assert stats.computed_tokens == CHUNK + 9
    assert stats.declined_tokens == 0
    assert (count["queried_blocks"], count["matched_blocks"]) == (10, 10)
    assert (count["fetched_blocks"], count["used_blocks"], count["declined_blocks"]) == (8, 8, 0)
    assert (count["fetched_chunks"], count["reused_chunks"], count["lost_chunks"]) == (4, 4, 1)


@pytest.mark.parametrize("holes", [(0,), (4,), (0, 2, 4), (0, 1, 2, 3, 4)])
def test_holes_at_any_position_do_not_change_the_tokens(
    pair: tuple[LoopNode, LoopNode], store: EmbeddedStore, holes: tuple[int, ...]
) -> None:
    writer, reader = pair
    delete_chunks(store, writer, *holes)
    request = make_request("r", PROMPT, n=2, temperature=1.0, seed=5, max_tokens=16)
    assert run_alone(reader, request) == undisturbed(request, SETTINGS)
    settle(pair)
    assert reader.prompted("r").stats.fetched_tokens == (5 - len(holes)) * CHUNK


def test_a_hand_off_continues_without_a_lost_chunk(
    pair: tuple[LoopNode, LoopNode], store: EmbeddedStore
) -> None:
    writer, reader = pair
    delete_chunks(store, writer, 1)
    request = make_request("r", PROMPT, max_tokens=16)
    hand_off(writer, reader, request)
    spin(pair, lambda: len(reader.ids("r")) == 15, "the request's end")
    settle(pair)
    assert [writer.ids("r") + reader.ids("r")] == undisturbed(request, SETTINGS)
    assert reader.prompted("r").stats.fetched_tokens == 4 * CHUNK
    assert reader.loop.counters["lost_chunks"] == 1


def test_a_lost_chunk_is_found_again_once_another_node_has_published_it(
    pair: tuple[LoopNode, LoopNode], store: EmbeddedStore
) -> None:
    writer, reader = pair
    delete_chunks(store, writer, 2)
    run_alone(reader, make_request("finds the hole", PROMPT))
    settle(pair)
    assert publish_prompt(writer, make_request("filling again", PROMPT)) == 1
    with closing(store_node("other", store, SETTINGS)) as other:
        request = make_request("r", PROMPT)
        assert run_alone(other, request) == undisturbed(request, SETTINGS)
        assert other.prompted("r").stats.fetched_tokens == 5 * CHUNK
        settle([other])


def test_other_requests_run_while_a_request_fetches_its_chunks(
    pair: tuple[LoopNode, LoopNode], store: EmbeddedStore
) -> None:
    writer, reader = pair
    delete_chunks(store, writer, 2)
    running = make_request("running", b"another prompt", max_tokens=1000)
    reader.take(RunJob(running))
    spin([reader], lambda: len(reader.ids("running")) > 2, "some tokens")
    request = make_request("r", PROMPT)
    with frozen(store.pid("data0"), store.pid("data1")):
        reader.take(RunJob(request))
        free = reader.engine.load().free_blocks
        spin([reader], lambda: reader.engine.load().free_blocks < free - 10, "its blocks")
        count = len(reader.ids("running"))
        spin(
            [reader],
            lambda: len(reader.ids("running")) >= count + 100,
            "tokens of the running request",
        )
        assert not reader.tokens("r")
    spin([reader], lambda: len(reader.ids("r")) == 8, "the request's end")
    assert reader.prompted("r").stats.fetched_tokens == 4 * CHUNK
    spin([reader], lambda: len(reader.ids("running")) == 1000, "the running request's end")
    settle(pair)
    assert [reader.ids("r")] == undisturbed(request, SETTINGS)
    assert [reader.ids("running")] == undisturbed(running, SETTINGS)


def test_a_resumed_request_also_fetches_the_chunks_of_its_output(
    pair: tuple[LoopNode, LoopNode],
) -> None:
    writer, reader = pair
    request = make_request("r", PROMPT, max_tokens=2 * CHUNK + 20)
    (ids,) = undisturbed(request, SETTINGS)
    generated = tuple(ids[: 2 * CHUNK])
    # A prompt with the same tokens has the same chunk hashes.
    known = msgspec.structs.replace(request, id="known", prompt_ids=request.prompt_ids + generated)
    assert publish_prompt(writer, known) == 2
    resumed = msgspec.structs.replace(request, outputs=(generated,), attempt=2)
    reader.take(RunJob(resumed))
    spin([reader], lambda: len(reader.ids("r")) == 20, "the request's end")
    settle(pair)
    assert reader.ids("r") == ids[2 * CHUNK :]
    count = reader.loop.counters
    assert (count["fetched_chunks"], count["reused_chunks"]) == (7, 7)
    assert (count["queried_blocks"], count["matched_blocks"], count["used_blocks"]) == (14, 14, 14)
    stats = reader.prompted("r").stats
    assert (stats.prompt_tokens, stats.matched_tokens) == (len(PROMPT), len(PROMPT))


def test_an_aborted_and_a_cached_request_are_each_counted_once(
    pair: tuple[LoopNode, LoopNode], store: EmbeddedStore
) -> None:
    reader = pair[1]
    with frozen(store.pid("data0"), store.pid("data1")):
        aborted = make_request("aborted", PROMPT)
        reader.take(RunJob(aborted))
        spin([reader], lambda: not reader.freed, "blocks for the fetch")
        assert reader.loop.counters["queried_blocks"] == 0
        reader.take(Abort(aborted.id, 1))
    settle(pair)
    count = reader.loop.counters
    assert (count["queried_blocks"], count["matched_blocks"], count["used_blocks"]) == (10, 10, 0)
    run_alone(reader, make_request("fetches", PROMPT))
    settle(pair)
    assert (count["queried_blocks"], count["matched_blocks"], count["used_blocks"]) == (20, 20, 10)
    run_alone(reader, make_request("cached", PROMPT))
    settle(pair)
    assert (count["queried_blocks"], count["matched_blocks"], count["used_blocks"]) == (30, 30, 10)

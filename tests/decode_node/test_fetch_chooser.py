"""A step loop that weighs: what it fetches, what it computes, with which priority, and what it says
about it. The store is real and so are its speeds; prefill's are given."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from baton_decode_node.fetch_state import SAMPLE_EVERY_S
from baton_engine.sim.build import SimSettings
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_node.store.base import PADDING, ChunkRef
from baton_node.store.redis_connector import StoreConnector
from baton_protocol.ids import BlockId
from baton_protocol.link import Load, PrefillJob
from baton_protocol.store import Marker, Priority, Speeds
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import (
    LoopNode,
    hand_off,
    run_alone,
    settle,
    spin,
    store_node,
    undisturbed,
)

pytestmark = pytest.mark.integration

SETTINGS = SimSettings(chunk_blocks=1)
CHUNKS = 20  # enough for each of two data servers to hold some
FIRST = bytes((i * 7) % 95 + 32 for i in range(CHUNKS * 16 + 5))
SECOND, THIRD, FOURTH = b"x" + FIRST, b"y" + FIRST, b"z" + FIRST
AT_ONCE = Speeds(prefill_tokens_per_s=1e8)
NEVER_DONE = Speeds(prefill_tokens_per_s=1.0)

Make = Callable[..., LoopNode]


class FetchRecorder(StoreConnector):
    """Also notes which fetches it is asked for."""

    def fetch(
        self, chunk: ChunkRef, marker: Marker, blocks: Sequence[BlockId], priority: Priority
    ) -> None:
        self.asked = [*getattr(self, "asked", []), (chunk.request, tuple(blocks), priority)]
        super().fetch(chunk, marker, blocks, priority)


def asked(node: LoopNode, request: str) -> list[Priority]:
    """Priorities of the fetches into a request's blocks; of samples for ""."""
    notes: list[tuple[str, tuple[BlockId, ...], Priority]] = getattr(node.connector, "asked", [])
    return [priority for name, _, priority in notes if name == request]


@pytest.fixture
def make(store: EmbeddedStore) -> Iterator[Make]:
    """Nodes on a store that holds all prompts."""
    made: list[LoopNode] = []

    def node(name: str, **options: Any) -> LoopNode:
        made.append(store_node(name, store, SETTINGS, kind=FetchRecorder, **options))
        return made[-1]

    filler = node("filler")
    for prompt in (FIRST, SECOND, THIRD, FOURTH):
        request = make_request(f"fills {prompt[:1]!r}", prompt)
        filler.take(PrefillJob(request, filler.name, filler.epoch))
    count = filler.loop.counters
    spin([filler], lambda: count.published_chunks == 4 * CHUNKS, "the puts")
    settle([filler])
    yield node
    for each in made:
        each.close()


def run(node: LoopNode, name: str, prompt: bytes) -> None:
    """One whole request; its ids must be right."""
    request = make_request(name, prompt)
    assert run_alone(node, request) == undisturbed(request, SETTINGS)
    settle([node])


def test_the_first_fetch_measures_and_what_is_computed_sooner_is_then_not_fetched(
    make: Make,
) -> None:
    node = make("n", fetch="auto", speeds=AT_ONCE)
    run(node, "unmeasured", FIRST)
    assert asked(node, "unmeasured") == [Priority.PREFIX] * CHUNKS
    assert all(each.get_bytes_per_s > 0 for each in node.connector.instances())
    run(node, "measured", SECOND)
    assert asked(node, "measured") == []
    stats, count = node.prompted("measured").stats, node.loop.counters
    assert stats.matched_tokens == stats.declined_tokens == CHUNKS * 16
    assert stats.fetched_tokens == 0
    assert 0 < stats.compute_predicted_ms < stats.fetch_predicted_ms
    assert (count.matched_blocks, count.declined_blocks) == (2 * CHUNKS, CHUNKS)
    assert (count.fetched_blocks, count.used_blocks) == (CHUNKS, CHUNKS)


def test_what_takes_longer_to_compute_is_fetched(make: Make) -> None:
    node = make("n", fetch="auto", speeds=NEVER_DONE)
    for name, prompt in (("unmeasured", FIRST), ("measured", SECOND)):
        run(node, name, prompt)
        assert asked(node, name) == [Priority.PREFIX] * CHUNKS
    stats = node.prompted("measured").stats
    assert (stats.fetched_tokens, stats.declined_tokens) == (CHUNKS * 16, 0)
    assert 0 < stats.fetch_predicted_ms < stats.compute_predicted_ms


def test_a_prefill_job_weighs_too_and_announces_what_it_does_not_fetch(make: Make) -> None:
    prefill = make("p", fetch="auto", speeds=AT_ONCE)
    decode = make("d", fetch="auto", speeds=AT_ONCE)
    for node in (prefill, decode):
        run(node, "unmeasured", FIRST)
    request = make_request("r", SECOND)
    hand_off(prefill, decode, request)
    spin([prefill, decode], lambda: len(decode.ids("r")) == 7, "the request's end")
    settle([prefill, decode])
    assert [prefill.ids("r") + decode.ids("r")] == undisturbed(request, SETTINGS)
    assert asked(prefill, "r") == []
    assert prefill.loop.counters.announced_chunks == CHUNKS
    # The router has weighed the hand-off.
    assert asked(decode, "r") == [Priority.HANDOFF] * CHUNKS
    assert decode.prompted("r").stats.fetched_tokens == CHUNKS * 16
    assert decode.loop.counters.declined_blocks == 0


@pytest.mark.parametrize(
    ("policy", "speeds", "fetched"), [("never", NEVER_DONE, 0), ("always", AT_ONCE, CHUNKS)]
)
def test_a_policy_decides_whatever_the_price(
    make: Make, policy: str, speeds: Speeds, fetched: int
) -> None:
    node = make("n", fetch=policy, speeds=speeds)
    for name, prompt in (("unmeasured", FIRST), ("measured", SECOND)):
        run(node, name, prompt)
        assert len(asked(node, name)) == fetched
        assert node.prompted(name).stats.declined_tokens == (CHUNKS - fetched) * 16
    assert asked(node, "") == []


def test_a_hand_off_is_fetched_also_by_a_node_that_never_fetches_what_it_finds(make: Make) -> None:
    prefill, decode = make("p", fetch="never"), make("d", fetch="never")
    request = make_request("r", SECOND)
    hand_off(prefill, decode, request)
    spin([prefill, decode], lambda: len(decode.ids("r")) == 7, "the request's end")
    settle([prefill, decode])
    assert (len(asked(prefill, "r")), len(asked(decode, "r"))) == (0, CHUNKS)


def test_of_what_is_declined_a_chunk_per_server_is_read_now_and_then_into_nothing(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    node = make("n", fetch="auto", speeds=AT_ONCE)
    run(node, "unmeasured", FIRST)
    assert asked(node, "") == []
    run(node, "declined", SECOND)
    run(node, "soon after", THIRD)
    assert asked(node, "") == [Priority.BEHIND] * 2
    node.clock_ahead_s += SAMPLE_EVERY_S
    run(node, "later", FOURTH)
    assert asked(node, "") == [Priority.BEHIND] * 4
    notes = getattr(node.connector, "asked", [])
    assert {blocks for name, blocks, _ in notes if name == ""} == {(PADDING,)}
    # Samples are nobody's: no counter of requests knows them.
    assert node.loop.counters.fetched_chunks == CHUNKS
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_the_load_tells_of_each_data_server(make: Make) -> None:
    node = make("n")
    run(node, "r", FIRST)

    def told() -> Load:
        return [frame for frame in node.port.sent if isinstance(frame, Load)][-1]

    spin([node], lambda: all(each.get_bytes_per_s for each in told().instances), "the figures")
    instances = told().instances
    assert len(instances) == 2
    assert all(each.get_latency_ms > 0 for each in instances)
    assert told().speeds.get_latency_ms == pytest.approx(
        max(each.get_latency_ms for each in instances), abs=0.001
    )

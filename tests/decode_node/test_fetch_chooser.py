"""A step loop that chooses between fetching and computing chunks: its fetches, their priorities and
its statistics. The store and its speeds are real; each test sets the prefill speed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import pytest

from baton_decode_node.fetch_chooser import SAMPLE_EVERY_S
from baton_engine.interface import PADDING
from baton_engine.sim.build import SimSettings
from baton_node.store.base import ChunkRef
from baton_node.store.redis_connector import StoreConnector
from baton_protocol.ids import BlockId
from baton_protocol.link import Load, PrefillJob
from baton_protocol.store import Marker, Priority, Speeds
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import (
    LoopNode,
    NodeMaker,
    hand_off,
    run_alone,
    settle,
    spin,
    undisturbed,
)

pytestmark = pytest.mark.integration

SETTINGS = SimSettings(chunk_blocks=1)
CHUNKS = 20  # enough for each of two data servers to hold some
FIRST = bytes((i * 7) % 95 + 32 for i in range(CHUNKS * 16 + 5))
SECOND, THIRD, FOURTH = b"x" + FIRST, b"y" + FIRST, b"z" + FIRST
FAST_PREFILL = Speeds(prefill_tokens_per_s=1e8)
SLOW_PREFILL = Speeds(prefill_tokens_per_s=1.0)

Make = partial[LoopNode]


class FetchRecorder(StoreConnector):
    """A connector that records its fetches as (request, blocks, priority)."""

    def fetch(
        self, chunk: ChunkRef, marker: Marker, blocks: Sequence[BlockId], priority: Priority
    ) -> None:
        record = (chunk.request, tuple(blocks), priority)
        self.fetches = [*getattr(self, "fetches", []), record]
        super().fetch(chunk, marker, blocks, priority)


def fetches(node: LoopNode, request: str) -> list[Priority]:
    """Return the priorities of a request's fetches, or those of all samples for ""."""
    records: list[tuple[str, tuple[BlockId, ...], Priority]]
    records = getattr(node.connector, "fetches", [])
    return [priority for name, _, priority in records if name == request]


@pytest.fixture
def make(make_node: NodeMaker) -> Make:
    """Make nodes on a store that holds the chunks of all prompts."""
    make = partial(make_node, settings=SETTINGS, kind=FetchRecorder)
    writer = make("writer")
    for prompt in (FIRST, SECOND, THIRD, FOURTH):
        request = make_request(f"fills {prompt[:1]!r}", prompt)
        writer.take(PrefillJob(request, writer.name, writer.epoch))
    count = writer.loop.counters
    spin([writer], lambda: count["published_chunks"] == 4 * CHUNKS, "the puts")
    settle([writer])
    return make


def run(node: LoopNode, name: str, prompt: bytes) -> None:
    """Run one whole request, and check its ids."""
    request = make_request(name, prompt)
    assert run_alone(node, request) == undisturbed(request, SETTINGS)
    settle([node])


def test_the_first_fetch_measures_and_a_faster_prefill_then_declines_fetches(
    make: Make,
) -> None:
    node = make("n", fetch="auto", speeds=FAST_PREFILL)
    run(node, "unmeasured", FIRST)
    assert fetches(node, "unmeasured") == [Priority.PREFIX] * CHUNKS
    assert all(each.get_bytes_per_s > 0 for each in node.connector.instances())
    run(node, "measured", SECOND)
    assert fetches(node, "measured") == []
    stats, count = node.prompted("measured").stats, node.loop.counters
    assert stats.matched_tokens == stats.declined_tokens == CHUNKS * 16
    assert stats.fetched_tokens == 0
    assert 0 < stats.compute_predicted_ms < stats.fetch_predicted_ms
    assert (count["matched_blocks"], count["declined_blocks"]) == (2 * CHUNKS, CHUNKS)
    assert (count["fetched_blocks"], count["used_blocks"]) == (CHUNKS, CHUNKS)


def test_chunks_that_take_longer_to_compute_are_fetched(make: Make) -> None:
    node = make("n", fetch="auto", speeds=SLOW_PREFILL)
    for name, prompt in (("unmeasured", FIRST), ("measured", SECOND)):
        run(node, name, prompt)
        assert fetches(node, name) == [Priority.PREFIX] * CHUNKS
    stats = node.prompted("measured").stats
    assert (stats.fetched_tokens, stats.declined_tokens) == (CHUNKS * 16, 0)
    assert 0 < stats.fetch_predicted_ms < stats.compute_predicted_ms


def test_a_prefill_job_announces_stored_chunks_that_it_declines_to_fetch(make: Make) -> None:
    prefill = make("p", fetch="auto", speeds=FAST_PREFILL)
    decode = make("d", fetch="auto", speeds=FAST_PREFILL)
    for node in (prefill, decode):
        run(node, "unmeasured", FIRST)
    request = make_request("r", SECOND)
    hand_off(prefill, decode, request)
    spin([prefill, decode], lambda: len(decode.ids("r")) == 7, "the request's end")
    settle([prefill, decode])
    assert [prefill.ids("r") + decode.ids("r")] == undisturbed(request, SETTINGS)
    assert fetches(prefill, "r") == []
    assert prefill.loop.counters["announced_chunks"] == CHUNKS
    # The router has already decided for the hand-off.
    assert fetches(decode, "r") == [Priority.HANDOFF] * CHUNKS
    assert decode.prompted("r").stats.fetched_tokens == CHUNKS * 16
    assert decode.loop.counters["declined_blocks"] == 0


@pytest.mark.parametrize(
    ("policy", "speeds", "fetched"), [("never", SLOW_PREFILL, 0), ("always", FAST_PREFILL, CHUNKS)]
)
def test_the_policies_never_and_always_ignore_the_predicted_times(
    make: Make, policy: str, speeds: Speeds, fetched: int
) -> None:
    node = make("n", fetch=policy, speeds=speeds)
    for name, prompt in (("unmeasured", FIRST), ("measured", SECOND)):
        run(node, name, prompt)
        assert len(fetches(node, name)) == fetched
        assert node.prompted(name).stats.declined_tokens == (CHUNKS - fetched) * 16
    assert fetches(node, "") == []


def test_a_decode_node_with_policy_never_still_fetches_a_hand_off(make: Make) -> None:
    prefill, decode = make("p", fetch="never"), make("d", fetch="never")
    request = make_request("r", SECOND)
    hand_off(prefill, decode, request)
    spin([prefill, decode], lambda: len(decode.ids("r")) == 7, "the request's end")
    settle([prefill, decode])
    assert (len(fetches(prefill, "r")), len(fetches(decode, "r"))) == (0, CHUNKS)


def test_one_declined_chunk_per_data_server_is_sampled_into_padding_at_intervals(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    node = make("n", fetch="auto", speeds=FAST_PREFILL)
    run(node, "unmeasured", FIRST)
    assert fetches(node, "") == []
    run(node, "declined", SECOND)
    run(node, "soon after", THIRD)
    assert fetches(node, "") == [Priority.BEHIND] * 2
    node.clock_ahead_s += SAMPLE_EVERY_S
    run(node, "later", FOURTH)
    assert fetches(node, "") == [Priority.BEHIND] * 4
    records = getattr(node.connector, "fetches", [])
    assert {blocks for name, blocks, _ in records if name == ""} == {(PADDING,)}
    # Samples belong to no request, so the counters do not include them.
    assert node.loop.counters["fetched_chunks"] == CHUNKS
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_the_load_has_the_speed_of_each_data_server(make: Make) -> None:
    node = make("n")
    run(node, "r", FIRST)

    def last_load() -> Load:
        return [frame for frame in node.port.sent if isinstance(frame, Load)][-1]

    spin([node], lambda: all(each.get_bytes_per_s for each in last_load().instances), "the figures")
    instances = last_load().instances
    assert len(instances) == 2
    assert all(each.get_latency_ms > 0 for each in instances)
    assert last_load().speeds.get_latency_ms == pytest.approx(
        max(each.get_latency_ms for each in instances), abs=0.001
    )

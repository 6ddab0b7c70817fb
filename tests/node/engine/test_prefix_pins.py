"""Pinned prefixes of a node: what a PinPrefix does, what the Load says of it, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from baton_engine.config.scheduling_options import SchedulingOptions
from baton_engine.sim.build import SimSettings
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_node.engine.prefix_pins import RETRY_S
from baton_node.ipc.messages import Drain, Sleep
from baton_protocol.link import PinPrefix, PinReport, ResetPrefixCache, RunJob, UnpinPrefix
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import PATIENCE_S, LoopNode, NodeMaker, run_alone, spin
from tests.support.stores.kvstore import plain_client

A, B = "a" * 16, "b" * 16
PREFIX = tuple((i * 7) % 95 + 32 for i in range(100))  # 6 blocks of 16, and a tail
SETTINGS = SimSettings(num_blocks=64, chunk_blocks=2)
TTL_S = 3600.0  # more than a test may take
LATER = 2_000_000_000  # the time that names a pin's end


def pin(
    id: str = A, ids: tuple[int, ...] = PREFIX, until: int = LATER, salt: str = ""
) -> PinPrefix:
    return PinPrefix(id, ids, TTL_S, until, salt)


@pytest.fixture
def node() -> Iterator[LoopNode]:
    with closing(LoopNode("n", SETTINGS)) as made:
        yield made


def pins_of(node: LoopNode) -> tuple[PinReport, ...]:
    return node.loop._reporter.read_load().pins


def wait_for(node: LoopNode, *states: str, others: tuple[LoopNode, ...] = ()) -> None:
    spin(
        (node, *others),
        lambda: [report.state for report in pins_of(node)] == list(states),
        f"pins that are {states}",
    )
    node.engine.check_integrity()


def flood(node: LoopNode, first: int = 0) -> None:
    """Fill the cache with other prompts, several times over."""
    for number in range(first, first + 12):
        run_alone(node, make_request(f"flood-{number}", bytes([number] * 300), max_tokens=2))


def hits(node: LoopNode, name: str) -> int:
    """Cached tokens of a request that begins with the prefix."""
    run_alone(node, make_request(name, bytes((*PREFIX, 1, 2, 3)), max_tokens=2))
    return node.prompted(name).stats.cached_tokens


def test_a_pinned_prefix_stays_cached_until_its_time_is_over(node: LoopNode) -> None:
    node.take(pin())
    wait_for(node, "pinned")
    assert pins_of(node) == (PinReport(A, LATER, "pinned"),)
    flood(node)
    assert hits(node, "while") == 96
    assert node.engine.load().pinned_blocks == 6
    node.clock_ahead_s += TTL_S + 1
    spin([node], lambda: not pins_of(node), "the end")
    assert node.freed
    flood(node, first=20)
    assert hits(node, "after") == 0


def test_an_unpinned_prefix_can_be_evicted(node: LoopNode) -> None:
    node.take(pin(), pin(B, PREFIX[::-1]))
    wait_for(node, "pinned", "pinned")
    node.take(UnpinPrefix(A), UnpinPrefix(A))
    wait_for(node, "pinned")
    flood(node)
    assert (hits(node, "after"), pins_of(node)[0].id) == (0, B)


def test_the_same_frame_again_changes_nothing_and_another_end_renews_the_pin(
    node: LoopNode,
) -> None:
    node.take(pin(), pin())
    wait_for(node, "pinned")
    node.take(pin())
    node.loop.turn()
    assert pins_of(node) == (PinReport(A, LATER, "pinned"),)
    node.clock_ahead_s += TTL_S - 10
    node.take(pin(until=LATER + 9))
    node.loop.turn()
    assert node.engine.load().pinned_blocks == 6
    renewed = (PinReport(A, LATER + 9, "pinned"),)
    spin([node], lambda: pins_of(node) == renewed, "the renewal")
    node.clock_ahead_s += TTL_S - 10
    node.loop.turn()
    assert len(pins_of(node)) == 1


@pytest.mark.parametrize(
    ("ids", "share", "reason"),
    [
        (PREFIX * 4, 0.25, "needs 25 blocks; 16 of 64 blocks may be pinned (--max-pinned-fraction"),
        (PREFIX[:15], 0.25, "shorter than a block"),
        ((10**6,) * 16, 0.25, "token id 1000000 is not in the vocabulary"),
        (PREFIX, 0.0, "0 of 64 blocks may be pinned"),
    ],
)
def test_a_prefix_that_cannot_be_pinned_is_refused_with_the_reason_and_then_forgotten(
    ids: tuple[int, ...], share: float, reason: str
) -> None:
    settings = SimSettings(num_blocks=64, scheduling=SchedulingOptions(max_pinned_fraction=share))
    with closing(LoopNode("n", settings)) as node:
        node.take(pin(ids=ids))
        wait_for(node, "refused")
        [report] = pins_of(node)
        assert reason in report.reason
        assert not len(node.jobs)
        node.clock_ahead_s += RETRY_S + 1
        spin([node], lambda: not pins_of(node), "the refusal to be forgotten")


def test_a_prefix_whose_blocks_a_request_needed_is_reported_and_then_forgotten(
    node: LoopNode,
) -> None:
    node.take(pin())
    wait_for(node, "pinned")
    run_alone(node, make_request("whole", bytes([7] * (63 * 16)), max_tokens=2))
    wait_for(node, "released")
    assert node.freed
    node.clock_ahead_s += RETRY_S + 1
    spin([node], lambda: not pins_of(node), "the pin to be forgotten")


@pytest.mark.parametrize("frame", [ResetPrefixCache(), Sleep(1)], ids=["reset", "sleep"])
def test_a_node_that_empties_its_cache_forgets_its_pins(
    node: LoopNode, frame: ResetPrefixCache | Sleep
) -> None:
    node.take(pin())
    wait_for(node, "pinned")
    node.take(frame)
    spin([node], lambda: not pins_of(node), "no pins")
    assert node.freed
    node.take(pin(B))
    node.loop.turn()
    assert len(pins_of(node)) == (0 if isinstance(frame, Sleep) else 1)


def test_a_draining_node_ends_what_is_not_pinned_yet(node: LoopNode) -> None:
    node.take(pin())
    wait_for(node, "pinned")
    node.take(pin(B, PREFIX[::-1]))
    node.loop._handle_frame(node.port.receive()[0])
    assert len(node.jobs) == 1
    node.take(Drain())
    node.loop.turn()
    assert [report.id for report in pins_of(node)] == [A]
    assert node.loop.idle


def test_a_pin_and_its_removal_do_not_touch_running_requests(node: LoopNode) -> None:
    request = make_request("r", bytes(PREFIX), max_tokens=30)
    expected = run_alone(node, make_request("alone", bytes(PREFIX), max_tokens=30))
    node.take(RunJob(request), pin(), UnpinPrefix(A), pin())
    wait_for(node, "pinned")
    spin([node], lambda: len(node.ids("r")) == 30, "the request's end")
    assert [node.ids("r")] == expected


@pytest.mark.integration
def test_a_prefix_is_computed_once_and_its_chunks_stay_in_the_store_as_long_as_the_pin(
    make_node: NodeMaker, store: EmbeddedStore
) -> None:
    first, second = make_node("a", SETTINGS), make_node("b", SETTINGS)
    until = int(time.time()) + 20_000
    run_alone(first, make_request("before", bytes(PREFIX[:64]), max_tokens=1))  # 2 chunks cached
    first.take(pin(until=until))
    wait_for(first, "pinned")
    assert first.loop.counters["published_chunks"] == 3
    second.take(pin(until=until))
    wait_for(second, "pinned")
    counters = second.loop.counters
    assert (counters["fetched_chunks"], counters["published_chunks"]) == (3, 0)
    assert second.engine.load().pinned_blocks == 6
    # Another request's fetch does not shorten their lives.
    third = make_node("c", SETTINGS)
    run_alone(third, make_request("reader", bytes((*PREFIX, 1)), max_tokens=1))
    assert third.loop.counters["fetched_chunks"] == 3
    spin([third], lambda: third.loop.idle, "the end")
    names = [hash.hex().encode() for hash in first.engine.prefix_hashes(PREFIX)[1::2]]
    lives = []
    for url in (store.index_url, *store.data_urls):
        with plain_client(url) as client:
            lives += [client.pttl(key) for name in names for key in client.keys(b"*%b*" % name)]
    assert len(lives) == 2 * len(names)
    assert min(lives) > (20_000 - PATIENCE_S) * 1000


@pytest.mark.integration
def test_chunks_that_would_expire_before_the_pin_are_put_again(make_node: NodeMaker) -> None:
    node = make_node("a", SETTINGS)
    now = int(time.time())
    for until, published in ((now + 10_000, 3), (now + 30_000, 6), (now + 20_000, 6)):
        node.take(pin(until=until))
        spin([node], lambda: pins_of(node)[:1] == (PinReport(A, until, "pinned"),), "the pin")  # noqa: B023
        assert node.loop.counters["published_chunks"] == published

"""The router's view of its pool: cached prefixes, bookings, epochs, stalls."""

from __future__ import annotations

from typing import Any

import msgspec

from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId, RequestId
from baton_protocol.link import CacheEvents, Load
from baton_protocol.store import NodeLoad, Role, Speeds
from baton_router.nodes.node_view import BOOKING_ARRIVES_S, NodeView, state_of
from baton_router.nodes.pool_view import PoolView
from baton_router.placement.costs import FALLBACK
from tests.router.nodes.test_prefix_index import prefixes_of
from tests.support.clock import Clock
from tests.support.nodes.candidates import Candidate, candidates_of
from tests.support.nodes.fake_node import make_report

A, B, C = (BlockHash(bytes([n]) * 16) for n in range(3))
NODE, RID = NodeId("decode-0"), RequestId("r1")
EPOCH = Epoch("epoch-1")


def make_view(clock: Clock | None = None) -> PoolView:
    return PoolView(clock or Clock(), max_chunks=1000)


def hello(
    view: PoolView, name: str = "decode-0", role: Role = "decode", **changes: Any
) -> NodeView:
    node = view.hello(make_report(name, role, **changes))
    node.usable = True
    return node


def candidates(view: PoolView, *hashes: BlockHash) -> list[Candidate]:
    """The candidates of all kinds that get new requests."""
    return [
        each
        for kind in view.whole()
        for role, group in view.groups(hashes, kind).items()
        for each in candidates_of(group, role)
    ]


def only(view: PoolView, *hashes: BlockHash) -> Candidate:
    (candidate,) = candidates(view, *hashes)
    return candidate


def test_cached_chunks_come_from_cache_events_of_the_same_epoch() -> None:
    view = make_view()
    hello(view)
    view.cache(NODE, CacheEvents(EPOCH, stored=(A, B), reset=True))
    view.cache(NODE, CacheEvents(Epoch("older"), stored=(C,)))
    assert only(view, A, B, C).cached_chunks == 2
    view.cache(NODE, CacheEvents(EPOCH, evicted=(B,)))
    assert only(view, A, B, C).cached_chunks == 1
    view.cache(NODE, CacheEvents(EPOCH, stored=(B,), reset=True))
    assert only(view, A, B, C).cached_chunks == 0


def test_placement_sees_each_new_speed_and_none_of_0() -> None:
    view, measured = make_view(), Speeds(500.0, 7.0, 1e6, 2e6, 0.5)
    hello(view, speeds=Speeds())
    assert only(view).speeds == FALLBACK
    view.load(NODE, Load(EPOCH, "ready", measured, NodeLoad()))
    assert only(view).speeds == measured
    hello(view, "decode-1", speeds=Speeds(prefill_tokens_per_s=1500.0))
    speeds = {each.node: each.speeds for each in candidates(view)}
    assert speeds[NodeId("decode-1")] == msgspec.structs.replace(
        measured, prefill_tokens_per_s=1500.0
    )
    view.load(NODE, Load(EPOCH, "ready", Speeds(), NodeLoad()))
    speeds = {each.node: each.speeds for each in candidates(view)}
    assert speeds[NODE] == msgspec.structs.replace(FALLBACK, prefill_tokens_per_s=1500.0)


def test_a_new_epoch_inherits_nothing() -> None:
    view = make_view()
    hello(view)
    view.cache(NODE, CacheEvents(EPOCH, stored=(A,)))
    view.book(NODE, RID, 500, 1)
    restarted = hello(view, epoch=Epoch("epoch-2"))
    assert (only(view, A).cached_chunks, only(view).queued_tokens, restarted.chunks) == (0, 0, 0)
    view.load(NODE, Load(EPOCH, "ready", Speeds(), NodeLoad(queued_tokens=99)))
    view.cache(NODE, CacheEvents(EPOCH, stored=(A,)))
    assert (only(view, A).cached_chunks, only(view).queued_tokens) == (0, 0)


def test_the_same_epoch_keeps_its_chunks_over_a_broken_link() -> None:
    view = make_view()
    hello(view)
    view.cache(NODE, CacheEvents(EPOCH, stored=(A,)))
    view.lost(NODE)
    assert candidates(view, A) == []
    hello(view)
    assert only(view, A).cached_chunks == 1


def test_a_booking_is_not_counted_twice_once_a_report_can_include_it() -> None:
    clock = Clock()
    view = make_view(clock)
    hello(view)
    view.book(NODE, RID, 500, 2)
    report = Load(EPOCH, "ready", Speeds(), NodeLoad(queued_tokens=30, running=1))
    view.load(NODE, report)  # may be older than the job's arrival: the 500 tokens stay
    assert (only(view).queued_tokens, only(view).sequences) == (500, 2)
    clock.advance(2 * BOOKING_ARRIVES_S)
    assert only(view).queued_tokens == 500
    view.load(NODE, report)
    # All of it is our own request: 30 of its 500 tokens are left to compute.
    assert (only(view).queued_tokens, only(view).sequences) == (30, 2)


def test_load_of_other_routers_stays_when_our_request_ends() -> None:
    clock = Clock()
    view = make_view(clock)
    hello(view)
    view.book(NODE, RID, 100, 1)
    clock.advance(2 * BOOKING_ARRIVES_S)
    view.load(NODE, Load(EPOCH, "ready", Speeds(), NodeLoad(queued_tokens=340, running=4)))
    assert (only(view).queued_tokens, only(view).sequences) == (340, 4)
    view.prefilled(NODE, RID)
    assert (only(view).queued_tokens, only(view).sequences) == (240, 4)
    view.release(NODE, RID)
    assert (only(view).queued_tokens, only(view).sequences) == (240, 3)


def test_remaining_tokens_belong_to_the_youngest_requests() -> None:
    """The engine computes prompts in order of arrival. If the view spread the rest evenly, half of
    the second request's tokens would look like another router's once the first prompt is done."""
    clock = Clock()
    view = make_view(clock)
    hello(view)
    for number in range(2):
        view.book(NODE, RequestId(f"r{number}"), 100, 1)
    clock.advance(2 * BOOKING_ARRIVES_S)
    load = Load(EPOCH, "ready", Speeds(), NodeLoad(queued_tokens=100, running=2))
    view.load(NODE, load)  # the first prompt is computed, but its token arrives after this report
    view.prefilled(NODE, RequestId("r0"))
    view.load(NODE, load)
    assert only(view).queued_tokens == 100
    view.prefilled(NODE, RequestId("r1"))
    assert only(view).queued_tokens == 0


def test_a_node_with_only_our_request_is_idle_as_soon_as_it_ends() -> None:
    clock = Clock()
    view = make_view(clock)
    hello(view)
    view.book(NODE, RID, 100, 1)
    view.load(NODE, Load(EPOCH, "ready", Speeds(), NodeLoad(running=1)))
    view.release(NODE, RID)
    assert (only(view).queued_tokens, only(view).sequences) == (0, 0)


def test_without_reports_the_view_counts_our_own_requests() -> None:
    clock = Clock()
    view = make_view(clock)
    hello(view)
    for number in range(5):
        clock.advance(10)
        view.book(NODE, RequestId(f"r{number}"), 100, 1)
    assert (only(view).queued_tokens, only(view).sequences) == (500, 5)


def test_requests_include_other_routers_requests_and_prefill_jobs() -> None:
    view = make_view()
    hello(view, "prefill-0", "prefill")
    view.book(NodeId("prefill-0"), RID, 500, 0)
    assert (only(view).requests, only(view).sequences) == (1, 0)
    report = Load(EPOCH, "ready", Speeds(), NodeLoad(requests=4))
    view.load(NodeId("prefill-0"), report)
    assert only(view).requests == 4
    view.release(NodeId("prefill-0"), RID)
    assert only(view).requests == 3


def test_a_reused_row_inherits_nothing_and_excluded_nodes_are_left_out() -> None:
    view = make_view()
    old = hello(view)
    view.book(NODE, RID, 500, 1)
    view.cache(NODE, CacheEvents(EPOCH, stored=(A,)))
    view.forget(NODE)
    names = [f"decode-{n}" for n in range(1, 40)]
    for name in names:
        hello(view, name)
    assert all((each.queued_tokens, each.cached_chunks) == (0, 0) for each in candidates(view, A))
    view.cache(NodeId("decode-7"), CacheEvents(EPOCH, stored=(A,)))
    groups = view.groups([A], old.kind, without={NodeId("decode-1"), NodeId("decode-39")})
    held = {each.node: each.cached_chunks for each in candidates_of(groups["decode"], "decode")}
    assert held == {name: int(name == "decode-7") for name in names[1:-1]}


def test_a_booking_s_tokens_end_with_the_prefill_and_its_sequences_with_the_request() -> None:
    view = make_view()
    node = hello(view)
    view.book(NODE, RID, 500, 1)
    view.prefilled(NODE, RID)
    assert (only(view).queued_tokens, only(view).sequences) == (0, 1)
    view.release(NODE, RID)
    view.release(NODE, RID)
    assert (only(view).sequences, node.booked) == (0, {})


def test_nodes_that_are_not_ready_are_not_candidates() -> None:
    view = make_view()
    node = hello(view)
    assert len(candidates(view)) == 1
    view.load(NODE, Load(EPOCH, "draining", Speeds(), NodeLoad()))
    assert (candidates(view), state_of(node)) == ([], "draining")
    view.load(NODE, Load(EPOCH, "draining", Speeds(), NodeLoad(), asleep=True))
    assert (candidates(view), state_of(node)) == ([], "asleep")
    view.load(NODE, Load(EPOCH, "ready", Speeds(), NodeLoad()))
    node.usable = False
    assert (candidates(view), state_of(node)) == ([], "starting")
    node.usable = True
    view.lost(NODE)
    assert (candidates(view), state_of(node)) == ([], "lost")
    assert "1 lost" in view.why_not_ready()


def step(view: PoolView, steps: int, **load: int) -> None:
    figures = NodeLoad(engine_steps_total=steps, **load)
    view.load(NODE, Load(EPOCH, "ready", Speeds(), figures))


def test_a_node_without_engine_steps_is_stalled_until_the_next_step() -> None:
    clock = Clock()
    view = make_view(clock)
    node = hello(view)
    step(view, 7, running=1)
    clock.advance(8)
    step(view, 7, running=1)
    assert view.find_stalled(10.0) == []
    clock.advance(3)
    assert view.find_stalled(10.0) == [NODE]
    assert view.find_stalled(10.0) == []
    assert (candidates(view), state_of(node)) == ([], "stalled")
    step(view, 7, running=1)
    assert not node.ready
    step(view, 8, running=1)
    assert node.ready


def test_idle_nodes_and_nodes_that_send_tokens_do_not_stall() -> None:
    clock = Clock()
    view = make_view(clock)
    hello(view)
    for _ in range(3):
        clock.advance(8)
        step(view, 7, parked=1)
        assert view.find_stalled(10.0) == []
        clock.advance(8)
        view.moved(NODE)
        assert view.find_stalled(10.0) == []
    clock.advance(11)
    assert view.find_stalled(10.0) == [NODE]


def test_time_in_which_the_router_was_blocked_does_not_count_towards_a_stall() -> None:
    clock = Clock()
    view = make_view(clock)
    hello(view)
    clock.advance(60)
    view.skip_time(59.0)
    assert view.find_stalled(10.0) == []


def test_a_stalled_node_stays_stalled_after_a_reconnect() -> None:
    clock = Clock()
    view = make_view(clock)
    node = hello(view)
    clock.advance(11)
    view.find_stalled(10.0)
    view.lost(NODE)
    assert state_of(node) == "lost"
    hello(view)
    assert state_of(node) == "stalled"


def test_a_node_s_store_state_is_the_last_one_reported() -> None:
    view = make_view()
    hello(view, store="none")
    assert only(view).store == "down"
    view.load(NODE, Load(EPOCH, "ready", Speeds(), NodeLoad(), "up"))
    assert only(view).store == "up"
    view.load(NODE, Load(EPOCH, "ready", Speeds(), NodeLoad(), "down"))
    assert only(view).store == "down"


def test_groups_of_a_kind_leave_out_nodes_of_other_kinds() -> None:
    view = make_view()
    old = hello(view)
    assert view.kind() == old.kind
    hello(view, "decode-1", fingerprint=Fingerprint("0" * 32))
    view.lost(NODE)
    assert [c.node for c in candidates(view)] == ["decode-1"]
    assert [len(group) for group in view.groups([], old.kind).values()] == [0, 0]


def test_a_forgotten_node_leaves_no_chunks() -> None:
    view = make_view()
    hello(view)
    view.cache(NODE, CacheEvents(EPOCH, stored=(A,)))
    view.forget(NODE)
    assert view.nodes == {}
    assert prefixes_of(view.chunks, [A]) == {}

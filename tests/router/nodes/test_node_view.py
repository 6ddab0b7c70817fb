"""What the router believes: prefixes per node, bookings, epochs."""

from __future__ import annotations

import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId, RequestId
from baton_protocol.link import CacheEvents, Load
from baton_protocol.store import NodeLoad, Role, Speeds
from baton_router.nodes.pool_view import BOOKING_ARRIVES_S, NodeView, PoolView, state_of
from baton_router.nodes.prefix_index import ENTRY_BYTES, SCRUB_AT, SCRUBBED, ChunkIndex
from tests.support.clock import Clock
from tests.support.nodes.candidates import Candidate, candidates_of
from tests.support.nodes.fake_node import make_report

A, B, C = (BlockHash(bytes([n]) * 16) for n in range(3))
NODE, RID = NodeId("decode-0"), RequestId("r1")
EPOCH = Epoch("epoch-1")


def a_view(clock: Clock | None = None) -> PoolView:
    return PoolView(clock or Clock(), max_chunks=1000)


def meet(view: PoolView, name: str = "decode-0", role: Role = "decode", **changes: Any) -> NodeView:
    node = view.hello(make_report(name, role, **changes))
    node.usable = True
    return node


def seen(view: PoolView, *hashes: BlockHash) -> list[Candidate]:
    """The candidates of all kinds that new requests may be of."""
    return [
        each
        for kind in view.whole()
        for role, group in view.groups(hashes, kind).items()
        for each in candidates_of(group, role)
    ]


def prefixes_of(index: ChunkIndex, hashes: list[BlockHash]) -> dict[int, int]:
    """Slot -> how many leading chunks it holds; slots that hold none are absent."""
    return {slot: int(n) for slot, n in enumerate(index.prefixes(hashes)) if n}


def only(view: PoolView, *hashes: BlockHash) -> Candidate:
    (candidate,) = seen(view, *hashes)
    return candidate


# --- chunks ---------------------------------------------------------------------------------------


def test_a_prefix_ends_at_the_first_chunk_a_node_does_not_hold() -> None:
    index = ChunkIndex(100)
    one, two = index.new_slot(), index.new_slot()
    index.store(one, [A, C])
    index.store(two, [A, B, C])
    assert prefixes_of(index, [A, B, C]) == {one: 1, two: 3}
    assert prefixes_of(index, [B, C]) == {two: 2}
    assert prefixes_of(index, []) == {}


def test_the_index_is_bounded_and_forgets_what_nobody_asked_for() -> None:
    index = ChunkIndex(2)
    slot = index.new_slot()
    index.store(slot, [A, B])
    index.prefixes([A])
    index.store(slot, [C])
    assert len(index) == 2
    assert prefixes_of(index, [A]) == {slot: 1}
    assert prefixes_of(index, [B]) == {}


def test_a_million_entries_are_scrubbed_a_part_at_a_time_and_hold_nothing_meanwhile() -> None:
    index = ChunkIndex(10 * SCRUBBED)
    names = [BlockHash(n.to_bytes(16, "big")) for n in range(3 * SCRUBBED)]
    kept = index.new_slot()
    index.store(kept, names[:5])
    for _ in range(SCRUB_AT):
        slot = index.new_slot()
        index.store(slot, names)
        index.drop_slot(slot)
    assert prefixes_of(index, names) == {kept: 5}
    assert index.new_slot() > SCRUB_AT  # not all are scrubbed: none of them is given out
    for _ in range(3):
        index.store(kept, [])
    assert (len(index), prefixes_of(index, names)) == (5, {kept: 5})
    assert index.new_slot() < SCRUB_AT


def test_memory_is_bounded_by_what_the_module_states() -> None:
    tracemalloc.start()
    try:
        index, size, slots = ChunkIndex(4000), 4000, 1000
        for _ in range(slots):
            index.new_slot()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(3 * size):  # no two entries share their nodes, nor anything else
            name = BlockHash(number.to_bytes(16, "big"))
            index.store(number % slots, [name])
            index.store(slots - 1, [name])
            if number % 7 == 0:
                index.prefixes([name])
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == size
    assert slots / 8 < (after - before) / size <= ENTRY_BYTES + (slots + SCRUB_AT) / 7.5


def test_what_was_asked_for_is_kept_when_others_go() -> None:
    index = ChunkIndex(100)
    slot = index.new_slot()
    names = [BlockHash(n.to_bytes(16, "big")) for n in range(400)]
    hot = names[:10]
    index.store(slot, hot)
    for start in range(10, 400, 30):
        assert index.longest(hot) == 10
        index.store(slot, names[start : start + 30])
    assert (len(index), index.longest(hot)) == (100, 10)


def test_dropped_slots_hold_nothing_and_are_used_again_only_when_clean() -> None:
    index = ChunkIndex(100)
    for _ in range(3 * SCRUB_AT):
        slot = index.new_slot()
        assert prefixes_of(index, [A]) == {}
        index.store(slot, [A])
        index.drop_slot(slot)
        index.drop_slot(slot)
        assert slot < SCRUB_AT
    assert prefixes_of(index, [A]) == {}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "evict", "drop"]),
            st.integers(0, 2),
            st.lists(st.integers(0, 5), max_size=4),
        ),
        max_size=200,
    )
)
def test_the_index_says_what_a_dictionary_of_sets_says(
    history: list[tuple[str, int, list[int]]],
) -> None:
    index = ChunkIndex(1000)
    names = [BlockHash(bytes([n]) * 16) for n in range(6)]
    slots = [index.new_slot() for _ in range(3)]
    held: list[set[int]] = [set() for _ in range(3)]
    for what, node, chunks in history:
        if what == "store":
            index.store(slots[node], [names[c] for c in chunks])
            held[node] |= set(chunks)
        elif what == "evict":
            index.evict(slots[node], [names[c] for c in chunks])
            held[node] -= set(chunks)
        else:
            index.drop_slot(slots[node])
            slots[node], held[node] = index.new_slot(), set()
    prefix = [next((n for n in range(6) if n not in mine), 6) for mine in held]
    expected = {slot: n for slot, n in zip(slots, prefix, strict=True) if n}
    assert prefixes_of(index, names) == expected


# --- nodes ----------------------------------------------------------------------------------------


def test_cached_chunks_come_from_cache_events_of_the_same_epoch() -> None:
    view = a_view()
    meet(view)
    view.cache(NODE, CacheEvents(EPOCH, stored=(A, B), reset=True))
    view.cache(NODE, CacheEvents(Epoch("older"), stored=(C,)))
    assert only(view, A, B, C).cached_chunks == 2
    view.cache(NODE, CacheEvents(EPOCH, evicted=(B,)))
    assert only(view, A, B, C).cached_chunks == 1
    view.cache(NODE, CacheEvents(EPOCH, stored=(B,), reset=True))
    assert only(view, A, B, C).cached_chunks == 0


def test_a_new_epoch_inherits_nothing() -> None:
    view = a_view()
    meet(view)
    view.cache(NODE, CacheEvents(EPOCH, stored=(A,)))
    view.book(NODE, RID, 500, 1)
    again = meet(view, epoch=Epoch("epoch-2"))
    assert (only(view, A).cached_chunks, only(view).queued_tokens, again.chunks) == (0, 0, 0)
    view.load(NODE, Load(EPOCH, "ready", Speeds(), NodeLoad(queued_tokens=99)))
    view.cache(NODE, CacheEvents(EPOCH, stored=(A,)))
    assert (only(view, A).cached_chunks, only(view).queued_tokens) == (0, 0)


def test_the_same_epoch_keeps_its_chunks_over_a_broken_link() -> None:
    view = a_view()
    meet(view)
    view.cache(NODE, CacheEvents(EPOCH, stored=(A,)))
    view.lost(NODE)
    assert seen(view, A) == []
    meet(view)
    assert only(view, A).cached_chunks == 1


def test_a_booking_is_not_counted_twice_by_a_report_that_had_time_to_include_it() -> None:
    clock = Clock()
    view = a_view(clock)
    meet(view)
    view.book(NODE, RID, 500, 2)
    report = Load(EPOCH, "ready", Speeds(), NodeLoad(queued_tokens=30, running=1))
    view.load(NODE, report)  # may have been sent before the job arrived: its 500 stay
    assert (only(view).queued_tokens, only(view).sequences) == (500, 2)
    clock.advance(2 * BOOKING_ARRIVES_S)
    assert only(view).queued_tokens == 500
    view.load(NODE, report)
    # Ours, all of it: 30 of the 500 tokens are left to compute.
    assert (only(view).queued_tokens, only(view).sequences) == (30, 2)


def test_what_others_brought_stays_when_our_own_request_ends() -> None:
    clock = Clock()
    view = a_view(clock)
    meet(view)
    view.book(NODE, RID, 100, 1)
    clock.advance(2 * BOOKING_ARRIVES_S)
    view.load(NODE, Load(EPOCH, "ready", Speeds(), NodeLoad(queued_tokens=340, running=4)))
    assert (only(view).queued_tokens, only(view).sequences) == (340, 4)
    view.prefilled(NODE, RID)
    assert (only(view).queued_tokens, only(view).sequences) == (240, 4)
    view.release(NODE, RID)
    assert (only(view).queued_tokens, only(view).sequences) == (240, 3)


def test_what_is_left_to_compute_is_of_the_requests_that_came_last() -> None:
    """As in the engine. Were it shared out evenly, half of the second request's tokens would look
    like somebody else's once the first one's prompt is known to be computed."""
    clock = Clock()
    view = a_view(clock)
    meet(view)
    for number in range(2):
        view.book(NODE, RequestId(f"r{number}"), 100, 1)
    clock.advance(2 * BOOKING_ARRIVES_S)
    load = Load(EPOCH, "ready", Speeds(), NodeLoad(queued_tokens=100, running=2))
    view.load(NODE, load)  # the first prompt is computed; its token comes after this report
    view.prefilled(NODE, RequestId("r0"))
    view.load(NODE, load)
    assert only(view).queued_tokens == 100
    view.prefilled(NODE, RequestId("r1"))
    assert only(view).queued_tokens == 0


def test_a_node_that_served_only_us_is_idle_the_moment_our_request_ends() -> None:
    clock = Clock()
    view = a_view(clock)
    meet(view)
    view.book(NODE, RID, 100, 1)
    view.load(NODE, Load(EPOCH, "ready", Speeds(), NodeLoad(running=1)))
    view.release(NODE, RID)
    assert (only(view).queued_tokens, only(view).sequences) == (0, 0)


def test_without_reports_the_view_ages_into_counting_our_own_requests() -> None:
    clock = Clock()
    view = a_view(clock)
    meet(view)
    for number in range(5):
        clock.advance(10)
        view.book(NODE, RequestId(f"r{number}"), 100, 1)
    assert (only(view).queued_tokens, only(view).sequences) == (500, 5)


def test_requests_are_ours_and_those_beside_them_and_prefill_jobs_count() -> None:
    view = a_view()
    meet(view, "prefill-0", "prefill")
    view.book(NodeId("prefill-0"), RID, 500, 0)
    assert (only(view).requests, only(view).sequences) == (1, 0)
    report = Load(EPOCH, "ready", Speeds(), NodeLoad(requests=4))
    view.load(NodeId("prefill-0"), report)
    assert only(view).requests == 4
    view.release(NodeId("prefill-0"), RID)
    assert only(view).requests == 3


def test_a_node_that_is_left_out_and_one_that_took_its_row_are_told_apart() -> None:
    view = a_view()
    old = meet(view)
    view.book(NODE, RID, 500, 1)
    view.cache(NODE, CacheEvents(EPOCH, stored=(A,)))
    view.forget(NODE)
    names = [f"decode-{n}" for n in range(1, 40)]
    for name in names:
        meet(view, name)
    assert all((each.queued_tokens, each.cached_chunks) == (0, 0) for each in seen(view, A))
    view.cache(NodeId("decode-7"), CacheEvents(EPOCH, stored=(A,)))
    groups = view.groups([A], old.kind, without={NodeId("decode-1"), NodeId("decode-39")})
    held = {each.node: each.cached_chunks for each in candidates_of(groups["decode"], "decode")}
    assert held == {name: int(name == "decode-7") for name in names[1:-1]}


def test_bookings_end_with_the_prefill_and_with_the_request() -> None:
    view = a_view()
    node = meet(view)
    view.book(NODE, RID, 500, 1)
    view.prefilled(NODE, RID)
    assert (only(view).queued_tokens, only(view).sequences) == (0, 1)
    view.release(NODE, RID)
    view.release(NODE, RID)
    assert (only(view).sequences, node.booked) == (0, {})


def test_nodes_that_are_not_ready_are_no_candidates() -> None:
    view = a_view()
    node = meet(view)
    assert len(seen(view)) == 1
    view.load(NODE, Load(EPOCH, "draining", Speeds(), NodeLoad()))
    assert (seen(view), state_of(node)) == ([], "draining")
    view.load(NODE, Load(EPOCH, "ready", Speeds(), NodeLoad()))
    node.usable = False
    assert (seen(view), state_of(node)) == ([], "starting")
    node.usable = True
    view.lost(NODE)
    assert (seen(view), state_of(node)) == ([], "lost")
    assert "1 lost" in view.why_not_ready()


def step(view: PoolView, steps: int, **load: int) -> None:
    figures = NodeLoad(engine_steps_total=steps, **load)
    view.load(NODE, Load(EPOCH, "ready", Speeds(), figures))


def test_a_node_whose_engine_makes_no_step_is_stalled_until_it_does() -> None:
    clock = Clock()
    view = a_view(clock)
    node = meet(view)
    step(view, 7, running=1)
    clock.advance(8)
    step(view, 7, running=1)
    assert view.standing(10.0) == []
    clock.advance(3)
    assert view.standing(10.0) == [NODE]
    assert view.standing(10.0) == []
    assert (seen(view), state_of(node)) == ([], "stalled")
    step(view, 7, running=1)
    assert not node.ready
    step(view, 8, running=1)
    assert node.ready


def test_a_node_without_work_or_with_tokens_does_not_stall_and_a_silent_one_does() -> None:
    clock = Clock()
    view = a_view(clock)
    meet(view)
    for _ in range(3):
        clock.advance(8)
        step(view, 7, parked=1)
        assert view.standing(10.0) == []
        clock.advance(8)
        view.moved(NODE)
        assert view.standing(10.0) == []
    clock.advance(11)
    assert view.standing(10.0) == [NODE]


def test_time_in_which_this_process_stood_still_stalls_nobody() -> None:
    clock = Clock()
    view = a_view(clock)
    meet(view)
    clock.advance(60)
    view.stood_still(59.0)
    assert view.standing(10.0) == []


def test_a_stalled_engine_is_not_cured_by_a_new_link() -> None:
    clock = Clock()
    view = a_view(clock)
    node = meet(view)
    clock.advance(11)
    view.standing(10.0)
    view.lost(NODE)
    assert state_of(node) == "lost"
    meet(view)
    assert state_of(node) == "stalled"


def test_a_nodes_store_is_what_it_said_last() -> None:
    view = a_view()
    meet(view, store="none")
    assert only(view).store == "down"
    view.load(NODE, Load(EPOCH, "ready", Speeds(), NodeLoad(), "up"))
    assert only(view).store == "up"
    view.load(NODE, Load(EPOCH, "ready", Speeds(), NodeLoad(), "down"))
    assert only(view).store == "down"


def test_a_request_goes_to_its_own_kind_even_when_the_pool_serves_another() -> None:
    view = a_view()
    old = meet(view)
    assert view.kind() == old.kind
    meet(view, "decode-1", fingerprint=Fingerprint("0" * 32))
    view.lost(NODE)
    assert [c.node for c in seen(view)] == ["decode-1"]
    assert [len(group) for group in view.groups([], old.kind).values()] == [0, 0]


def test_a_forgotten_node_leaves_nothing() -> None:
    view = a_view()
    meet(view)
    view.cache(NODE, CacheEvents(EPOCH, stored=(A,)))
    view.forget(NODE)
    assert view.nodes == {}
    assert prefixes_of(view.chunks, [A]) == {}

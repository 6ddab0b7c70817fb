"""Which nodes hold which chunks: prefixes, what is forgotten, slots and memory."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.ids import BlockHash
from baton_router.nodes.prefix_index import ENTRY_BYTES, SCRUB_AT, SCRUBBED, PrefixIndex

A, B, C = (BlockHash(bytes([n]) * 16) for n in range(3))


def prefixes_of(index: PrefixIndex, hashes: list[BlockHash]) -> dict[int, int]:
    """Slot -> number of leading chunks that it holds, without slots that hold none."""
    return {slot: int(n) for slot, n in enumerate(index.prefixes(hashes)) if n}


def test_a_prefix_ends_at_the_first_chunk_a_node_does_not_hold() -> None:
    index = PrefixIndex(100)
    first, second = index.new_slot(), index.new_slot()
    index.store(first, [A, C])
    index.store(second, [A, B, C])
    assert prefixes_of(index, [A, B, C]) == {first: 1, second: 3}
    assert prefixes_of(index, [B, C]) == {second: 2}
    assert prefixes_of(index, []) == {}


def test_a_full_index_forgets_the_least_recently_queried_chunk() -> None:
    index = PrefixIndex(2)
    slot = index.new_slot()
    index.store(slot, [A, B])
    index.prefixes([A])
    index.store(slot, [C])
    assert len(index) == 2
    assert prefixes_of(index, [A]) == {slot: 1}
    assert prefixes_of(index, [B]) == {}


def test_dropped_slots_are_scrubbed_in_parts_and_hold_nothing_meanwhile() -> None:
    index = PrefixIndex(10 * SCRUBBED)
    names = [BlockHash(n.to_bytes(16, "big")) for n in range(3 * SCRUBBED)]
    kept = index.new_slot()
    index.store(kept, names[:5])
    for _ in range(SCRUB_AT):
        slot = index.new_slot()
        index.store(slot, names)
        index.drop_slot(slot)
    assert prefixes_of(index, names) == {kept: 5}
    assert (
        index.new_slot() > SCRUB_AT
    )  # dropped slots are not reused before all entries are scrubbed
    for _ in range(3):
        index.store(kept, [])
    assert (len(index), prefixes_of(index, names)) == (5, {kept: 5})
    assert index.new_slot() < SCRUB_AT


def test_memory_per_entry_stays_within_the_documented_bound() -> None:
    tracemalloc.start()
    try:
        index, size, slots = PrefixIndex(4000), 4000, 1000
        for _ in range(slots):
            index.new_slot()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(3 * size):  # no two entries share a bit set
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


def test_recently_queried_chunks_are_kept_when_others_are_forgotten() -> None:
    index = PrefixIndex(100)
    slot = index.new_slot()
    names = [BlockHash(n.to_bytes(16, "big")) for n in range(400)]
    hot = names[:10]
    index.store(slot, hot)
    for start in range(10, 400, 30):
        assert index.longest(hot) == 10
        index.store(slot, names[start : start + 30])
    assert (len(index), index.longest(hot)) == (100, 10)


def test_dropped_slots_hold_nothing_when_they_are_reused() -> None:
    index = PrefixIndex(100)
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
def test_the_index_agrees_with_a_dictionary_of_sets(
    history: list[tuple[str, int, list[int]]],
) -> None:
    index = PrefixIndex(1000)
    names = [BlockHash(bytes([n]) * 16) for n in range(6)]
    slots = [index.new_slot() for _ in range(3)]
    held: list[set[int]] = [set() for _ in range(3)]
    for action, node, chunks in history:
        if action == "store":
            index.store(slots[node], [names[c] for c in chunks])
            held[node] |= set(chunks)
        elif action == "evict":
            index.evict(slots[node], [names[c] for c in chunks])
            held[node] -= set(chunks)
        else:
            index.drop_slot(slots[node])
            slots[node], held[node] = index.new_slot(), set()
    prefix = [next((n for n in range(6) if n not in chunks), 6) for chunks in held]
    expected = {slot: n for slot, n in zip(slots, prefix, strict=True) if n}
    assert prefixes_of(index, names) == expected

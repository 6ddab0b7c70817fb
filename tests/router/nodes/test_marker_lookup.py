"""Lookups of markers on an index that answers, fails or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton_kvstore.errors import StoreUnavailable
from baton_kvstore.index.markers import Index
from baton_protocol.ids import BlockHash, Fingerprint
from baton_protocol.store import Marker
from baton_router.nodes.marker_lookup import FAILURES, RETRY_S, MarkerLookup
from tests.support.waiting import until

NOWHERE = "redis://127.0.0.1:1"  # nothing listens there
FP = Fingerprint("f" * 32)
CHUNKS = [BlockHash(bytes([n]) * 16) for n in range(3)]


class FakeIndex(Index):
    """An index with markers for the chunks in `marked`. It can fail or hang on demand."""

    def __init__(self) -> None:
        super().__init__(NOWHERE, "default")
        self.marked: set[BlockHash] = set()
        self.behavior = "answers"
        self.lookups = 0
        self.answer = asyncio.Event()

    async def lookup(
        self, fingerprint: Fingerprint, chunks: Sequence[BlockHash]
    ) -> list[Marker | None]:
        self.lookups += 1
        if self.behavior == "fails":
            raise StoreUnavailable("the index is away")
        if self.behavior == "hangs":
            await self.answer.wait()
        marker = Marker(0, "run", 1, 1, 0)
        return [marker if chunk in self.marked else None for chunk in chunks]


async def test_markers_tell_which_chunks_the_store_holds() -> None:
    index = FakeIndex()
    index.marked = {CHUNKS[0], CHUNKS[2]}
    markers = MarkerLookup(index, timeout_s=5.0, clock=lambda: 0.0)
    assert markers.up is None
    assert await markers.find_stored(FP, CHUNKS) == [True, False, True]
    assert markers.up is True
    assert await markers.find_stored(FP, []) == []
    assert index.lookups == 1
    assert (
        await MarkerLookup(None, timeout_s=5.0, clock=lambda: 0.0).find_stored(FP, CHUNKS)
        == [False] * 3
    )


async def test_after_repeated_failures_the_index_is_not_queried_for_a_while() -> None:
    index, now = FakeIndex(), [0.0]
    index.marked, index.behavior = set(CHUNKS), "fails"
    markers = MarkerLookup(index, timeout_s=5.0, clock=lambda: now[0])
    for _ in range(FAILURES):
        assert await markers.find_stored(FP, CHUNKS) == [False] * 3
    assert markers.up is False
    await markers.find_stored(FP, CHUNKS)
    assert index.lookups == FAILURES
    index.behavior, now[0] = "answers", RETRY_S + 1
    assert await markers.find_stored(FP, CHUNKS) == [True] * 3
    assert markers.up is True


async def test_a_late_answer_counts_as_no_markers_and_not_as_a_failure() -> None:
    index = FakeIndex()
    index.marked, index.behavior = set(CHUNKS), "hangs"
    markers = MarkerLookup(index, timeout_s=0.01, clock=lambda: 0.0)
    for _ in range(FAILURES + 1):
        assert await markers.find_stored(FP, CHUNKS) == [False] * 3
    assert markers.up is None
    index.answer.set()
    await until(lambda: markers.up is True)
    await markers.cancel_lookups()

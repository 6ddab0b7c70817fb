"""Which blocks of a prompt a Publisher puts, if layers have windows."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton_engine.interface import Progress
from baton_node.engine.counters import Counters
from baton_node.engine.job import Job, Times
from baton_node.store.base import ChunkRef
from baton_prefill_node.publisher import TOO_LATE, Publisher
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.layout import KVGroup, KVLayout
from baton_protocol.store import InboxEntry, Marker, Priority
from tests.support.nodes.processes import make_request

FULL, WINDOW = KVGroup((0,)), KVGroup((1,), 48)
CHUNKS = 5  # of 32 tokens: a window of 48 tokens reaches into chunks 3 and 4


@dataclass
class Outside:
    """The connector and the puts of a Publisher: records what it does."""

    puts: dict[int, tuple[BlockId, ...]] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    announced: list[InboxEntry] = field(default_factory=list)

    def put_chunk(
        self,
        chunk: ChunkRef,
        source: tuple[BlockId, ...],
        priority: Priority,
        settle: object,
        inbox: object,
    ) -> bool:
        self.puts[chunk.index] = source
        return True

    def log_refusal(self, chunk: BlockHash, reason: str) -> None:
        self.refusals.append(reason)

    def announce(self, inbox: tuple[str, str], entry: InboxEntry) -> None:
        self.announced.append(entry)


def layout_of(*groups: KVGroup) -> KVLayout:
    return KVLayout(
        num_layers=2,
        num_kv_heads=1,
        head_dim=4,
        block_size=16,
        dtype="float32",
        chunk_blocks=2,
        groups=groups,
    )


def marker(size: int) -> Marker:
    return Marker(0, "run", size, 1, 0)


def publish(
    layout: KVLayout, blocks: list[int], found: dict[int, Marker] | None = None
) -> tuple[Outside, Job]:
    """Publish a prompt that is computed in one step, after its lookup found these markers."""
    outside, found = Outside(), found or {}
    context = SimpleNamespace(connector=outside, counters=Counters(), layout=layout)
    publisher = Publisher(cast(Any, context), cast(Any, outside))
    job = Job(
        request=make_request("r", bytes(CHUNKS * 32 + 5)),
        kind="prefill",
        seq=1,
        layout=layout,
        chunks=[BlockHash(bytes([chunk]) * 16) for chunk in range(CHUNKS)],
        full_blocks=2 * CHUNKS,
        times=Times(0.0),
        inbox=("d", "e"),
        markers=found,
    )
    publisher.open_job(job)
    publisher.use_lookup(job)
    ids = tuple(BlockId(block) for block in blocks)
    publisher.publish_progress(Progress(job.request.id, CHUNKS * 32 + 5, ids), job)
    return outside, job


def blocks_of(groups: int, first: int = 0) -> list[int]:
    """Block ids of the prompt. Of the groups after the first, spans before `first` have none."""
    spans = range(2 * CHUNKS + 1)
    return [
        0 if group and span < first else 1 + span * groups + group
        for span in spans
        for group in range(groups)
    ]


def test_the_windows_of_early_chunks_are_not_put() -> None:
    outside, _ = publish(layout_of(FULL, WINDOW), blocks_of(2, first=6))
    assert outside.puts == {
        0: (1, 3),
        1: (5, 7),
        2: (9, 11),
        3: (13, 15, 14, 16),
        4: (17, 19, 18, 20),
    }


def test_without_a_group_without_a_window_early_chunks_are_neither_put_nor_announced() -> None:
    layout = layout_of(WINDOW)
    found = {0: marker(layout.chunk_bytes), 3: marker(layout.chunk_bytes)}
    outside, _ = publish(layout, blocks_of(1), found)
    assert outside.puts == {4: (9, 10)}
    assert [(entry.first, entry.markers) for entry in outside.announced] == [(3, (found[3],))]


def test_a_stored_chunk_that_misses_its_windows_is_put_again_where_they_are_needed() -> None:
    layout = layout_of(FULL, WINDOW)
    partial, complete = marker(layout.full_groups_bytes), marker(layout.chunk_bytes)
    found = {0: partial, 1: complete, 2: partial, 3: partial, 4: complete}
    outside, _ = publish(layout, blocks_of(2), found)
    assert outside.puts == {3: (13, 15, 14, 16)}
    announced = [(entry.first, entry.markers) for entry in outside.announced]
    assert announced == [(0, (partial, complete, partial)), (4, (complete,))]


@pytest.mark.parametrize("full", [True, False])
def test_blocks_that_the_engine_holds_no_more_are_never_put(full: bool) -> None:
    layout = layout_of(FULL, WINDOW) if full else layout_of(KVGroup((0,), 48), WINDOW)
    outside, _ = publish(layout, blocks_of(2, first=7))
    assert 3 not in outside.puts
    assert all(0 not in source for source in outside.puts.values())
    assert outside.refusals == [TOO_LATE]

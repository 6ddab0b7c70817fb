"""Chunks of layers in groups: all groups are stored or only those without a window, and a fetch
leaves out any blocks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from baton_engine.interface import PADDING
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.keys import chunk_key
from baton_protocol.layout import VALUE_HEADER_BYTES, KVGroup, KVLayout
from tests.support.nodes.connectors import Harness, PlainMemory, ref
from tests.support.stores.kvstore import PATIENT, patient_index, plain_client

pytestmark = pytest.mark.integration

# A chunk has 2 blocks of each of 3 groups; the first group has no window.
LAYOUT = KVLayout(
    num_layers=3,
    num_kv_heads=2,
    head_dim=16,
    block_size=16,
    dtype="float32",
    chunk_blocks=2,
    groups=(KVGroup((0,)), KVGroup((1,), 32), KVGroup((2,), 64)),
)
SOURCE, TARGET = range(1, 7), range(7, 13)
BLOCKS = 12


@pytest.fixture(params=["in place", "in a buffer", "in head shards"])
def memory(request: pytest.FixtureRequest) -> PlainMemory:
    """Memory with random bytes in all blocks."""
    layout = msgspec.structs.replace(LAYOUT, kv_shards=2 if "shards" in request.param else 1)
    memory = PlainMemory(layout, BLOCKS, direct=request.param == "in place")
    rng = random.Random(5)
    for block in memory.blocks:
        block[:] = rng.randbytes(len(block))
    return memory


@pytest.fixture
def harness(store: EmbeddedStore, memory: PlainMemory) -> Iterator[Harness]:
    with closing(Harness(store, memory=memory, connect=patient_index, tuning=PATIENT)) as harness:
        yield harness


def stored_bytes(store: EmbeddedStore, harness: Harness, name: bytes) -> int:
    """The bytes of a chunk's values, without their headers."""
    total = 0
    for url in store.data_urls:
        with plain_client(url) as client:
            for shard in range(harness.memory.layout.kv_shards):
                key = chunk_key(harness.engine.info.fingerprint, ref(name).hash, shard)
                total += max(0, int(client.strlen(key)) - VALUE_HEADER_BYTES)
    return total


def fetch_and_compare(
    harness: Harness, memory: PlainMemory, blocks: list[int], written: dict[int, int]
) -> int:
    """Fetch the chunk "chunk" into these blocks. Then the blocks that are keys of `written` have
    the content of the blocks that are its values, and all others are unchanged. Return the bytes
    fetched."""
    expected = [bytes(block) for block in memory.blocks]
    for target, source in written.items():
        expected[target] = expected[source]
    (marker,) = harness.look_up(b"chunk")
    assert marker is not None
    fetched = harness.fetch(b"chunk", marker, blocks)
    assert fetched.ok, fetched.reason
    wrong = [i for i, data in enumerate(expected) if memory.blocks[i] != data]
    assert wrong == []
    return fetched.bytes


def test_a_chunk_without_its_windows_is_stored_and_fetched_in_fewer_bytes(
    harness: Harness, memory: PlainMemory, store: EmbeddedStore
) -> None:
    marker = harness.publish(b"chunk", SOURCE[:2])
    size = 2 * LAYOUT.block_bytes
    assert LAYOUT.full_groups_bytes == size == LAYOUT.chunk_bytes // 3
    assert marker.payload_bytes == stored_bytes(store, harness, b"chunk") == size
    written = dict(zip(TARGET[:2], SOURCE[:2], strict=True))
    assert fetch_and_compare(harness, memory, list(TARGET), written) == size


def test_a_fetch_leaves_out_any_blocks(harness: Harness, memory: PlainMemory) -> None:
    harness.publish(b"chunk", SOURCE)
    for kept in itertools.product([True, False], repeat=6):
        for target in TARGET:
            memory.blocks[target][:] = bytes([target]) * LAYOUT.block_bytes
        targets = [target if keep else PADDING for target, keep in zip(TARGET, kept, strict=True)]
        pairs = zip(TARGET, SOURCE, kept, strict=True)
        written = {target: source for target, source, keep in pairs if keep}
        assert fetch_and_compare(harness, memory, targets, written) == LAYOUT.chunk_bytes


def test_a_larger_value_replaces_a_smaller_one_whose_marker_then_misses(
    harness: Harness, memory: PlainMemory, store: EmbeddedStore
) -> None:
    smaller = harness.publish(b"chunk", SOURCE[:2])
    larger = harness.publish(b"chunk", SOURCE)
    assert larger.payload_bytes == stored_bytes(store, harness, b"chunk") == LAYOUT.chunk_bytes
    assert not harness.fetch(b"chunk", smaller, TARGET).ok
    # The old marker must not drop the new one.
    assert harness.look_up(b"chunk") == (larger,)
    fetch_and_compare(harness, memory, list(TARGET), dict(zip(TARGET, SOURCE, strict=True)))


def test_a_smaller_value_is_a_miss_for_the_marker_of_a_larger_one(harness: Harness) -> None:
    larger = harness.publish(b"chunk", SOURCE)
    smaller = harness.publish(b"chunk", SOURCE[:2])
    assert not harness.fetch(b"chunk", larger, TARGET).ok
    assert harness.look_up(b"chunk") == (smaller,)


@pytest.mark.parametrize("size", [0, 1, LAYOUT.block_bytes, 2 * LAYOUT.chunk_bytes])
def test_a_marker_of_another_size_is_a_miss(harness: Harness, size: int) -> None:
    marker = harness.publish(b"chunk", SOURCE)
    wrong = msgspec.structs.replace(marker, payload_bytes=size)
    fetched = harness.fetch(b"chunk", wrong, TARGET)
    assert not fetched.ok
    assert f"{size} bytes" in fetched.reason
    assert harness.look_up(b"chunk") == (marker,)

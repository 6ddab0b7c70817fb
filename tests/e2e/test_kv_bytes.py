"""Every page's bytes go prefill-gather -> Redis -> decode-scatter, and no other byte changes.

Real engines' memory (tiny models on torch, and the simulated one), a real index and two real data
servers. Torch's pages on a CPU, in one shard, are sent from and received into as they lie; all
others go through staging buffers. One node computes prompts of odd lengths and publishes them;
another fetches each second chunk; then both end, and two others of new epochs, with pools of other
sizes and other blocks in use, fetch everything. After each fetch the whole pool is compared with
what it has to be: the source's bytes in the pages fetched, and in all others the noise that was
there before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import Reservation
from baton_engine.sim.build import SimSettings, build_sim
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.keys import chunk_key
from baton_node.store.base import PADDING
from baton_protocol.ids import BlockId
from baton_protocol.layout import VALUE_HEADER_BYTES, KVLayout
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from tests.support.engines.torch_engines import make_request, small_engine
from tests.support.nodes.node_ends import End, Pages, dump, flood
from tests.support.stores.kvstore import plain_client

BLOCK, CHUNK_BLOCKS = 16, 3
CHUNK = BLOCK * CHUNK_BLOCKS
# Less than a chunk; one more, one less than some; an odd number of them; long, with an odd tail.
LENGTHS = (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 3 * CHUNK + 5, 333, 601)
WARM = 5 * BLOCK + 3  # a request that has other blocks in use first
BLOCKS = 150
FIRST_ID, END_ID = 32, 127  # both engines' vocabularies have them
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# Make an engine of this many blocks.
Build = Callable[[int], EngineCore]


@dataclass(frozen=True)
class Shape:
    """`model` "" is the simulated engine with `heads` KV heads."""

    model: str
    heads: int
    dtype: str
    shards: int
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.model or 'sim'}-{self.dtype}-{self.shards}-{self.device}"


# Query heads per KV head 1, 2, 4 and 2; head_dim 16, 16, 24 and 32.
MODELS = (("llama-gqa1", 4), ("llama-gqa2-tied", 2), ("llama-gqa4", 1), ("qwen3-gqa2", 2), ("", 4))
SHAPES = [
    Shape(model, heads, dtype, shards)
    for model, heads in MODELS
    for dtype in ("float32", "bfloat16")
    for shards in (1, 2)
    if heads % shards == 0
]
ON_CUDA = [
    pytest.param(
        Shape("llama-gqa1", 4, dtype, shards, "cuda"),
        id=f"{dtype}-{shards}",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu"),
        ],
    )
    for dtype in ("float32", "bfloat16")
    for shards in (1, 2)
]


@pytest.fixture(scope="module")
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore(256 << 20, data_instances=2) as store:
        yield store


def builder(shape: Shape, tiny_model: Callable[[str], Path]) -> Build:
    if shape.model:
        folder = tiny_model(shape.model)
        return lambda blocks: small_engine(
            folder,
            dtype=shape.dtype,
            device=shape.device,
            kv_blocks=blocks,
            chunk_blocks=CHUNK_BLOCKS,
            kv_shards=shape.shards,
        )
    return lambda blocks: build_sim(
        SimSettings(
            kv_heads=shape.heads,
            dtype=shape.dtype,
            num_blocks=blocks,
            chunk_blocks=CHUNK_BLOCKS,
            kv_shards=shape.shards,
        )
    )


def request_of(name: str, length: int) -> Request:
    """The same ids for the same length and name."""
    rng = random.Random(f"{name}/{length}")
    ids = [rng.randrange(FIRST_ID, END_ID) for _ in range(length)]
    return make_request(f"{name}-{length}", ids, GREEDY)


def requests_of(shape: Shape) -> list[Request]:
    return [request_of(str(shape), length) for length in LENGTHS]


@dataclass
class Source:
    """What a prompt's chunks were, page by page, on the node that computed it."""

    chunks: list[Pages]
    said: list[int]
    servers: set[int]  # that hold them


def published(end: End, request: Request, store: EmbeddedStore) -> Source:
    """Compute, publish, destroy the source as soon as that is allowed, and look at what the data
    servers hold: of each shard its heads of each page."""
    reservation, said = end.compute(request)
    before = dump(end.engine.memory)
    refs = end.refs(reservation)
    chunks = [before[list(end.pages_of(reservation, ref.index))] for ref in refs]
    assert all(len(np.unique(chunk)) > 1 for chunk in chunks), "there is nothing to compare"
    markers = end.publish(reservation, gone=lambda: flood(end.engine.memory, seed=1))
    for ref, marker, chunk in zip(refs, markers, chunks, strict=True):
        with plain_client(store.data_urls[marker.instance]) as client:
            for shard in range(end.layout.kv_shards):
                value = client.get(chunk_key(end.engine.info.fingerprint, ref.hash, shard))
                assert isinstance(value, bytes)
                assert value[VALUE_HEADER_BYTES:] == heads_of(chunk, end.layout, shard)
    end.engine.release(reservation)
    return Source(chunks, said, {marker.instance for marker in markers})


def heads_of(pages: Pages, layout: KVLayout, shard: int) -> bytes:
    """`[block][layer][K,V][head of the shard][token][dim]` of whole pages."""
    each = layout.num_kv_heads // layout.kv_shards
    whole = pages.reshape(len(pages), layout.num_layers, 2, layout.num_kv_heads, -1)
    return whole[:, :, :, shard * each : (shard + 1) * each].tobytes()


def fetched(end: End, request: Request, source: Source, step: int) -> Reservation:
    """Fetch each `step`-th chunk of a prompt among noise, and compare the whole pool."""
    reservation = end.reserve(request)
    assert reservation.cached == 0
    markers = end.look_up(reservation)
    flood(end.engine.memory, seed=len(request.prompt_ids))
    expected = dump(end.engine.memory)
    chunks = range(0, len(source.chunks), step)
    for chunk in chunks:
        expected[list(end.pages_of(reservation, chunk))] = source.chunks[chunk]
    end.fetch(reservation, markers, chunks)
    assert_equal(dump(end.engine.memory), expected)
    return reservation


def assert_equal(pages: Pages, expected: Pages) -> None:
    wrong = np.flatnonzero((pages != expected).any(axis=1))
    assert wrong.tolist() == [], "these pages are not as they have to be"


def round_trip(shape: Shape, store: EmbeddedStore, build: Build) -> None:
    requests = requests_of(shape)
    with (
        End(store, "prefill", f"{shape} 1", build(BLOCKS)) as prefill,
        End(store, "decode", f"{shape} 1", build(BLOCKS)) as decode,
    ):
        sources = [published(prefill, request, store) for request in requests]
        for end in (prefill, decode):
            lies = end.engine.memory.views([BlockId(1)]) is not None
            assert lies == bool(shape.model and shape.shards == 1 and shape.device == "cpu")
        assert set[int]().union(*(source.servers for source in sources)) == {0, 1}
        for request, source in zip(requests, sources, strict=True):
            decode.engine.release(fetched(decode, request, source, step=2))
        places = {request.id: decode.reserve(request).blocks for request in requests[:2]}
    # What was published outlives both. The new ones' pages are others.
    for name, blocks in (("decode", BLOCKS + 7), ("prefill", BLOCKS - 30)):
        with End(store, name, f"{shape} 2", build(blocks)) as end:
            warm, _ = end.compute(request_of("warm", WARM))
            for request, source in zip(requests, sources, strict=True):
                reservation = fetched(end, request, source, step=1)
                assert reservation.blocks != places.get(request.id)
                end.engine.release(reservation)
            end.engine.release(warm)
            end.engine.check_integrity()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_page_arrives_as_it_was_and_no_other_is_touched(
    shape: Shape, store: EmbeddedStore, tiny_model: Callable[[str], Path]
) -> None:
    round_trip(shape, store, builder(shape, tiny_model))


@pytest.mark.parametrize("shape", ON_CUDA)
def test_every_page_arrives_as_it_was_on_a_gpu(
    shape: Shape, store: EmbeddedStore, tiny_model: Callable[[str], Path]
) -> None:
    round_trip(shape, store, builder(shape, tiny_model))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("model", ["llama-gqa1", ""])
def test_pages_that_are_there_already_are_left_out_of_a_fetch(
    model: str, shards: int, store: EmbeddedStore, tiny_model: Callable[[str], Path]
) -> None:
    """Of a chunk whose leading blocks are cached only the others are written."""
    shape = Shape(model, 4, "float32", shards)
    build = builder(shape, tiny_model)
    request = request_of("part", CHUNK)
    with End(store, "prefill", "part 1", build(BLOCKS)) as prefill:
        source = published(prefill, request, store)
    with End(store, "decode", "part 1", build(BLOCKS)) as decode:
        reservation = decode.reserve(request)
        markers = decode.look_up(reservation)
        flood(decode.engine.memory, seed=3)
        expected = dump(decode.engine.memory)
        last = reservation.blocks[CHUNK_BLOCKS - 1]
        expected[last] = source.chunks[0][-1]
        places = [*[PADDING] * (CHUNK_BLOCKS - 1), last]
        decode.fetch(reservation, markers, [0], into=lambda chunk: places)
        assert_equal(dump(decode.engine.memory), expected)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_node_that_fetched_goes_on_as_the_one_that_computed(
    shards: int, store: EmbeddedStore
) -> None:
    """On the simulated engine, whose next token depends on every byte; with a hole, too."""
    build = builder(Shape("", 4, "float32", shards), lambda name: Path())
    request = request_of("goes on", 3 * CHUNK + 5)
    with End(store, "prefill", "goes on 1", build(BLOCKS)) as prefill:
        source = published(prefill, request, store)
    for chunks in ([0, 1, 2], [0, 2], [1], []):
        with End(store, "decode", f"goes on {chunks}", build(BLOCKS)) as decode:
            reservation = decode.reserve(request)
            flood(decode.engine.memory, seed=4)
            decode.fetch(reservation, decode.look_up(reservation), chunks)
            landed = [(chunk * CHUNK_BLOCKS, (chunk + 1) * CHUNK_BLOCKS) for chunk in chunks]
            decode.engine.submit(request, reservation=reservation, landed=landed)
            assert decode.run() == source.said

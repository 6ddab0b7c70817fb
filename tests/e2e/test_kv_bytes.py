"""KV bytes from a prefill node through Redis to a decode node: every page arrives unchanged, and no
other byte changes.

The tests use the memory of real engines (tiny models on torch, and the simulated engine), a real
index and two real data servers. Torch pages on a CPU without head shards are sent and received in
place. All others go through staging buffers. One node computes prompts of odd lengths and publishes
them, and another fetches every second chunk. Then both end, and two nodes with new epochs, other
pool sizes and other blocks in use fetch all chunks. After each fetch, the whole pool must have the
source's bytes in the fetched pages and unchanged noise in all other pages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import PADDING, Reservation
from baton_engine.kv.eight_bits import encoded
from baton_engine.kv.kv_pool import TORCH_DTYPES
from baton_engine.sim.build import SimSettings, build_sim
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.keys import chunk_key
from baton_protocol.ids import BlockId
from baton_protocol.layout import VALUE_HEADER_BYTES, KVField, KVLayout, StoreCodec
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from tests.support.engines.torch_engines import make_request, small_engine
from tests.support.nodes.node_ends import NodeEnd, Pages, dump, flood
from tests.support.stores.kvstore import plain_client

BLOCK, CHUNK_BLOCKS = 16, 3
CHUNK = BLOCK * CHUNK_BLOCKS
# In tokens: around one chunk, one less than two chunks, three chunks and a tail, and a long prompt
# with an odd tail.
LENGTHS = (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 3 * CHUNK + 5, 601)
WARM = 5 * BLOCK + 3  # length of a request that occupies other blocks first
BLOCKS = 150
FIRST_ID, END_ID = 32, 127  # ids that are in both engines' vocabularies
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
Build = Callable[[int], EngineCore]  # number of blocks -> engine


@dataclass(frozen=True)
class Shape:
    """One engine and KV layout. `model` "" is the simulated engine. `heads` is its number of KV
    heads. `chunk_blocks` is in multiples of a block's tokens."""

    model: str
    heads: int
    dtype: str
    shards: int
    device: str = "cpu"
    chunk_blocks: int = CHUNK_BLOCKS
    kept: str = "auto"  # --kv-cache-dtype
    codec: StoreCodec = "none"

    def __str__(self) -> str:
        kept = "" if self.kept == "auto" else f"-{self.kept}"
        codec = "" if self.codec == "none" else f"-{self.codec} in the store"
        return f"{self.model or 'sim'}-{self.dtype}-{self.shards}-{self.device}{kept}{codec}"


# (model, KV heads). The torch models with K and V have 1, 2, 4 and 2 query heads per KV head, and
# head_dim 16, 16, 24 and 32. One keeps a latent row instead, the layers of one keep heads of two
# sizes, 16 and 32, and the last is computed by transformers' code, with values shorter than keys.
MODELS = (
    *(("llama-gqa1", 4), ("llama-gqa2-tied", 2), ("llama-gqa4", 1), ("qwen3-gqa2", 2), ("", 4)),
    *(("deepseek-v2-groups", 1), ("gemma4-shared", 2), ("minicpm3", 4)),
)
# Windows in all layers and in some, here with the sinks of gpt-oss. Of their early chunks a node
# stores a part or nothing.
WINDOWED = (("mistral-window", 2), ("gpt-oss", 2))
SHAPES = [
    Shape(model, heads, dtype, shards)
    for model, heads in MODELS
    for dtype in ("float32", "bfloat16")
    for shards in (1, 2)
    if heads % shards == 0
]
# Chunks of one block, so that a window never begins within a chunk.
WINDOW_SHAPES = [
    Shape(model, heads, dtype, shards, chunk_blocks=1)
    for model, heads in WINDOWED
    for dtype in ("float32", "bfloat16")
    for shards in (1, 2)
]
# Codes of 8 bits with their exponents.
CODE_SHAPES = [
    Shape("llama-gqa2-tied", 2, "bfloat16", 2, kept="int8"),
    Shape("qwen3-gqa2", 2, "float32", 1, kept="fp8"),
    Shape("deepseek-v2-groups", 1, "bfloat16", 1, kept="int8"),
    Shape("mistral-window", 2, "bfloat16", 2, chunk_blocks=1, kept="int8"),
    Shape("gemma4-shared", 2, "float32", 2, kept="int8"),
]
# Encoded in the store: by kernels and by torch's operators, for heads of 24 numbers.
CODEC_SHAPES = [
    Shape(model, heads, dtype, shards, codec="int8")
    for model, heads in MODELS
    for dtype in ("float32", "bfloat16")
    for shards in (1, 2)
    if model and heads % shards == 0
] + [replace(shape, codec="int8") for shape in WINDOW_SHAPES]
# What `make test` runs: each model, and each dtype with each number of shards. The rows of models
# that transformers' code computes take longest.
QUICK = (
    Shape("llama-gqa1", 4, "bfloat16", 2),
    Shape("llama-gqa2-tied", 2, "float32", 2),
    Shape("llama-gqa4", 1, "bfloat16", 1),
    Shape("qwen3-gqa2", 2, "float32", 1),
    Shape("", 4, "bfloat16", 2),
    Shape("deepseek-v2-groups", 1, "float32", 1),
    Shape("gemma4-shared", 2, "float32", 2),
    Shape("minicpm3", 4, "bfloat16", 1),
    Shape("gpt-oss", 2, "float32", 1, chunk_blocks=1),
    Shape("llama-gqa2-tied", 2, "bfloat16", 2, kept="int8"),
    Shape("qwen3-gqa2", 2, "bfloat16", 2, codec="int8"),
)
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
ON_CUDA += [
    pytest.param(
        Shape("llama-gqa1", 4, dtype, shards, "cuda", codec="int8"),
        id=f"{dtype}-{shards}-int8",
        marks=ON_CUDA[0].marks,
    )
    for dtype, shards in (("float32", 1), ("bfloat16", 2))
]


def test_the_quick_shapes_have_each_model_and_each_dtype_with_each_number_of_shards() -> None:
    assert {shape.model for shape in QUICK} >= {model for model, _ in MODELS}
    plain = [shape for shape in QUICK if shape in SHAPES]
    assert {(shape.dtype, shape.shards) for shape in plain} == {
        (shape.dtype, shape.shards) for shape in SHAPES
    }


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
            chunk_blocks=shape.chunk_blocks,
            kv_shards=shape.shards,
            kv_cache_dtype=shape.kept,
            store_codec=shape.codec,
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
    """A request whose ids depend only on its name and length."""
    rng = random.Random(f"{name}/{length}")
    ids = [rng.randrange(FIRST_ID, END_ID) for _ in range(length)]
    return make_request(f"{name}-{length}", ids, GREEDY)


def requests_of(shape: Shape) -> list[Request]:
    """Requests of all lengths. Of a prompt of whole blocks, the last block's windows are left when
    it has run."""
    windowed = shape.chunk_blocks == 1
    lengths = (length for length in LENGTHS if not windowed or length % BLOCK)
    return [request_of(str(shape), length) for length in lengths]


@dataclass
class Source:
    """The pages of a prompt's chunks on the node that computed it, the generated ids, and the data
    servers that hold the chunks."""

    chunks: list[Pages]
    output: list[int]
    servers: set[int]


def publish(end: NodeEnd, request: Request, store: EmbeddedStore) -> Source:
    """Compute and publish a prompt, overwrite the source's memory as soon as that is allowed, and
    check the data servers' values: for each shard, its heads of each page."""
    reservation, output = end.compute(request)
    before = dump(end.engine.memory)
    refs = end.refs(reservation)
    chunks = [before[list(end.pages_of(reservation, ref.index))] for ref in refs]
    assert all(len(np.unique(chunk)) > 1 for chunk in chunks), (
        "a chunk with one value only proves nothing"
    )
    markers = end.publish(reservation, on_copied=lambda: flood(end.engine.memory, seed=1))
    for ref, marker, chunk in zip(refs, markers, chunks, strict=True):
        with plain_client(store.data_urls[marker.instance]) as client:
            for shard in range(end.layout.kv_shards):
                value = client.get(chunk_key(end.engine.info.fingerprint, ref.hash, shard))
                assert isinstance(value, bytes)
                assert value[VALUE_HEADER_BYTES:] == heads_of(chunk, end.layout, shard)
    end.engine.release(reservation)
    return Source(chunks, output, {marker.instance for marker in markers})


def heads_of(pages: Pages, layout: KVLayout, shard: int) -> bytes:
    """The bytes `[block][layer][field][head of the shard][token][number]` of a chunk, cut from its
    whole pages, in which each field is one piece of its layer's bytes. Bytes after the last layer
    are divided among the shards. With a codec each piece becomes its codes and their exponents, and
    the end of a block is zero."""
    cut = []
    for place, page in enumerate(pages):
        group, begin = place // layout.chunk_blocks, 0
        fields, stored = layout.group_fields[group], []
        for _ in range(layout.layer_slots(group)):
            for field in fields:
                size = layout.block_size * field.token_bytes // layout.kv_shards
                piece = page[begin + shard * size : begin + (shard + 1) * size]
                stored.append(piece.tobytes() if layout.codec == "none" else codes_of(piece, field))
                begin += size * layout.kv_shards
        unused = (len(page) - begin) // layout.kv_shards
        if layout.codec == "none":
            stored.append(page[begin + shard * unused :][:unused].tobytes())
        cut.append(b"".join(stored).ljust(layout.stored_block_bytes // layout.kv_shards, b"\0"))
    return b"".join(cut)


def codes_of(piece: Pages, field: KVField) -> bytes:
    rows = torch.from_numpy(piece.copy()).view(TORCH_DTYPES[field.dtype]).view(-1, field.size)
    return b"".join(part.numpy().tobytes() for part in encoded(rows, torch.int8))


def fetch_and_compare(end: NodeEnd, request: Request, source: Source, step: int) -> Reservation:
    """Fetch every `step`-th chunk of a prompt into a pool full of noise, and compare the whole
    pool."""
    reservation = end.reserve(request)
    assert reservation.cached == 0
    markers = end.look_up(reservation)
    flood(end.engine.memory, seed=len(request.prompt_ids))
    expected = dump(end.engine.memory)
    refs, places = end.refs(reservation), range(0, len(source.chunks), step)
    for at in places:
        expected[list(end.pages_of(reservation, refs[at].index))] = source.chunks[at]
    end.fetch(reservation, markers, places)
    assert_equal(dump(end.engine.memory), expected)
    return reservation


def assert_equal(pages: Pages, expected: Pages) -> None:
    wrong = np.flatnonzero((pages != expected).any(axis=1))
    assert wrong.tolist() == [], "these pages have wrong bytes"


def round_trip(shape: Shape, store: EmbeddedStore, build: Build) -> None:
    requests = requests_of(shape)
    with (
        NodeEnd(store, "prefill", f"{shape} 1", build(BLOCKS)) as prefill,
        NodeEnd(store, "decode", f"{shape} 1", build(BLOCKS)) as decode,
    ):
        sources = [publish(prefill, request, store) for request in requests]
        for end in (prefill, decode):
            in_place = end.engine.stored.views([BlockId(1)]) is not None
            plain = shape.model and shape.codec == "none"
            assert in_place == bool(plain and shape.shards == 1 and shape.device == "cpu")
        assert set[int]().union(*(source.servers for source in sources)) == {0, 1}
        for request, source in zip(requests, sources, strict=True):
            decode.engine.release(fetch_and_compare(decode, request, source, step=2))
        old_blocks = {request.id: decode.reserve(request).blocks for request in requests[:2]}
    # The chunks outlive both nodes. The new nodes have other blocks for them.
    for name, blocks in (("decode", BLOCKS + 7), ("prefill", BLOCKS - 30)):
        with NodeEnd(store, name, f"{shape} 2", build(blocks)) as end:
            warm, _ = end.compute(request_of("warm", WARM))
            for request, source in zip(requests, sources, strict=True):
                reservation = fetch_and_compare(end, request, source, step=1)
                assert reservation.blocks != old_blocks.get(request.id)
                end.engine.release(reservation)
            end.engine.release(warm)
            end.engine.check_integrity()


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=str(shape), marks=[] if shape in QUICK else [pytest.mark.long])
        for shape in (*SHAPES, *WINDOW_SHAPES, *CODE_SHAPES, *CODEC_SHAPES)
    ],
)
def test_every_page_arrives_unchanged_and_no_other_page_changes(
    shape: Shape, store: EmbeddedStore, tiny_model: Callable[[str], Path]
) -> None:
    round_trip(shape, store, builder(shape, tiny_model))


@pytest.mark.parametrize("shape", ON_CUDA)
def test_every_page_arrives_unchanged_on_a_gpu(
    shape: Shape, store: EmbeddedStore, tiny_model: Callable[[str], Path]
) -> None:
    round_trip(shape, store, builder(shape, tiny_model))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("model", ["llama-gqa1", ""])
def test_a_fetch_does_not_write_blocks_that_are_already_cached(
    model: str, shards: int, store: EmbeddedStore, tiny_model: Callable[[str], Path]
) -> None:
    """The leading blocks of the chunk are cached, so the fetch writes only the last block."""
    shape = Shape(model, 4, "float32", shards)
    build = builder(shape, tiny_model)
    request = request_of("part", CHUNK)
    with NodeEnd(store, "prefill", "part 1", build(BLOCKS)) as prefill:
        source = publish(prefill, request, store)
    with NodeEnd(store, "decode", "part 1", build(BLOCKS)) as decode:
        reservation = decode.reserve(request)
        markers = decode.look_up(reservation)
        flood(decode.engine.memory, seed=3)
        expected = dump(decode.engine.memory)
        last = reservation.blocks[CHUNK_BLOCKS - 1]
        expected[last] = source.chunks[0][-1]
        targets = [*[PADDING] * (CHUNK_BLOCKS - 1), last]
        decode.fetch(reservation, markers, [0], into=lambda chunk: targets)
        assert_equal(dump(decode.engine.memory), expected)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_node_with_fetched_chunks_generates_the_same_ids_as_the_source(
    shards: int, store: EmbeddedStore
) -> None:
    """The simulated engine's ids depend on every byte. Some cases have holes between the chunks."""
    build = builder(Shape("", 4, "float32", shards), lambda name: Path())
    request = request_of("continues", 3 * CHUNK + 5)
    with NodeEnd(store, "prefill", "continues 1", build(BLOCKS)) as prefill:
        source = publish(prefill, request, store)
    for chunks in ([0, 1, 2], [0, 2], [1], []):
        with NodeEnd(store, "decode", f"continues {chunks}", build(BLOCKS)) as decode:
            reservation = decode.reserve(request)
            flood(decode.engine.memory, seed=4)
            decode.fetch(reservation, decode.look_up(reservation), chunks)
            landed = [(chunk * CHUNK_BLOCKS, (chunk + 1) * CHUNK_BLOCKS) for chunk in chunks]
            decode.engine.submit(request, reservation=reservation, landed=landed)
            assert decode.run() == source.output

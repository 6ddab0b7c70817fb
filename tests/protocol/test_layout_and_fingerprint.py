"""The sizes that KVLayout computes, and the fields that a fingerprint depends on."""

from collections.abc import Sequence

import msgspec
import pytest

from baton_protocol.fingerprint import TensorDigest, fingerprint
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVField, KVGroup, KVLayout, in_codes, keys_and_values

SMOLLM = KVLayout(
    num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16", chunk_blocks=3
)
GROUPED = KVLayout(
    num_layers=6,
    num_kv_heads=1,
    head_dim=4,
    block_size=16,
    dtype="bfloat16",
    chunk_blocks=2,
    groups=(KVGroup((1, 5)), KVGroup((3,)), KVGroup((0, 2, 4), 64)),
)
LATENT_ROWS = KVLayout.of_fields(
    (KVField("latent", 1, 576, "bfloat16"),), num_layers=27, block_size=16, chunk_blocks=1
)
# K and V of other sizes in 8 bits, and a float32 scale per head of each.
SCALED = KVLayout.of_fields(
    (
        KVField("k", 4, 192, "uint8"),
        KVField("v", 4, 128, "uint8"),
        KVField("k_scale", 4, 1, "float32"),
        KVField("v_scale", 4, 1, "float32"),
    ),
    num_layers=2,
    block_size=16,
    chunk_blocks=2,
    kv_shards=4,
)
# Layers with other fields than the rest, and a window; blocks of both groups have 3,072 bytes.
MIXED = KVLayout(
    num_layers=3,
    num_kv_heads=2,
    head_dim=16,
    block_size=16,
    dtype="bfloat16",
    chunk_blocks=2,
    kv_shards=2,
    groups=(
        KVGroup((1,), fields=keys_and_values(2, 24, "bfloat16")),
        KVGroup((0,), 64),
        KVGroup((2,), 64),
    ),
)
TENSORS = [
    TensorDigest("a.weight", (2, 3), "bfloat16", "00"),
    TensorDigest("b.weight", (3,), "bfloat16", "11"),
]


def test_a_layout_computes_the_sizes_of_the_demo_model() -> None:
    assert SMOLLM.token_bytes == 23_040
    assert SMOLLM.block_bytes == 368_640
    assert SMOLLM.chunk_bytes == 1_105_920
    assert SMOLLM.chunk_tokens == 48


@pytest.mark.parametrize(
    ("layout", "token", "block", "shard"),
    [
        (LATENT_ROWS, 27 * 576 * 2, 27 * 576 * 2 * 16, 27 * 576 * 2 * 16),
        (SCALED, 2 * 4 * (192 + 128 + 8), 2 * 4 * 328 * 16, 2 * 328 * 32),
        (MIXED, 3 * 2 * 2 * 24 * 2, 2 * 2 * 24 * 2 * 16, 3 * 2 * 24 * 2 * 32),
    ],
)
def test_bytes_are_counted_from_the_fields_of_a_layer(
    layout: KVLayout, token: int, block: int, shard: int
) -> None:
    assert (layout.token_bytes, layout.block_bytes, layout.shard_bytes) == (token, block, shard)


def test_a_block_has_the_size_of_the_largest_group() -> None:
    groups = range(MIXED.num_groups)
    assert [MIXED.layer_bytes(group) for group in groups] == [3072, 2048, 2048]
    assert [MIXED.layer_slots(group) for group in groups] == [1, 1, 1]
    assert MIXED.block_bytes == 3072
    assert MIXED.divisions == (0, 1, 1)
    assert GROUPED.divisions == (0, 0, 0)


@pytest.mark.parametrize(
    ("layout", "encoded", "expected"),
    [
        (
            GROUPED,
            '{"num_layers":6,"num_kv_heads":1,"head_dim":4,"block_size":16,"dtype":"bfloat16",'
            '"chunk_blocks":2,"kv_shards":1,"codec":"none","version":1,"groups":['
            '{"layers":[1,5],"window":null},{"layers":[3],"window":null},'
            '{"layers":[0,2,4],"window":64}],"fields":[]}',
            "d950e6f44df77ca9d503e0b2e32f4785",
        ),
        (
            LATENT_ROWS,
            '{"num_layers":27,"num_kv_heads":1,"head_dim":576,"block_size":16,"dtype":"bfloat16",'
            '"chunk_blocks":1,"kv_shards":1,"codec":"none","version":1,"groups":[],"fields":['
            '{"name":"latent","heads":1,"size":576,"dtype":"bfloat16"}]}',
            "73a33da167ccede9cab256295aeec680",
        ),
    ],
)
def test_a_layout_and_its_fingerprint_stay_as_they_were(
    layout: KVLayout, encoded: str, expected: str
) -> None:
    """Nodes of several versions exchange KV, and stores outlive nodes."""
    assert msgspec.json.encode(layout).decode() == encoded
    assert fingerprint(TENSORS, layout, "r") == expected


@pytest.mark.parametrize("layout", [SMOLLM, GROUPED, SCALED, MIXED])
def test_a_layout_survives_its_encoding(layout: KVLayout) -> None:
    encoded = msgspec.msgpack.encode(layout)
    assert msgspec.msgpack.decode(encoded, type=KVLayout) == layout


def test_a_layout_in_another_dtype_has_all_fields_in_it() -> None:
    wide = MIXED.in_dtype("float32")
    assert wide.block_bytes == 2 * MIXED.block_bytes
    assert {field.dtype for fields in wide.group_fields for field in fields} == {"float32"}
    assert wide.in_dtype("bfloat16") == MIXED


def test_a_layout_in_codes_has_an_exponent_for_each_row() -> None:
    for layout in (SMOLLM, MIXED):
        expected = tuple(in_codes(fields, "int8") for fields in layout.group_fields)
        assert layout.in_dtype("int8").group_fields == expected
    assert SMOLLM.in_dtype("int8").token_bytes == 30 * 2 * 3 * (64 + 1)


def test_k_and_v_of_one_shape_need_no_list_of_fields() -> None:
    """So nodes with such models have the same layout as before there were fields."""
    fields = keys_and_values(3, 64, "bfloat16")
    same = KVLayout.of_fields(fields, num_layers=30, block_size=16, chunk_blocks=3)
    assert same == SMOLLM
    assert same.kv_fields == fields


@pytest.mark.parametrize(
    ("layout", "shards", "field"),
    [
        (SMOLLM, 1, None),
        (SMOLLM, 3, None),
        (SMOLLM, 2, "k"),
        (SMOLLM, 0, "k"),
        (SCALED, 4, None),
        (SCALED, 8, "k"),
        (LATENT_ROWS, 1, None),
        (LATENT_ROWS, 2, "latent"),
        (MIXED, 2, None),
        (msgspec.structs.replace(MIXED, num_kv_heads=4), 4, "k"),
    ],
)
def test_head_shards_divide_the_heads_of_each_field(
    layout: KVLayout, shards: int, field: str | None
) -> None:
    undivided = msgspec.structs.replace(layout, kv_shards=shards).undivided
    assert (undivided and undivided.name) == field


def test_a_fingerprint_does_not_depend_on_the_order_of_tensors() -> None:
    assert fingerprint(TENSORS, SMOLLM, "r") == fingerprint(reversed(TENSORS), SMOLLM, "r")
    assert len(fingerprint(TENSORS, SMOLLM, "r")) == 32


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"block_size": 32},
        {"chunk_blocks": 1},
        {"kv_shards": 2},
        {"codec": "int8"},
        {"version": 2},
        {"num_layers": 31},
        {"groups": (KVGroup(tuple(range(30)), 64),)},
        {"groups": (KVGroup(tuple(range(30)), fields=keys_and_values(3, 32, "bfloat16")),)},
        {"fields": (KVField("k", 3, 64, "bfloat16"), KVField("v", 3, 32, "bfloat16"))},
        {"fields": (KVField("k", 3, 64, "uint8"), KVField("v", 3, 64, "bfloat16"))},
    ],
)
def test_a_fingerprint_depends_on_every_field_of_the_layout(changes: dict[str, object]) -> None:
    other = msgspec.structs.replace(SMOLLM, **changes)
    assert fingerprint(TENSORS, other, "r") != fingerprint(TENSORS, SMOLLM, "r")


def test_a_fingerprint_depends_on_rope_and_on_each_field_of_a_tensor() -> None:
    base = fingerprint(TENSORS, SMOLLM, "r")
    one = TENSORS[0]
    others = [
        msgspec.structs.replace(one, name="c.weight"),
        msgspec.structs.replace(one, shape=(3, 2)),
        msgspec.structs.replace(one, dtype="float32"),
        msgspec.structs.replace(one, digest="22"),
    ]
    seen = {fingerprint([other, TENSORS[1]], SMOLLM, "r") for other in others}
    assert base not in seen
    assert len(seen) == 4
    assert fingerprint(TENSORS, SMOLLM, "other rope") != base


@pytest.mark.parametrize(
    ("layout", "blocks", "index", "expected"),
    [
        (SMOLLM, range(1, 9), 1, (4, 5, 6)),
        (SMOLLM, range(1, 9), 2, (7, 8)),
        (GROUPED, [1, 2, 0, 3, 4, 0, 5, 6, 7, 8, 9, 10], 0, (1, 3, 2, 4, 0, 0)),
        (GROUPED, [1, 2, 0, 3, 4, 0, 5, 6, 7, 8, 9, 10], 1, (5, 8, 6, 9, 7, 10)),
        (GROUPED, [1, 2, 0, 3, 4, 0, 5, 6, 7], 1, (5, 6, 7)),
    ],
)
def test_a_chunk_lists_the_blocks_of_one_group_after_the_other(
    layout: KVLayout, blocks: Sequence[BlockId], index: int, expected: tuple[int, ...]
) -> None:
    assert layout.chunk_of(blocks, index) == expected


@pytest.mark.parametrize(
    ("chunks", "window", "expected"),
    [
        (0, 64, 0),
        (1, 64, 0),
        (2, 64, 0),
        (3, 64, 1),  # chunks of 32 tokens: [32, 96) are the last 64 of 96
        (10, 64, 8),
        (10, 65, 7),
        (10, 63, 8),
        (10, 1, 9),
        (10, 5000, 0),
        (10, None, 0),
    ],
)
def test_only_chunks_that_reach_into_the_last_window_must_have_all_groups(
    chunks: int, window: int | None, expected: int
) -> None:
    groups = (KVGroup((1, 3, 5)), KVGroup((0, 2, 4), window))
    layout = msgspec.structs.replace(GROUPED, groups=groups)
    assert layout.first_complete(chunks) == expected


def test_a_chunk_without_the_groups_with_a_window_is_a_part_of_a_chunk() -> None:
    assert (GROUPED.chunk_bytes, GROUPED.full_groups_bytes) == (4608, 3072)
    assert SMOLLM.full_groups_bytes == SMOLLM.chunk_bytes
    windows = msgspec.structs.replace(GROUPED, groups=(KVGroup(tuple(range(6)), 64),))
    assert windows.full_groups_bytes == 0

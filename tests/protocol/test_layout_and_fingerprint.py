"""The sizes that KVLayout computes, and the fields that a fingerprint depends on."""

import msgspec
import pytest

from baton_protocol.fingerprint import TensorDigest, fingerprint
from baton_protocol.layout import KVLayout

SMOLLM = KVLayout(
    num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16", chunk_blocks=3
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

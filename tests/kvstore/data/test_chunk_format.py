"""A value either matches its expected header and checksum, or is a miss with a reason."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_kvstore.data.chunk_format import (
    HEADER_BYTES,
    ChunkSpec,
    chunk_spec,
    epoch_digest,
    fingerprint_digest,
    seal,
    verify,
)
from baton_protocol.ids import BlockHash, Epoch, Fingerprint
from tests.support.stores.kvstore import EPOCH, FINGERPRINT, LAYOUT, chunk_name, payload_of

SPEC = ChunkSpec(
    version=1,
    fingerprint=fingerprint_digest(FINGERPRINT),
    hash=chunk_name(1),
    shard=0,
    tokens=16,
    payload_bytes=300,
)


def sealed(spec: ChunkSpec, payload: bytes) -> bytearray:
    value = bytearray(HEADER_BYTES) + bytearray(payload)
    seal([memoryview(value)], spec, epoch_digest(EPOCH))
    return value


def test_a_sealed_value_verifies_and_its_payload_is_unchanged() -> None:
    payload = bytes(range(256)) + bytes(44)
    value = sealed(SPEC, payload)
    assert verify([memoryview(value)], SPEC) == ""
    assert value[HEADER_BYTES:] == payload


def test_chunk_spec_describes_a_full_chunk_by_default() -> None:
    spec = chunk_spec(LAYOUT, fingerprint_digest(FINGERPRINT), chunk_name(3))
    assert (spec.tokens, spec.payload_bytes) == (LAYOUT.chunk_tokens, LAYOUT.chunk_bytes)
    assert verify([memoryview(sealed(spec, payload_of(chunk_name(3))))], spec) == ""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 2}, "layout version 1, expected 2"),
        ({"fingerprint": fingerprint_digest(Fingerprint("other"))}, "fingerprint"),
        ({"hash": chunk_name(2)}, "chunk hash"),
        ({"shard": 1}, "shard 0, expected 1"),
        ({"tokens": 15}, "tokens 16, expected 15"),
        ({"payload_bytes": 299}, "396 bytes, expected 395"),
    ],
)
def test_a_value_of_another_spec_is_corrupt_and_the_reason_names_the_field(
    change: dict[str, object], expected: str
) -> None:
    requested = dataclasses.replace(SPEC, **change)  # type: ignore[arg-type]
    reason = verify([memoryview(sealed(SPEC, bytes(300)))], requested)
    assert reason.startswith("corrupt: ")
    assert expected in reason


def test_each_shard_of_a_chunk_is_a_separate_value() -> None:
    layout = msgspec.structs.replace(LAYOUT, kv_shards=2)
    first, second = (
        chunk_spec(layout, fingerprint_digest(FINGERPRINT), chunk_name(3), shard=shard)
        for shard in (0, 1)
    )
    assert first.payload_bytes == second.payload_bytes == layout.chunk_bytes // 2
    value = sealed(second, bytes(second.payload_bytes))
    assert verify([memoryview(value)], second) == ""
    assert verify([memoryview(value)], first) == "corrupt: shard 1, expected 0"


def test_a_wrong_payload_size_in_the_header_is_corrupt() -> None:
    value = sealed(SPEC, bytes(300))
    value[16] ^= 1
    assert verify([memoryview(value)], SPEC) == "corrupt: payload bytes 301, expected 300"


def test_a_foreign_magic_is_corrupt() -> None:
    value = sealed(SPEC, bytes(300))
    value[:4] = b"HELO"
    assert "magic" in verify([memoryview(value)], SPEC)


@given(position=st.integers(0, HEADER_BYTES + 299), bit=st.integers(0, 7))
def test_any_flipped_bit_is_detected(position: int, bit: int) -> None:
    value = sealed(SPEC, bytes(300))
    value[position] ^= 1 << bit
    assert verify([memoryview(value)], SPEC).startswith("corrupt: ")


@given(length=st.integers(0, HEADER_BYTES + 299))
def test_any_truncation_is_detected(length: int) -> None:
    value = sealed(SPEC, bytes(300))
    assert verify([memoryview(value)[:length]], SPEC).startswith("corrupt: ")


def test_the_header_records_the_writer_and_readers_ignore_it() -> None:
    value = bytearray(HEADER_BYTES + 300)
    seal([memoryview(value)], SPEC, epoch_digest(Epoch("another start")))
    assert verify([memoryview(value)], SPEC) == ""
    assert value != sealed(SPEC, bytes(300))


def test_sealing_a_payload_of_the_wrong_size_raises_value_error() -> None:
    with pytest.raises(ValueError, match="payload of 300"):
        seal([memoryview(bytearray(HEADER_BYTES + 299))], SPEC, epoch_digest(EPOCH))


def test_a_hash_of_another_length_never_verifies() -> None:
    short = dataclasses.replace(SPEC, hash=BlockHash(b"short"))
    assert "chunk hash" in verify([memoryview(sealed(SPEC, bytes(300)))], short)

"""The format of a stored value (one head shard of a chunk): a fixed header, then the payload.

    offset  0  magic "BTKV"              4
            4  layout version            u16
            6  shard                     u16
            8  tokens                    u32
           12  reserved, 0               u32
           16  payload bytes             u64
           24  fingerprint digest       16
           40  chunk hash               16
           56  writer epoch digest       8
           64  reserved, 0              16
           80  xxh3-128 of [0:80) and the payload  16
           96  payload

All numbers are little-endian. A header of 96 bytes keeps the payload on a 32-byte boundary of its
buffer. Fingerprint and epoch are text of any length, so the header holds the first 16 and 8 bytes
of their SHA-256. The checksum covers the header, so a value under a wrong key never verifies.

The payload of a chunk is `[group][block]`, so the blocks of the groups without a window (see
KVLayout) come first. A value holds the blocks of all groups, or only that first part: its marker
says how many bytes. Nothing else depends on the groups.

Functions take a value as a list of memory pieces, in order. The first piece holds the header and
may also hold payload.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from baton_protocol.ids import BlockHash, Epoch, Fingerprint
from baton_protocol.layout import VALUE_HEADER_BYTES, KVLayout

MAGIC = b"BTKV"
HEADER_BYTES = VALUE_HEADER_BYTES
_FIELDS = struct.Struct("<4sHHIIQ16s16s8s")
_SUMMED = HEADER_BYTES - 16
_SUM = slice(_SUMMED, HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """The header's fields except writer and checksum: what a reader expects and a writer writes.
    `fingerprint` is the `fingerprint_digest()` of the model's fingerprint."""

    version: int
    fingerprint: bytes
    hash: BlockHash
    shard: int
    tokens: int
    payload_bytes: int


def fingerprint_digest(fingerprint: Fingerprint) -> bytes:
    """Return the 16 bytes that represent a fingerprint in headers."""
    return hashlib.sha256(fingerprint.encode()).digest()[:16]


def epoch_digest(epoch: Epoch) -> bytes:
    """Return the 8 bytes that represent the writer's epoch in headers."""
    return hashlib.sha256(epoch.encode()).digest()[:8]


def chunk_spec(
    layout: KVLayout,
    fingerprint: bytes,
    chunk: BlockHash,
    tokens: int | None = None,
    shard: int = 0,
    payload_bytes: int | None = None,
) -> ChunkSpec:
    """Return the spec of one shard of a chunk. `fingerprint` is a digest; `tokens` None means a
    full chunk, `payload_bytes` (of the shard) None one with the blocks of all groups."""
    return ChunkSpec(
        version=layout.version,
        fingerprint=fingerprint,
        hash=chunk,
        shard=shard,
        tokens=layout.chunk_tokens if tokens is None else tokens,
        payload_bytes=layout.shard_bytes if payload_bytes is None else payload_bytes,
    )


def _checksum(value: Sequence[memoryview]) -> bytes:
    digest = xxhash.xxh3_128(value[0][:_SUMMED])
    digest.update(value[0][HEADER_BYTES:])
    for piece in value[1:]:
        digest.update(piece)
    return digest.digest()


def seal(value: Sequence[memoryview], spec: ChunkSpec, writer: bytes) -> None:
    """Write the header of a value whose payload is already in place.

    `writer` is the `epoch_digest()` of the writing node. Raise ValueError if `value` is not exactly
    as large as header and payload.
    """
    size = sum(map(len, value))
    if size != HEADER_BYTES + spec.payload_bytes:
        raise ValueError(f"{size} bytes for a payload of {spec.payload_bytes}")
    header = value[0][:HEADER_BYTES]
    header[:] = bytes(HEADER_BYTES)
    _FIELDS.pack_into(
        header,
        0,
        MAGIC,
        spec.version,
        spec.shard,
        spec.tokens,
        0,
        spec.payload_bytes,
        spec.fingerprint,
        spec.hash,
        writer,
    )
    header[_SUM] = _checksum(value)


def verify(value: Sequence[memoryview], expected: ChunkSpec) -> str:
    """Return "" if `value` matches `expected` and its checksum, else the reason why not."""
    value_bytes, expected_bytes = sum(map(len, value)), HEADER_BYTES + expected.payload_bytes
    if value_bytes != expected_bytes:
        return f"corrupt: {value_bytes} bytes, expected {expected_bytes}"
    header = value[0][:HEADER_BYTES]
    magic, version, shard, tokens, _, size, fingerprint, chunk, _ = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        return f"corrupt: magic {magic!r}, expected {MAGIC!r}"
    for name, actual, required in (
        ("layout version", version, expected.version),
        ("fingerprint", fingerprint.hex(), expected.fingerprint.hex()),
        ("chunk hash", chunk.hex(), expected.hash.hex()),
        ("shard", shard, expected.shard),
        ("tokens", tokens, expected.tokens),
        ("payload bytes", size, expected.payload_bytes),
    ):
        if actual != required:
            return f"corrupt: {name} {actual}, expected {required}"
    if header[_SUM] != _checksum(value):
        return "corrupt: checksum does not match"
    return ""

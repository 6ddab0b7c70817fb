"""Fingerprint: two nodes of equal fingerprint may exchange KV; no others may.

It covers the weights by content (each tensor's name, shape, dtype and digest, never a path), the
KV layout (dtype, codec, version, block size, chunk_blocks, kv_shards) and rope.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from baton_protocol.ids import Fingerprint
from baton_protocol.layout import KVLayout


class TensorDigest(msgspec.Struct, frozen=True, order=True):
    """One tensor's identity. `digest` is a hex digest of its little-endian bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str


def fingerprint(tensors: Iterable[TensorDigest], layout: KVLayout, rope: str) -> Fingerprint:
    """Digest of all that makes KV interchangeable, as 32 hex characters.

    `rope` is a canonical text of the rotary settings (the engine's business what it says).
    The order of `tensors` does not matter.
    """
    canonical = msgspec.json.encode([sorted(tensors), layout, rope], order="sorted")
    return Fingerprint(hashlib.sha256(canonical).hexdigest()[:32])

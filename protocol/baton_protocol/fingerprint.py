"""Fingerprints: two nodes may exchange KV only if their fingerprints are equal.

A fingerprint covers the content of the weights (each tensor's name, shape, dtype and digest, never
a path), every field of the KV layout (geometry, dtype, codec, version, block size, chunk_blocks,
kv_shards) and the model's config.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from baton_protocol.ids import Fingerprint
from baton_protocol.layout import KVLayout


class TensorDigest(msgspec.Struct, frozen=True, order=True):
    """The identity of one tensor. `digest` is a hex digest of its little-endian bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str


def fingerprint(tensors: Iterable[TensorDigest], layout: KVLayout, model: str) -> Fingerprint:
    """Return the digest of everything that determines a token's KV, as 32 hex characters.

    `model` is a canonical text of the model's config: everything besides the weights that
    determines a token's KV. The engine provides it. The order of `tensors` does not matter.
    """
    canonical = msgspec.json.encode([sorted(tensors), layout, model], order="sorted")
    return Fingerprint(hashlib.sha256(canonical).hexdigest()[:32])

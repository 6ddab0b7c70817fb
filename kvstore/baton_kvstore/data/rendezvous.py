"""Rendezvous hashing: which data instance a chunk is put on."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from baton_protocol.ids import BlockHash


def rendezvous(chunk: BlockHash, labels: Sequence[str]) -> int:
    """Return the index of the instance with the highest digest of chunk and label.

    A new instance takes over 1/(N+1) of the chunks, evenly from the N others, and no other chunk
    moves.
    """
    weights = [xxhash.xxh3_64_intdigest(chunk + label.encode()) for label in labels]
    return max(range(len(weights)), key=weights.__getitem__)

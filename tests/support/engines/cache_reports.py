"""Tracks the cached chunks that a block pool reports, from its changes alone.

In: a pool, and the chunk hashes reported so far. Out: those reported now, checked against the pool.
"""

from __future__ import annotations

from baton_engine.kv.block_pool import BlockPool
from baton_protocol.ids import BlockHash


def follow(pool: BlockPool, reported: set[BlockHash]) -> set[BlockHash]:
    """Apply the pool's changes. Raise AssertionError if it reports a known chunk as stored or an
    unknown one as evicted, or if the result differs from its cached chunks."""
    changes = pool.take_changes()
    assert not set(changes.stored) & reported
    assert set(changes.evicted) <= reported
    reported = reported - set(changes.evicted) | set(changes.stored)
    assert reported == set(pool.cached_chunks())
    return reported

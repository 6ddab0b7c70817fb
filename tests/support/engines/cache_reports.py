"""What a block pool has reported of its cached chunks, kept up by its changes alone.

In: a pool, and the chunk hashes reported so far. Out: those reported now, checked against the pool.
"""

from __future__ import annotations

from baton_engine.kv.block_pool import BlockPool
from baton_protocol.ids import BlockHash


def follow(pool: BlockPool, reported: set[BlockHash]) -> set[BlockHash]:
    """Nothing is reported that is known, nothing is evicted that is not, and both sides agree."""
    changes = pool.take_changes()
    assert not set(changes.stored) & reported
    assert set(changes.evicted) <= reported
    reported = reported - set(changes.evicted) | set(changes.stored)
    assert reported == set(pool.cached_chunks())
    return reported

"""Pinned prefixes: cached blocks that are not evicted until they are unpinned.

In: names of pins, and hashes of blocks that are in the prefix cache. Out: references to these
blocks, so that they leave the free queue; PinRefused, with the figures.

Pins share the pool with requests. Together they keep at most a share of the blocks; blocks that
several pins have in common count once. A sequence that would not fit beside the pins even if it had
the rest of the pool for itself releases them, the oldest first, until it fits: so pins neither
lower the longest request that an engine accepts, nor can a request wait for them forever. Blocks of
a released pin stay in the cache until they are reused, like any others. There is no clock here: who
pins a prefix for some time unpins it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence, Set

from baton_engine.errors import PinRefused
from baton_engine.interface import PADDING
from baton_engine.kv.block_pool import BlockPool
from baton_protocol.ids import BlockHash, BlockId

logger = logging.getLogger(__name__)


class Pins:
    """The pinned prefixes of one pool, by name, the oldest first. `limit` is in blocks."""

    def __init__(self, pool: BlockPool, groups: int, share: float) -> None:
        self._pool = pool
        self._groups = groups
        self._share = share
        self.limit = int(pool.num_blocks * share)
        self._held: dict[str, Sequence[BlockId]] = {}
        self._references: Counter[BlockId] = Counter()

    @property
    def names(self) -> Collection[str]:
        return self._held.keys()

    @property
    def blocks(self) -> Set[BlockId]:
        """The blocks of all pins."""
        return self._references.keys()

    def references(self) -> Iterator[BlockId]:
        """The blocks of each pin: one reference each."""
        for blocks in self._held.values():
            yield from blocks

    def check(self, name: str, hashes: Sequence[BlockHash]) -> None:
        """Raise PinRefused if there is no room for this pin, whose KV may not be computed yet. It
        replaces an earlier one of this name."""
        if not self._pool.caching:
            raise PinRefused(
                "without a prefix cache (--no-enable-prefix-caching) nothing is pinned"
            )
        if not hashes:
            raise PinRefused("the prefix is shorter than a block, and only whole blocks are cached")
        others = self._without(name)
        needed = sum(block not in others for block in self._pool.prefix_blocks(hashes))
        if len(others) + needed > self.limit:
            raise PinRefused(
                f"the prefix needs {needed} blocks; {self.limit} of {self._pool.num_blocks} blocks"
                f" may be pinned (--max-pinned-fraction {self._share:g}), and {len(others)} are;"
                " unpin another prefix, or raise the share"
            )

    def pin(self, name: str, hashes: Sequence[BlockHash]) -> None:
        """Keep the blocks of a prefix that is in the cache. The pin replaces an earlier one of this
        name. Raise PinRefused, without an effect, if the cache lacks some or there is no room."""
        self.check(name, hashes)
        taken = None
        if self._pool.cached(hashes) == len(hashes):
            taken = self._pool.take(len(hashes), hashes)
        if taken is None:
            raise PinRefused("the cache does not hold the prefix: it was evicted, or not computed")
        self._pool.host.settle()  # blocks of the host tier are copied by the next step
        self.unpin(name)
        self._held[name] = [block for block in taken.blocks if block != PADDING]
        self._references.update(self._held[name])

    def unpin(self, name: str) -> bool:
        """Let the blocks of a pin be evicted. Return False if there is none of this name."""
        blocks = self._held.pop(name, None)
        if blocks is None:
            return False
        self._references.subtract(blocks)
        self._references = +self._references
        self._pool.release(blocks)
        return True

    def clear(self) -> None:
        for name in list(self._held):
            self.unpin(name)

    def make_room(self, spans: int, hashes: Sequence[BlockHash]) -> None:
        """Release pins, the oldest first, until a sequence of `spans` spans fits beside the others
        if nothing else is in the pool. `hashes` are those of its blocks that it may find: it shares
        pinned ones."""
        needed = spans * self._groups
        if needed + len(self.blocks) <= self._pool.num_blocks:
            return
        own = frozenset(self._pool.prefix_blocks(hashes[: self._pool.cached(hashes)]))
        while self._held and needed + len(self.blocks - own) > self._pool.num_blocks:
            name = next(iter(self._held))
            logger.warning("unpinned prefix %s: a request needs %d blocks", name, needed)
            self.unpin(name)

    def _without(self, name: str) -> Set[BlockId]:
        """The blocks of all other pins."""
        own = Counter(self._held.get(name, ()))
        return (self._references - own).keys()

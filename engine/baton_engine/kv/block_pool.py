"""The block pool: reference counts of KV blocks, and the prefix cache over them.

In: requests for blocks, and hashes of blocks whose KV is written. Out: block ids, and the chunk
hashes that entered or left the prefix cache. This is bookkeeping only; the runner owns the bytes.

A span is `block_size` consecutive tokens. It takes one block per group of layers (see KVLayout).
The block of group 0 is cached under the span's hash, the block of any other group under a hash
derived from it. A cached prefix is usable if the groups without a window have all its spans, and
the groups with a window have those that the next token sees.

The prefix cache has two tiers: the blocks of the pool, and the host tier, which keeps the content
of reused blocks in host memory. Content that comes back from the host tier is copied into newly
allocated blocks.

A block is held (refs > 0) or free. A free block keeps its hash, and stays findable, until it is
allocated again. The free queue is in LRU order: blocks are allocated from the head and released to
the tail, a request's last block first, so a prefix is evicted after its tail. Block 0 is padding:
it is never allocated, and no count includes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton_engine.interface import PADDING, CacheChange
from baton_engine.kv.free_queue import Block, FreeQueue
from baton_engine.kv.host_tier import HostTier
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.layout import KVLayout


class IntegrityError(AssertionError):
    """The pool's reference counts or cache entries are inconsistent; always a bug in Baton."""


def hash_in(group: int, hash: BlockHash) -> BlockHash:
    """The hash of the block of this group in the span that `hash` names."""
    return BlockHash(hash + group.to_bytes(2, "little")) if group else hash


@dataclass(frozen=True, slots=True)
class TakenBlocks:
    """The flat list of a sequence's blocks (see KVLayout), with one reference more than before.

    The first `cached` spans were in the pool's cache. The next `loaded` ones begin with a span that
    receives content of the host tier (see HostTier.move). The rest are unwritten.
    """

    blocks: list[BlockId]
    cached: int
    loaded: int


class BlockPool:
    """Blocks 1..num_blocks, their reference counts, and the prefix cache over them. Without a
    layout, there is one group without a window. Without `caching`, the prefix cache stays empty."""

    def __init__(
        self,
        num_blocks: int,
        host: HostTier | None = None,
        layout: KVLayout | None = None,
        *,
        caching: bool = True,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks; at least 1 is needed")
        self.num_blocks = num_blocks
        self.caching = caching
        self.host = HostTier() if host is None else host
        self._blocks = [Block(BlockId(id)) for id in range(num_blocks + 1)]
        self._free = FreeQueue(self._blocks[1:])
        self._cached_free = 0
        self._layout = layout
        self._groups = layout.num_groups if layout is not None else 1
        self._full_groups = layout.num_full_groups if layout is not None else 1
        # The block that lookups return for each hash. If two requests compute the same content at
        # the same time, the second block goes to _twins and replaces the first when that is reused.
        self._cached: dict[BlockHash, Block] = {}
        self._twins: dict[BlockHash, list[Block]] = {}
        # Chunk hashes in either tier, oldest first, and the net changes not reported yet (True:
        # stored, False: evicted).
        self._chunks: dict[BlockHash, None] = {}
        self._changes: dict[BlockHash, bool] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks without a reference, including those that are still cached."""
        return len(self._free)

    @property
    def num_cached_free(self) -> int:
        """Number of free blocks that are still cached."""
        return self._cached_free

    def refs(self, id: BlockId) -> int:
        return self._block(id).refs

    def hash_of(self, id: BlockId) -> BlockHash | None:
        """The hash under which this block is registered, or None."""
        return self._block(id).hash

    def free_order(self) -> list[BlockId]:
        """Free blocks in the order in which they will be reused. For tests and diagnosis."""
        return [block.id for block in self._free]

    def _block(self, id: BlockId) -> Block:
        if not 1 <= id <= self.num_blocks:
            raise ValueError(f"block {id} is not in 1..{self.num_blocks}")
        return self._blocks[id]

    # --- taking and giving back ---------------------------------------------------------------

    def fits(self, new: int, hits: Sequence[BlockId] = ()) -> bool:
        """Whether `new` blocks can be allocated in addition to `hits`. A hit without a reference
        leaves the free queue too, so it counts as demand."""
        return new + sum(1 for id in hits if self._blocks[id].refs == 0) <= len(self._free)

    def take(
        self, spans: int, hashes: Sequence[BlockHash], *, spare: int = 0
    ) -> TakenBlocks | None:
        """Take the blocks of `spans` spans. The leading ones hold the content of the leading
        `hashes` (at most `spans`) that are cached. Blocks that a window has left are not taken.

        Returns None, without any effect, unless `spare` blocks would still be free afterwards.
        """
        found = self.cached(hashes)
        keys = self._keys(hashes[:found])
        cached = [self._cached.get(key) for key in keys]
        hits = [block.id for block in cached if block is not None]
        wanted: list[BlockHash] = []
        if len(hits) < len(keys):
            wanted = [key for key, block in zip(keys, cached, strict=True) if key and not block]
        new = (spans - found) * self._groups + len(wanted)
        if not self.fits(new + spare, hits):
            return None
        self.touch(hits)
        # Claim before allocating: allocate() moves old content to the host tier.
        self.host.claim(wanted)
        fresh = self.allocate(new)
        ends = self.host.bring(wanted, fresh)
        for id, key, ends_chunk in zip(fresh, wanted, ends, strict=False):
            self.register(id, key, ends_chunk=ends_chunk)
        blocks, split = hits, found
        if len(hits) < len(keys):
            blocks = [self._cached[key].id if key else PADDING for key in keys]
        if wanted:
            split = keys.index(wanted[0]) // self._groups
        return TakenBlocks(blocks + fresh[len(wanted) :], split, found - split)

    def _keys(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """The cache's keys for a prefix, as a flat list; b"" for blocks that a window has left."""
        if self._layout is None or not self._layout.groups:
            return hashes
        seen = self._layout.window_start(len(hashes) * self._layout.block_size)
        first = seen // self._layout.block_size
        return [
            hash_in(group, hash) if group < self._full_groups or span >= first else BlockHash(b"")
            for span, hash in enumerate(hashes)
            for group in range(self._groups)
        ]

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks from the head of the free queue. Their cached content moves to the
        host tier or is evicted.

        Raises ValueError, without any effect, if fewer are free; check fits() first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} are free")
        taken = []
        for _ in range(count):
            block = self._free.popleft()
            if block.hash is not None:
                self._cached_free -= 1
                self._forget(block)
            block.refs = 1
            taken.append(block.id)
        return taken

    def touch(self, ids: Iterable[BlockId]) -> None:
        """Add a reference to each block. Blocks that had none leave the free queue."""
        for id in ids:
            block = self._block(id)
            if block.refs == 0:
                self._free.remove(block)
                self._cached_free -= block.hash is not None
            block.refs += 1

    def release(self, ids: Sequence[BlockId]) -> None:
        """Drop a reference to each block. Pass the blocks in logical order; the last one is reused
        first. Raises ValueError for a block without a reference."""
        for id in reversed(ids):
            block = self._block(id)
            if block.refs == 0:
                raise ValueError(f"block {id} is given back and nobody holds it")
            block.refs -= 1
            if block.refs == 0:
                self._free.append(block)
                self._cached_free += block.hash is not None

    # --- prefix cache ---------------------------------------------------------------------------

    def cached(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading spans whose KV take() would find now, in both tiers."""
        if not self.caching:
            return 0
        layout, full = self._layout, self._full_groups
        cached, host = self._cached, self.host
        found = 0 if full else len(hashes)
        for hash in hashes if full else ():
            if hash not in cached and hash not in host:
                break
            if full > 1 and not self._has(hash, 1, full):
                break
            found += 1
        if layout is None or layout.window is None:
            return found
        # Go back over the spans that the next token sees. At one that is missing, the prefix ends
        # before it, and the token after that prefix sees earlier spans.
        span = found
        while span * layout.block_size > layout.window_start(found * layout.block_size):
            span -= 1
            if not self._has(hashes[span], self._full_groups, self._groups):
                found = span
        return found

    def _has(self, hash: BlockHash, first: int, end: int) -> bool:
        """Whether a tier has the blocks of groups [first, end) of this span."""
        for group in range(first, end):
            key = hash_in(group, hash)
            if key not in self._cached and key not in self.host:
                return False
        return True

    def prefix_blocks(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """The pool's cached blocks of a prefix, and PADDING for those that it lacks; blocks that a
        window has left are left out."""
        cached = (self._cached.get(key) for key in self._keys(hashes) if key)
        return [PADDING if block is None else block.id for block in cached]

    def lookup(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """Blocks of the leading hashes that are cached in the pool. For tests and diagnosis."""
        blocks = []
        for hash in hashes:
            block = self._cached.get(hash)
            if block is None:
                break
            blocks.append(block.id)
        return blocks

    def register(self, id: BlockId, hash: BlockHash, *, ends_chunk: bool) -> None:
        """Add a held block to the prefix cache. Its KV is written and must not change again.
        Idempotent. `ends_chunk` says that the block is the last of a chunk."""
        block = self._blocks[id]
        assert block.refs > 0, f"block {id} is registered and nobody holds it"
        if not self.caching:
            return
        if block.hash is not None:
            assert block.hash == hash, f"block {id} is registered under another hash"
            return
        block.hash, block.ends_chunk = hash, ends_chunk
        if self._cached.setdefault(hash, block) is not block:
            self._twins.setdefault(hash, []).append(block)
        elif ends_chunk and hash not in self._chunks:
            self._chunks[hash] = None
            self._note(hash, stored=True)

    def reset_cache(self) -> None:
        """Forget all cached content, in both tiers. References do not change: a block that a
        request holds is only not found any more."""
        for block in self._blocks:
            block.hash = None
        self._cached_free = 0
        self._cached, self._twins = {}, {}
        self.host.clear()
        for hash in self._chunks:
            self._note(hash, stored=False)
        self._chunks = {}

    def _forget(self, block: Block) -> None:
        """Remove a block from the cache. A twin with the same hash replaces it. Without a twin, the
        host tier keeps the content if it has slots."""
        hash = block.hash
        assert hash is not None
        block.hash = None
        if hash in self._twins:
            self._forget_twin(block, hash)
            return
        del self._cached[hash]
        if self.host.num_slots:
            for lost, ends_chunk in self.host.keep(hash, block.id, ends_chunk=block.ends_chunk):
                if ends_chunk:
                    self._lose_chunk(lost)
        elif block.ends_chunk:
            self._lose_chunk(hash)

    def _forget_twin(self, block: Block, hash: BlockHash) -> None:
        twins = self._twins[hash]
        if self._cached[hash] is block:
            self._cached[hash] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[hash]

    def _lose_chunk(self, hash: BlockHash) -> None:
        """Report an evicted chunk, unless a block of the pool has the same content again."""
        if hash not in self._cached:
            del self._chunks[hash]
            self._note(hash, stored=False)

    def _note(self, hash: BlockHash, *, stored: bool) -> None:
        # Opposite changes between two reports cancel out. This also bounds the log to twice the
        # size of both tiers if nobody reads it.
        if self._changes.pop(hash, stored) == stored:
            self._changes[hash] = stored

    def take_changes(self) -> CacheChange:
        """Chunk hashes that entered or left the cache since the last call."""
        changes, self._changes = self._changes, {}
        return CacheChange(
            stored=tuple(hash for hash, stored in changes.items() if stored),
            evicted=tuple(hash for hash, stored in changes.items() if not stored),
        )

    def cached_chunks(self) -> tuple[BlockHash, ...]:
        """Every chunk hash that is cached now, oldest first."""
        return tuple(self._chunks)

    def figures(self) -> dict[str, int]:
        """The pool's fields of NodeLoad, counted in blocks (`host_bytes`: bytes)."""
        host = self.host
        return {
            "free_blocks": self.num_free,
            "cached_blocks": self.num_cached_free,
            "total_blocks": self.num_blocks,
            "host_blocks": len(host),
            "host_bytes": len(host) * host.slot_bytes,
            "host_total_blocks": host.num_slots,
            "host_stored_blocks_total": host.stored,
            "host_loaded_blocks_total": host.loaded,
            "host_evicted_blocks_total": host.evicted,
        }

    # --- integrity ------------------------------------------------------------------------------

    def check_integrity(self, expected: Mapping[BlockId, int]) -> None:
        """Raise IntegrityError unless all of this holds: the reference counts equal `expected`
        (block -> references), free + held == total, every cache entry is a block with that hash,
        and the host tier is consistent."""
        for block in self._blocks[1:]:
            if block.refs != expected.get(block.id, 0):
                raise IntegrityError(
                    f"block {block.id} has {block.refs} references, "
                    f"{expected.get(block.id, 0)} are accounted for"
                )
        queued = self.free_order()
        held = sum(1 for block in self._blocks[1:] if block.refs)
        if len(queued) != len(self._free) or len(set(queued)) + held != self.num_blocks:
            raise IntegrityError(
                f"{len(set(queued))} of {len(queued)} queued + {held} held != {self.num_blocks}"
            )
        if any(self._blocks[id].refs for id in queued):
            raise IntegrityError("a held block is in the free queue")
        if self._blocks[0].refs or self._blocks[0].hash is not None:
            raise IntegrityError("block 0 (padding) is in use")
        self._check_cache(queued)

    def _check_cache(self, queued: Sequence[BlockId]) -> None:
        cached_free = sum(1 for id in queued if self._blocks[id].hash is not None)
        if cached_free != self._cached_free:
            raise IntegrityError(f"{cached_free} free blocks are cached, not {self._cached_free}")
        entries = list(self._cached.items())
        entries += [(hash, twin) for hash, twins in self._twins.items() for twin in twins]
        for hash, block in entries:
            if block.hash != hash:
                raise IntegrityError(f"block {block.id} is cached under a hash it does not carry")
        hashed = sum(1 for block in self._blocks if block.hash is not None)
        if hashed != len(entries) or len({block.id for _, block in entries}) != hashed:
            raise IntegrityError(f"{hashed} blocks carry a hash, {len(entries)} are in the cache")
        chunks = {hash for hash, block in self._cached.items() if block.ends_chunk}
        chunks.update(self.host.chunks())
        if chunks != set(self._chunks):
            raise IntegrityError(f"{len(self._chunks)} chunks listed, {len(chunks)} cached")
        if fault := self.host.fault():
            raise IntegrityError(f"host tier: {fault}")

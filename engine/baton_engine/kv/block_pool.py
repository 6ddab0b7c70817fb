"""The block pool: who holds which block of KV, and which block holds what.

In: requests for blocks, hashes of blocks whose KV is written. Out: block ids, and which chunk
hashes entered or left the prefix cache. Pure bookkeeping; the bytes are the runner's.

The prefix cache has two tiers: blocks of the pool, and behind them what the host tier keeps of
blocks that were handed out again. What comes back from there comes in fresh blocks.

A block is held (refs > 0) or free. A free block keeps its hash, and so stays findable, until it is
handed out again. The free queue is in LRU order: blocks are taken at its head and come back at its
tail, a request's last block first, so that a prefix outlives its tail. Block 0 is padding: it is
never handed out and in no count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton_engine.interface import CacheChange
from baton_engine.kv.cpu_offload import HostTier
from baton_protocol.ids import BlockHash, BlockId


class IntegrityError(AssertionError):
    """The pool's books do not balance; always a bug of ours."""


class Block:
    """One block's entry in the books; a link of the free queue while nobody holds it."""

    __slots__ = ("ends_chunk", "hash", "id", "next", "prev", "refs")

    def __init__(self, id: BlockId) -> None:
        self.id = id
        self.refs = 0
        self.hash: BlockHash | None = None
        self.ends_chunk = False
        self.prev: Block | None = None
        self.next: Block | None = None


class FreeQueue:
    """Doubly linked list through the blocks themselves: a cache hit takes one out of the middle,
    which is O(n) in a deque and O(1) here."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._ends = Block(BlockId(-1))  # one sentinel closes the ring: next is head, prev is tail
        self._ends.prev = self._ends.next = self._ends
        self._size = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Block]:
        """From the head (taken first) to the tail."""
        block = self._ends.next
        while block is not None and block is not self._ends:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        tail = self._ends.prev
        assert block.next is None, f"block {block.id} is queued already"
        assert tail is not None
        tail.next = block
        block.prev, block.next = tail, self._ends
        self._ends.prev = block
        self._size += 1

    def remove(self, block: Block) -> None:
        before, after = block.prev, block.next
        assert before is not None, f"block {block.id} is not queued"
        assert after is not None
        before.next, after.prev = after, before
        block.prev = block.next = None
        self._size -= 1

    def popleft(self) -> Block:
        head = self._ends.next
        assert head is not None
        assert head is not self._ends, "the free queue is empty"
        self.remove(head)
        return head


@dataclass(frozen=True, slots=True)
class TakenBlocks:
    """Blocks that now have a holder more: the first `cached` were in the pool's cache, the next
    `loaded` hold what the host tier kept (see HostTier.move), the others are to be written."""

    blocks: list[BlockId]
    cached: int
    loaded: int


class BlockPool:
    """Blocks 1..num_blocks, their reference counts, and the prefix cache over them."""

    def __init__(self, num_blocks: int, host: HostTier | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks; at least 1 is needed")
        self.num_blocks = num_blocks
        self.host = HostTier() if host is None else host
        self._blocks = [Block(BlockId(id)) for id in range(num_blocks + 1)]
        self._free = FreeQueue(self._blocks[1:])
        self._cached_free = 0
        # One block per hash, the one that lookups return. Blocks that hold the same content beside
        # it (two requests computed it at the same time) wait in _twins to take its place.
        self._cached: dict[BlockHash, Block] = {}
        self._twins: dict[BlockHash, list[Block]] = {}
        # Chunk hashes in either tier, in order of arrival, and the net changes not reported yet.
        self._chunks: dict[BlockHash, None] = {}
        self._changes: dict[BlockHash, bool] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody holds; those that still hold a findable block are among them."""
        return len(self._free)

    @property
    def num_cached_free(self) -> int:
        """Free blocks that still hold a findable block."""
        return self._cached_free

    def refs(self, id: BlockId) -> int:
        return self._block(id).refs

    def hash_of(self, id: BlockId) -> BlockHash | None:
        """The hash under which this block is registered, if it is."""
        return self._block(id).hash

    def free_order(self) -> list[BlockId]:
        """Free blocks, the one to be reused first in front. For tests and diagnosis."""
        return [block.id for block in self._free]

    def _block(self, id: BlockId) -> Block:
        if not 1 <= id <= self.num_blocks:
            raise ValueError(f"block {id} is not in 1..{self.num_blocks}")
        return self._blocks[id]

    # --- taking and giving back ---------------------------------------------------------------

    def fits(self, new: int, hits: Sequence[BlockId] = ()) -> bool:
        """Whether `new` blocks can be had while `hits` are kept: a hit that nobody holds comes out
        of the free queue too, so it counts as demand."""
        return new + sum(1 for id in hits if self._blocks[id].refs == 0) <= len(self._free)

    def take(
        self, count: int, hashes: Sequence[BlockHash], *, spare: int = 0
    ) -> TakenBlocks | None:
        """Take `count` blocks, the leading ones with what `hashes` (at most as many) name, as far
        as it is cached; None, without any effect, unless `spare` blocks more are free then."""
        hits = self.lookup(hashes)
        new = count - len(hits)
        if not self.fits(new + spare, hits):
            return None
        self.touch(hits)
        wanted = hashes[len(hits) :]
        # In this order: what is wanted from the host tier is the last to go when the fresh blocks
        # send there what they held. What goes nevertheless is computed again.
        self.host.touch(wanted)
        fresh = self.allocate(new)
        ends = self.host.bring(wanted, fresh)
        for id, hash, ends_chunk in zip(fresh, wanted, ends, strict=False):
            self.register(id, hash, ends_chunk=ends_chunk)
        return TakenBlocks(hits + fresh, len(hits), len(ends))

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks from the head of the free queue; what they held goes to the host
        tier, or is forgotten.

        Ask `fits` first: too few is a ValueError, without any effect.
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
        """Hold blocks once more; those nobody held leave the free queue."""
        for id in ids:
            block = self._block(id)
            if block.refs == 0:
                self._free.remove(block)
                self._cached_free -= block.hash is not None
            block.refs += 1

    def release(self, ids: Sequence[BlockId]) -> None:
        """Give blocks back, in logical order: the last of them will be reused first."""
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
        """How many of the leading hashes take() would find now, in both tiers."""
        hits = len(self.lookup(hashes))
        return hits + self.host.leading(hashes[hits:])

    def lookup(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """Blocks of the leading hashes that are cached in the pool; stops at the first miss, since
        a block without its predecessors is of no use. Takes no reference."""
        found = []
        for hash in hashes:
            block = self._cached.get(hash)
            if block is None:
                break
            found.append(block.id)
        return found

    def register(self, id: BlockId, hash: BlockHash, *, ends_chunk: bool) -> None:
        """Make a held block findable: its KV is written, and will not be written again."""
        block = self._blocks[id]
        assert block.refs > 0, f"block {id} is registered and nobody holds it"
        if block.hash is not None:
            assert block.hash == hash, f"block {id} is registered under another hash"
            return
        block.hash, block.ends_chunk = hash, ends_chunk
        if self._cached.setdefault(hash, block) is not block:
            self._twins.setdefault(hash, []).append(block)
        elif ends_chunk and hash not in self._chunks:
            self._chunks[hash] = None
            self._note(hash, stored=True)

    def _forget(self, block: Block) -> None:
        """Take a block out of the cache; a twin, if there is one, stands in for it. If not, the
        host tier keeps what it can."""
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
        """The block is kept nowhere any more, unless it was computed anew."""
        if hash not in self._cached:
            del self._chunks[hash]
            self._note(hash, stored=False)

    def _note(self, hash: BlockHash, *, stored: bool) -> None:
        # Stored and evicted between two reports is no news; this also bounds the log by twice both
        # tiers when nobody reads it.
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
        """The pool's part of NodeLoad."""
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
        """Raise IntegrityError unless every reference is in `expected` (block -> references), free
        + held == total, the cache's entries are the blocks that carry their hash, and the host
        tier's books balance."""
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

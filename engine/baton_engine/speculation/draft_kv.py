"""DraftKV: the blocks in which a model that drafts keeps KV of its own.

In: sequences, and how many leading tokens of each need KV. Out: their blocks, and how many leading
tokens have KV in them. This is bookkeeping only; the owner of the bytes computes the KV.

The target's KV may leave a sequence and come back; this KV stays until the sequence ends. A
sequence's known tokens never change, so KV of them stays valid. KV of drafts is valid as far as
they became the next tokens. Full blocks of known tokens are cached under the names that the target
gives them, so another request or choice with the same tokens finds them.

If blocks are short, a sequence gets none, and so no drafts. It takes them from sequences that get
no drafts now, the least recently used first, and then from younger ones.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

from baton_engine.core.kv_chunks import register
from baton_engine.kv.block_pool import BlockPool
from baton_engine.scheduling.sequence import Sequence, blocks_for
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVLayout

Key = tuple[int, int]  # see Sequence.key


@dataclass(slots=True)
class DraftBlocks:
    """A sequence's blocks, as a flat list (see KVLayout). Tokens [0, computed) have KV; the last of
    them are `drafts`, which were not known when they were computed. `blocks_id` is a new number
    each time the sequence gets its blocks again (see Row.blocks_id)."""

    blocks: list[BlockId] = field(default_factory=list)
    blocks_id: int = 0
    computed: int = 0
    drafts: Seq[int] = ()
    cached_spans: int = 0

    def drop_wrong(self, tokens: Seq[int]) -> None:
        """Forget the KV of drafts from the first one on that is not the next of these tokens."""
        sure = self.computed - len(self.drafts)
        right = 0
        for draft, id in zip(self.drafts, tokens[sure : self.computed], strict=False):
            if draft != id:
                break
            right += 1
        self.computed, self.drafts = sure + right, ()


class DraftKV:
    def __init__(self, num_blocks: int, layout: KVLayout) -> None:
        """A pool of `num_blocks` blocks without padding."""
        self.layout = layout
        self._pool = BlockPool(num_blocks, layout=layout)
        # By use, the least recently used first.
        self._held: OrderedDict[Key, DraftBlocks] = OrderedDict()
        self._ids = count(1)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def take(self, sequences: Seq[Sequence], lengths: Seq[int]) -> list[DraftBlocks | None]:
        """For each sequence that gets drafts now, blocks for its first `lengths[i]` tokens, which
        are at least the known ones, or None if too few are free. At least its last known token has
        no KV. Valid until the next call."""
        pairs = sorted(zip(sequences, lengths, strict=True), key=lambda pair: pair[0].key)
        for sequence, _ in reversed(pairs):
            self._held.setdefault(sequence.key, DraftBlocks())
            self._held.move_to_end(sequence.key)
        taken = {sequence.key: self._take(sequence, length) for sequence, length in pairs}
        return [taken[sequence.key] for sequence in sequences]

    def _take(self, sequence: Sequence, length: int) -> DraftBlocks | None:
        held, groups, size = (
            self._held[sequence.key],
            self.layout.num_groups,
            self.layout.block_size,
        )
        spans = blocks_for(length, size)
        if not held.blocks:
            hashes = sequence.hashes_of((sequence.known - 1) // size)
            taken = self._pool.take(spans, hashes)
            while taken is None:
                if not self._clear_the_way(sequence.key):
                    return None
                taken = self._pool.take(spans, hashes)
            held.blocks, held.blocks_id = taken.blocks, next(self._ids)
            held.computed, held.drafts, held.cached_spans = taken.cached * size, (), taken.cached
            return held
        held.drop_wrong(sequence.tokens)
        held.computed = min(held.computed, sequence.known - 1)
        new = max(0, spans * groups - len(held.blocks))
        while not self._pool.fits(new):
            if not self._clear_the_way(sequence.key):
                return None
        held.blocks += self._pool.allocate(new)
        return held

    def _clear_the_way(self, key: Key) -> bool:
        """Take the blocks of the first sequence by use that has some. Returns False if there is
        none before the one with this key: all others are older and get drafts now."""
        for other, held in self._held.items():
            if other == key:
                return False
            if held.blocks:
                self._release(held)
                return True
        return False

    def note_computed(self, sequence: Sequence, count: int, drafts: Seq[int] = ()) -> None:
        """The next `count` tokens of the sequence have KV; the last ones are drafts."""
        held = self._held[sequence.key]
        held.computed += count
        held.drafts = (*held.drafts, *drafts)
        full = (held.computed - len(held.drafts)) // self.layout.block_size
        if full > held.cached_spans:
            run = (held.cached_spans, full)
            register(self._pool, held.blocks, sequence.hash_spans(full), run, self.layout)
            held.cached_spans = full

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: its blocks become free."""
        held = self._held.pop(sequence.key, None)
        if held is not None:
            self._release(held)

    def _release(self, held: DraftBlocks) -> None:
        self._pool.release([block for block in held.blocks if block])
        held.blocks, held.computed, held.drafts, held.cached_spans = [], 0, (), 0

    def check_integrity(self) -> None:
        """Raise, with the numbers, unless free + held == total and every reference is one of a
        sequence."""
        held = Counter(block for each in self._held.values() for block in each.blocks if block)
        self._pool.check_integrity(held)

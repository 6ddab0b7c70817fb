"""Which sequences compute how many tokens in a step, and who gives up blocks.

In: sequences. Out: per step a list of Piece(sequence, count) under one token budget. There are no
phases, only tokens computed catching up with tokens known (and going over what has landed):

1. Running sequences with one token missing (decoding), oldest first. One that needs a block and
   cannot have it takes it from the youngest: first from queued sequences that hold blocks, then
   from running ones, itself included. Those start again later; their blocks stay findable.
2. Running sequences with more missing (chunked prefill), oldest first, while budget remains. They
   need no blocks: a sequence is admitted with blocks for all it knows.
3. Waiting sequences, oldest first, unless something was preempted. The first that does not fit
   stops all others but those that hold their blocks already.

No clock and no set: the same calls give the same schedule.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import msgspec

from baton_engine.blocks import BlockPool
from baton_engine.sequence import Sequence, blocks_for
from baton_protocol.ids import BlockHash, BlockId

# Share of the pool that an admission leaves free while others run, so that a sequence is not
# admitted only to be preempted when a running one grows by a block.
WATERMARK = 100


class Piece(msgspec.Struct, frozen=True, gc=False):
    """`count` tokens of a sequence, from its `computed` on, computed in this step; at most up to
    the next run that has landed."""

    sequence: Sequence
    count: int


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.key


class Scheduler:
    """Queues of sequences over one block pool. Both lists are sorted by age, oldest first."""

    def __init__(
        self, pool: BlockPool, *, block_size: int, max_batched_tokens: int, max_num_seqs: int
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._max_batched_tokens = max_batched_tokens
        self._max_num_seqs = max_num_seqs
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._holding: list[Sequence] = []  # the waiting ones that hold blocks
        self.preemptions = 0
        # Of the last step: a sequence lost its blocks, or nothing could run, for want of blocks.
        self.starved = False
        self._blocked = False  # in the last step the oldest waiting sequence did not fit

    # --- queues -------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by age; one that was given blocks keeps them while it waits."""
        sequence.running = False
        insort(self.waiting, sequence, key=_age)
        if sequence.blocks:
            insort(self._holding, sequence, key=_age)

    def remove(self, sequence: Sequence) -> list[BlockId]:
        """Take a sequence out; its blocks, still referenced, are the caller's to release."""
        if sequence.running:
            self.running.remove(sequence)
            sequence.running = False
        else:
            self.waiting.remove(sequence)
            if sequence.blocks:
                self._holding.remove(sequence)
        return sequence.clear()

    def sequences(self) -> Iterable[Sequence]:
        yield from self.running
        yield from self.waiting

    @property
    def spare(self) -> int:
        """Blocks that must stay free when others are taken for something new."""
        return self._pool.num_blocks // WATERMARK if self.running else 0

    @property
    def owes_blocks(self) -> bool:
        """Free blocks are for the oldest waiting sequence, which did not fit."""
        return self._blocked and bool(self.waiting)

    # --- one step -----------------------------------------------------------------------------

    def schedule(self) -> list[Piece]:
        """Choose this step's pieces, and give their sequences the blocks they need."""
        pieces: list[Piece] = []
        self._blocked = False
        before = self.preemptions
        budget = self._schedule_decoding(pieces, self._max_batched_tokens)
        budget = self._schedule_filling(pieces, budget)
        if self.preemptions == before:
            self._schedule_waiting(pieces, budget)
            while not pieces and self._clear_the_way():
                self._schedule_waiting(pieces, budget)
        self.starved = self.preemptions > before or (self._blocked and not pieces)
        return pieces

    def _schedule_decoding(self, pieces: list[Piece], budget: int) -> int:
        # The budget has a token for each: none was admitted without one left for it.
        for sequence in [each for each in self.running if each.missing == 1]:
            # A younger one may have been preempted since the list was made.
            if sequence.running and self._grow(sequence):
                pieces.append(Piece(sequence, 1))
                budget -= 1
        return budget

    def _schedule_filling(self, pieces: list[Piece], budget: int) -> int:
        for sequence in self.running:
            if budget == 0:
                break
            if sequence.missing > 1:
                count = min(sequence.due, budget)
                pieces.append(Piece(sequence, count))
                budget -= count
        return budget

    def _schedule_waiting(self, pieces: list[Piece], budget: int) -> None:
        while budget and self.waiting and len(self.running) < self._max_num_seqs:
            admitted = self._admit_next()
            if admitted is None:
                return
            count = min(admitted.due, budget)
            pieces.append(Piece(admitted, count))
            budget -= count

    def _admit_next(self) -> Sequence | None:
        if not self._blocked:
            head = self.waiting[0]
            if self._admit(head):
                return head
            self._blocked = True
        # Those that hold their blocks take nothing that is owed to the head.
        return next((each for each in self._holding if self._admit(each)), None)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence blocks for all it knows, those in the cache first, and run it."""
        size, held = self._block_size, sequence.blocks
        hashes: Seq[BlockHash] = ()
        if not held and not sequence.state.asks_prompt:
            # One token at least is left to compute: somebody has to produce the last logits.
            hashes = sequence.hashes_of((sequence.known - 1) // size)
        new = blocks_for(sequence.known, size) - len(held)
        taken = self._pool.take(new, hashes, spare=0 if held else self.spare)
        if taken is None:
            return False
        if held:
            self._holding.remove(sequence)
            held.extend(taken.blocks)
        else:
            cached, found = taken.cached * size, (taken.cached + taken.loaded) * size
            sequence.place(taken.blocks, [(0, found)] if found else [])
            sequence.state.placed(sequence, cached=[(0, cached)], host=[(cached, found)])
        self.waiting.remove(sequence)
        sequence.running = True
        insort(self.running, sequence, key=_age)
        return True

    def _clear_the_way(self) -> bool:
        """With nothing to run, queued sequences may hold what each other lacks: the youngest of
        them gives up its blocks for the oldest waiting one."""
        if not self._blocked or not self._holding or self._holding[-1] is self.waiting[0]:
            return False
        self._preempt(self._holding[-1])
        self._blocked = False
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """Give a running sequence the block its next token needs; False if it was preempted."""
        if blocks_for(sequence.known, self._block_size) <= len(sequence.blocks):
            return True
        while not self._pool.fits(1):
            victim = self._holding[-1] if self._holding else self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks.extend(self._pool.allocate(1))
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Take a sequence's blocks; it computes again what the cache does not give back."""
        self._pool.release(self.remove(victim))
        self.preemptions += 1
        self.add(victim)

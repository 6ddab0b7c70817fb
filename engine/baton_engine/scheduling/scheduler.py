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

A step may be chosen ahead, while the one before it is under way: a sequence whose next token that
one samples counts as having it. Left out, with a token of the budget kept for each, are those whose
next row depends on which token it is, and those that end with it. Nobody loses blocks then, as rows
under way use them: where one is lacking, nothing is chosen, and the next step begins from what was
read.

No clock and no set: the same calls give the same schedule.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import count

import msgspec

from baton_engine.kv.block_pool import BlockPool
from baton_engine.scheduling.sequence import Sequence, blocks_for
from baton_protocol.ids import BlockHash, BlockId

# Share of the pool that an admission leaves free while others run, so that a sequence is not
# admitted only to be preempted when a running one grows by a block.
WATERMARK = 100


class Piece(msgspec.Struct, frozen=True, gc=False):
    """`count` tokens of a sequence, from its `started` on, computed in this step; at most up to the
    next run that has landed."""

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
        self._tenures = count(1)

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

    def rewind(self, sequence: Sequence, started: int, after: int, step: int) -> None:
        """A sequence goes back to what it had under way with step `step`."""
        sequence.started, sequence.after, sequence.step = started, after, step
        sequence.tenure = next(self._tenures)

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

    def schedule(self, *, ahead: bool = False) -> list[Piece]:
        """Choose a step's pieces, and give their sequences the blocks they need. Without `ahead`
        no step may be under way."""
        pieces: list[Piece] = []
        filling: list[Sequence] = []
        self._blocked = False
        before = self.preemptions
        budget = self._schedule_decoding(pieces, filling, ahead=ahead)
        if budget is None:
            return []
        budget = self._schedule_filling(pieces, filling, budget)
        if self.preemptions == before:
            self._schedule_waiting(pieces, budget)
            while not (pieces or ahead) and self._clear_the_way():
                self._schedule_waiting(pieces, budget)
        if not ahead:
            self.starved = self.preemptions > before or (self._blocked and not pieces)
        return pieces

    def _schedule_decoding(
        self, pieces: list[Piece], filling: list[Sequence], *, ahead: bool
    ) -> int | None:
        """Pieces of those that lack one token, and who lacks more. Returns the budget that is left;
        None where that takes blocks from somebody, ahead."""
        # The budget has a token for each: none was admitted without one left for it.
        budget = self._max_batched_tokens
        for sequence in tuple(self.running):
            known = len(sequence.tokens)
            if sequence.after >= 0:
                known += 1
                if known >= sequence.reach:
                    budget -= 1
                    continue
            if known - sequence.started > 1:
                filling.append(sequence)
                continue
            if known > sequence.capacity:
                if ahead and not self._pool.fits(1):
                    return None
                # A younger one may have been preempted since the list was made.
                if not sequence.running or not self._grow(sequence, known):
                    continue
            pieces.append(Piece(sequence, 1))
            budget -= 1
        return budget

    def _schedule_filling(self, pieces: list[Piece], filling: list[Sequence], budget: int) -> int:
        for sequence in filling:
            if budget == 0:
                break
            if sequence.running:
                number = min(sequence.due, budget)
                pieces.append(Piece(sequence, number))
                budget -= number
        return budget

    def _schedule_waiting(self, pieces: list[Piece], budget: int) -> None:
        while budget and self.waiting and len(self.running) < self._max_num_seqs:
            admitted = self._admit_next()
            if admitted is None:
                return
            number = min(admitted.due, budget)
            pieces.append(Piece(admitted, number))
            budget -= number

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
            sequence.extend(taken.blocks)
        else:
            cached, found = taken.cached * size, (taken.cached + taken.loaded) * size
            sequence.place(taken.blocks, [(0, found)] if found else [])
            sequence.state.placed(sequence, cached=[(0, cached)], host=[(cached, found)])
        self.waiting.remove(sequence)
        sequence.running, sequence.tenure = True, next(self._tenures)
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

    def _grow(self, sequence: Sequence, known: int) -> bool:
        """Give a running sequence blocks for `known` tokens, one more than it has; False if it was
        preempted."""
        if blocks_for(known, self._block_size) <= len(sequence.blocks):
            return True
        while not self._pool.fits(1):
            victim = self._holding[-1] if self._holding else self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.extend(self._pool.allocate(1))
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Take a sequence's blocks; it computes again what the cache does not give back."""
        self._pool.release(self.remove(victim))
        self.preemptions += 1
        self.add(victim)

"""Choose the sequences of a step, the tokens each computes, and the sequences to preempt.

In: sequences. Out: for each step a list of Piece(sequence, count) under one token budget. There are
no phases. Tokens computed catch up with tokens known, and runs that landed are skipped:

1. Running sequences with one token missing (decode), oldest first. After its last known token, a
   sequence may compute drafts of the next ones (see `draft_source`), as far as budget and
   free blocks allow: drafts never preempt. If such a sequence needs a block per group of layers and
   too few are free, the scheduler preempts the youngest sequence: first among waiting sequences
   that hold blocks, then among running ones, this one included. A preempted sequence is queued
   again, and its blocks stay findable in the prefix cache until they are reused.
2. Running sequences with more tokens missing (chunked prefill), oldest first, while budget remains.
   They need no new blocks, because a sequence is admitted with blocks for all its known tokens. A
   prompt whose chunks are published gets at most PUBLISHED_PIECE tokens.
3. Waiting sequences, oldest first, unless this step preempted a sequence. After the first one that
   does not fit, only sequences that already hold their blocks are admitted.

A step may be scheduled ahead, while the previous step is in flight. A sequence whose next token
that step samples counts as having the token. Two kinds of sequences are left out: those whose next
row depends on the token's value, and those that end with it. One token of budget is reserved for
each. Scheduling ahead never preempts, because rows in flight use the blocks. If a block is missing,
the schedule is empty, and the next step is scheduled after the one in flight is read.

If the device lacks memory for a step, shrink() lowers the limits of the next ones (see
`step_limits`): first prompts get fewer tokens, then the youngest running sequence is preempted.

The scheduler uses no clock and no set, so the same calls give the same schedule.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

import msgspec

from baton_engine.config.step_sizes import PROMPT_ROWS
from baton_engine.kv.block_pool import BlockPool
from baton_engine.scheduling.draft_source import DraftSource
from baton_engine.scheduling.sequence import Sequence, blocks_for
from baton_engine.scheduling.step_limits import StepLimits
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.layout import KVLayout

# While sequences run, an admission leaves 1/WATERMARK of the pool free. Otherwise a sequence could
# be admitted and then preempted as soon as a running one needs a block.
WATERMARK = 100
# Most tokens that a step computes of a prompt whose chunks are published. The chunks of a step are
# published while the next one runs, so larger pieces would leave more of the transfer to the end.
PUBLISHED_PIECE = 2048


class Piece(msgspec.Struct, frozen=True, gc=False):
    """The `count` tokens of a sequence that this step computes, from `sequence.launched` on: known
    ones, and then `drafts`. A piece ends at the next landed run at the latest."""

    sequence: Sequence
    count: int
    drafts: Seq[int] = ()


@dataclass(frozen=True, slots=True)
class TailCopy:
    """Copy the blocks of the prompt's tail to a choice that has `found` tokens without it."""

    sequence: Sequence
    found: int
    sources: Seq[BlockId]
    targets: Seq[BlockId]


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.key


class Scheduler:
    """Queues of sequences over one block pool.

    `waiting` and `running` are sorted by age, oldest first. `preemptions` counts preemptions since
    the start.
    """

    def __init__(
        self,
        pool: BlockPool,
        layout: KVLayout,
        *,
        max_batched_tokens: int,
        max_num_seqs: int,
        drafter: DraftSource | None = None,
    ) -> None:
        self._pool = pool
        self.drafter = drafter
        self._block_size = layout.block_size
        self._groups = layout.num_groups
        self.limits = StepLimits(max_batched_tokens, max_num_seqs)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._holding: list[Sequence] = []  # waiting sequences that hold blocks, oldest first
        self.preemptions = 0
        # True if the last step that was not scheduled ahead preempted a sequence, or ran nothing
        # because blocks were short.
        self.starved = False
        self._blocked = False  # the oldest waiting sequence did not fit in the last step
        self._blocks_ids = count(1)
        self.copies: list[TailCopy] = []  # to make before the step that was just scheduled

    # --- queues -------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by age. A sequence that has blocks keeps them while it waits."""
        sequence.running = False
        insort(self.waiting, sequence, key=_age)
        if sequence.blocks:
            insort(self._holding, sequence, key=_age)

    def remove(self, sequence: Sequence) -> list[BlockId]:
        """Remove a sequence and return its blocks. They are still referenced; the caller releases
        them."""
        if sequence.running:
            self.running.remove(sequence)
            sequence.running = False
        else:
            self.waiting.remove(sequence)
            if sequence.blocks:
                self._holding.remove(sequence)
        return sequence.clear_blocks()

    def end(self, sequence: Sequence) -> list[BlockId]:
        """Same as remove(), for a sequence that has ended."""
        if self.drafter is not None:
            self.drafter.forget(sequence)
        return self.remove(sequence)

    def rewind(self, sequence: Sequence, launched: int, awaited: int, step: int) -> None:
        """Reset what a sequence has in flight: it is computed up to `launched`, awaits sample
        `awaited` (-1: none), and `step` is its last step. The new `blocks_id` tells the runner to
        read all of its blocks again."""
        sequence.launched, sequence.awaited_sample, sequence.last_step = launched, awaited, step
        sequence.blocks_id = next(self._blocks_ids)

    def sequences(self) -> Iterable[Sequence]:
        yield from self.running
        yield from self.waiting

    @property
    def spare(self) -> int:
        """Number of blocks that must stay free when a new sequence takes blocks."""
        return self._pool.num_blocks // WATERMARK if self.running else 0

    @property
    def owes_blocks(self) -> bool:
        """True if the free blocks are reserved for the oldest waiting sequence, which did not
        fit."""
        return self._blocked and bool(self.waiting)

    # --- one step -----------------------------------------------------------------------------

    def schedule(self, *, ahead: bool = False) -> list[Piece]:
        """Choose a step's pieces and give their sequences the blocks they need. Pass `ahead` if a
        step is in flight."""
        pieces: list[Piece] = []
        filling: list[Sequence] = []
        self._blocked = False
        before = self.preemptions
        budget = self._schedule_decoding(pieces, filling, ahead=ahead)
        if budget is None:
            return []
        if self.drafter is not None and self.preemptions == before:
            pieces, budget = self._with_drafts(pieces, budget, self.drafter)
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
        """Add a piece for each running sequence with one token missing to `pieces`, and each with
        more missing to `filling`.

        Returns the budget that is left in tokens, or None if a schedule made ahead would have to
        preempt.
        """
        # The budget covers one token per running sequence: admission requires budget for it, but
        # the limit may be lower since then.
        budget = max(self.limits.tokens, len(self.running))
        for sequence in tuple(self.running):
            known = len(sequence.tokens)
            if sequence.awaited_sample >= 0:
                known += 1
                if known >= sequence.launch_limit:
                    budget -= 1
                    continue
            if known - sequence.launched > 1:
                filling.append(sequence)
                continue
            if known > sequence.capacity:
                if ahead and not self._pool.fits(self._groups):
                    return None
                # An older sequence may have preempted this one earlier in this loop.
                if not sequence.running or not self._grow(sequence, known):
                    continue
            pieces.append(Piece(sequence, 1))
            budget -= 1
        return budget

    def _with_drafts(
        self, pieces: list[Piece], budget: int, drafter: DraftSource
    ) -> tuple[list[Piece], int]:
        """Add drafts to the pieces of decoding sequences, and give them blocks for these if some
        are free. Returns the pieces and the budget that is left. A sequence whose last token is
        awaited gets none. Each draft is sampled after, and memory is planned for the logits of as
        many samples as sequences, or of PROMPT_ROWS."""
        room = min(budget, max(self.limits.seqs, PROMPT_ROWS) - len(pieces))
        known = [place for place, piece in enumerate(pieces) if piece.sequence.awaited_sample < 0]
        drafts = drafter.draft([pieces[place].sequence for place in known])
        for place, ids in zip(known, drafts, strict=True):
            sequence = pieces[place].sequence
            wanted = sequence.known + min(len(ids), room)
            while wanted > sequence.capacity and self._pool.fits(self._groups + self.spare):
                sequence.add_blocks(self._pool.allocate(self._groups))
            number = min(wanted, sequence.capacity) - sequence.known
            if number > 0:
                pieces[place] = Piece(sequence, 1 + number, ids[:number])
                room, budget = room - number, budget - number
        return pieces, budget

    def _schedule_filling(self, pieces: list[Piece], filling: list[Sequence], budget: int) -> int:
        for sequence in filling:
            if budget == 0:
                break
            if sequence.running:
                number = _piece_of(sequence, budget)
                pieces.append(Piece(sequence, number))
                budget -= number
        return budget

    def _schedule_waiting(self, pieces: list[Piece], budget: int) -> None:
        while budget and self.waiting and len(self.running) < self.limits.seqs:
            admitted = self._admit_next()
            if admitted is None:
                return
            number = _piece_of(admitted, budget)
            pieces.append(Piece(admitted, number))
            budget -= number

    def _admit_next(self) -> Sequence | None:
        if not self._blocked:
            head = self.waiting[0]
            if self._admit(head):
                return head
            self._blocked = True
        # A sequence that holds its blocks takes none that the oldest one needs.
        return next((holder for holder in self._holding if self._admit(holder)), None)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence blocks for all its known tokens, cached blocks first, and run it.
        Returns False, without any effect, if the blocks are not free."""
        size, held = self._block_size, sequence.blocks
        hashes: Seq[BlockHash] = ()
        if not held and not sequence.state.asks_prompt:
            # Leave at least one token to compute: sampling needs the logits of the last one.
            hashes = sequence.hashes_of((sequence.known - 1) // size)
        new = blocks_for(sequence.known, size) - len(held) // self._groups
        taken = self._pool.take(new, hashes, spare=0 if held else self.spare)
        if taken is None:
            return False
        if held:
            self._holding.remove(sequence)
            sequence.add_blocks(taken.blocks)
        else:
            cached, cached_or_loaded = taken.cached * size, (taken.cached + taken.loaded) * size
            copied = self._copy_tail(sequence, taken.blocks, cached_or_loaded)
            sequence.set_blocks(
                taken.blocks, [(0, cached_or_loaded + copied)] if cached_or_loaded + copied else []
            )
            sequence.state.record_sources(
                sequence, cached=[(0, cached)], host=[(cached, cached_or_loaded)]
            )
        self.waiting.remove(sequence)
        sequence.running, sequence.blocks_id = True, next(self._blocks_ids)
        insort(self.running, sequence, key=_age)
        return True

    def _copy_tail(self, sequence: Sequence, blocks: Seq[BlockId], found: int) -> int:
        """Copy the prompt's last block, which is partly filled, from the request's leader to
        another choice whose first `found` tokens are cached. So the choices compute the prompt's
        tail once. Returns the number of tokens in the copy."""
        state, leader = sequence.state, sequence.state.leader
        tail, first = state.prompt_len - found, found // self._block_size * self._groups
        if leader is None or leader is sequence or leader.computed < state.prompt_len:
            return 0
        sources = leader.blocks[first : first + self._groups]
        # 0: the leader's window has left the block.
        if not 0 < tail < self._block_size or 0 in sources:
            return 0
        targets = blocks[first : first + self._groups]
        self.copies.append(TailCopy(sequence, found, sources, targets))
        return tail

    def drop_copies(self) -> None:
        """The copies could not be made: the choices compute the prompt's tail themselves."""
        for copy in self.copies:
            copy.sequence.computed = copy.sequence.launched = copy.found
        self.copies = []

    def _clear_the_way(self) -> bool:
        """Preempt the youngest waiting sequence that holds blocks, in favour of the oldest waiting
        one. Waiting sequences can hold the blocks that each other needs, and then nothing runs.
        Returns False if there is no sequence to preempt."""
        if not self._blocked or not self._holding or self._holding[-1] is self.waiting[0]:
            return False
        self._preempt(self._holding[-1])
        self._blocked = False
        return True

    def _grow(self, sequence: Sequence, known: int) -> bool:
        """Give a running sequence the blocks it needs for `known` tokens, at most those of one span
        more than it has. Preempts the youngest sequences until they are free. Returns False if the
        sequence itself was preempted."""
        if known <= sequence.capacity:
            return True
        while not self._pool.fits(self._groups):
            victim = self._holding[-1] if self._holding else self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.add_blocks(self._pool.allocate(self._groups))
        return True

    def shrink(self, tokens: int) -> Sequence | None:
        """Make the next steps smaller, because the device lacks memory for one of `tokens` tokens.
        Call it while no step is in flight. Returns None; or, if there is no smaller step, the
        sequence that runs alone."""
        if not self.limits.lower(tokens, len(self.running)):
            return self.running[0]
        if len(self.running) > self.limits.seqs:
            self._preempt(self.running[-1])
        return None

    def _preempt(self, victim: Sequence) -> None:
        """Release a sequence's blocks and queue it again. It recomputes the tokens whose blocks are
        no longer cached when it is admitted."""
        self._pool.release(self.remove(victim))
        self.preemptions += 1
        self.add(victim)


def _piece_of(sequence: Sequence, budget: int) -> int:
    """The number of tokens of a sequence that a step computes."""
    return min(sequence.due, budget, PUBLISHED_PIECE if sequence.state.track else budget)

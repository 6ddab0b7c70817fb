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
   They need no new blocks, because a sequence is admitted with blocks for all its known tokens.
   See `prompt_pieces` for the limits of a piece.
3. Waiting sequences, oldest first, unless this step preempted a sequence. After the first one that
   does not fit, only sequences that already hold their blocks are admitted. If a limit of partly
   computed prompts is reached, sequences that it does not concern go first.

"Oldest" and "youngest" are by `Sequence.order`: with the policy `priority`, a sequence is before
all whose request's priority is a larger number. The policy then preempts the last sequence of all,
waiting or running.

A step may be scheduled ahead, while the previous step is in flight. A sequence whose next token
that step samples counts as having the token. Two kinds of sequences are left out: those whose next
row depends on the token's value, and those that end with it. One token of budget is reserved for
each, and for each beam that waits for others. Scheduling ahead never preempts, because rows in
flight use the blocks. If a block is missing, the schedule is empty, and the next step is scheduled
after the one in flight is read.

A beam that waits for the request's other beams (see Sequence.idle) computes nothing. Its KV is not
needed until they have their tokens, so it is preempted for a waiting sequence if nothing else runs.
A fork of a beam shares the beam's full blocks and copies the last one, if these are still there;
otherwise it is admitted like any other sequence.

Pinned prefixes (see `kv.pins`) give way to a sequence that would not fit beside them even alone.

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

from baton_engine.config.scheduling_options import DEFAULT_SCHEDULING, SchedulingOptions
from baton_engine.config.step_sizes import PROMPT_ROWS
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.pins import Pins
from baton_engine.scheduling.draft_source import DraftSource
from baton_engine.scheduling.prompt_pieces import PromptPieces
from baton_engine.scheduling.sequence import Sequence, blocks_for
from baton_engine.scheduling.step_limits import StepLimits
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.layout import KVLayout

# While sequences run, an admission leaves 1/WATERMARK of the pool free. Otherwise a sequence could
# be admitted and then preempted as soon as a running one needs a block.
WATERMARK = 100


class Piece(msgspec.Struct, frozen=True, gc=False):
    """The `count` tokens of a sequence that this step computes, from `sequence.launched` on: known
    ones, and then `drafts`. A piece ends at the next landed run at the latest."""

    sequence: Sequence
    count: int
    drafts: Seq[int] = ()


@dataclass(frozen=True, slots=True)
class TailCopy:
    """Copy the blocks of a prompt's or beam's tail to a sequence that has `found` tokens without
    it."""

    sequence: Sequence
    found: int
    sources: Seq[BlockId]
    targets: Seq[BlockId]


def _order(sequence: Sequence) -> tuple[int, ...]:
    return sequence.order


class Scheduler:
    """Queues of sequences over one block pool.

    `waiting` and `running` are sorted by `Sequence.order`. `preemptions` counts preemptions since
    the start. A subclass (see --scheduler-cls) may order sequences in another way.
    """

    def __init__(
        self,
        pool: BlockPool,
        layout: KVLayout,
        *,
        max_batched_tokens: int,
        max_num_seqs: int,
        options: SchedulingOptions = DEFAULT_SCHEDULING,
        uncut: bool = False,
    ) -> None:
        """With `uncut`, each prompt is computed in one step."""
        self._pool = pool
        self._uncut = uncut
        self._options = options
        self._by_priority = options.scheduling_policy == "priority"
        self.drafter: DraftSource | None = None  # set by the engine
        self.pins = Pins(pool, layout.num_groups, options.max_pinned_fraction)
        self._block_size = layout.block_size
        self._groups = layout.num_groups
        self.limits = StepLimits(max_batched_tokens, max_num_seqs)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._holding: list[Sequence] = []  # waiting sequences that hold blocks, oldest first
        self.preemptions = 0
        self.preempted: list[Sequence] = []  # by the last schedule(), in order
        # True if the last step that was not scheduled ahead preempted a sequence, or ran nothing
        # because blocks were short.
        self.starved = False
        self._blocked = False  # the oldest waiting sequence did not fit in the last step
        self._blocks_ids = count(1)
        self.copies: list[TailCopy] = []  # to make before the step that was just scheduled

    # --- queues -------------------------------------------------------------------------------

    def order_of(self, sequence: Sequence) -> tuple[int, ...]:
        """The order of a sequence, lowest first; must differ from all others'. Asked whenever it is
        queued."""
        priority = sequence.state.request.priority if self._by_priority else 0
        return (priority, *sequence.key)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence in order. A sequence that has blocks keeps them while it waits."""
        sequence.running = False
        sequence.order = self.order_of(sequence)
        insort(self.waiting, sequence, key=_order)
        if sequence.blocks:
            insort(self._holding, sequence, key=_order)

    def remove(self, sequence: Sequence) -> list[BlockId]:
        """Remove a sequence and return its blocks. They are still referenced; the caller releases
        them."""
        if sequence.running:
            self.running.remove(sequence)
            sequence.running = False
        elif not sequence.idle:  # otherwise it was preempted
            self.waiting.remove(sequence)
            if sequence.blocks:
                self._holding.remove(sequence)
        return sequence.clear_blocks()

    def resume(self, sequence: Sequence) -> None:
        """A beam has its next token, or is new."""
        sequence.idle = False
        if not sequence.running:
            self.add(sequence)

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
        self.preempted = []
        budget = self._schedule_decoding(pieces, filling, ahead=ahead)
        if budget is None:
            return []
        if self.drafter is not None and not self.preempted:
            pieces, budget = self._with_drafts(pieces, budget, self.drafter)
        alone = len(self.running) + len(self.waiting) == 1
        prompts = PromptPieces(self._options, alone=alone, uncut=self._uncut)
        budget = self._schedule_filling(pieces, filling, budget, prompts)
        if not self.preempted:
            self._schedule_waiting(pieces, budget, prompts)
            while not (pieces or ahead) and self._clear_the_way():
                room = max(0, self.limits.tokens - len(self.running))
                self._schedule_waiting(pieces, room, prompts)
        if not ahead:
            self.starved = bool(self.preempted) or (self._blocked and not pieces)
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
            if sequence.idle:
                budget -= 1
                continue
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

    def _schedule_filling(
        self, pieces: list[Piece], filling: list[Sequence], budget: int, prompts: PromptPieces
    ) -> int:
        for sequence in filling:
            if budget == 0:
                break
            if sequence.running:
                number = prompts.take(
                    sequence, sequence.due, budget, first=self._is_first(pieces, budget)
                )
                if number:
                    pieces.append(Piece(sequence, number))
                    budget -= number
                elif prompts.whole:
                    return 0  # later ones would take the room that it waits for
        return budget

    def _is_first(self, pieces: Seq[Piece], budget: int) -> bool:
        """Whether a piece would have the step alone: no sequence in flight reserves budget."""
        return not pieces and budget >= self.limits.tokens

    def _schedule_waiting(self, pieces: list[Piece], budget: int, prompts: PromptPieces) -> None:
        at = 0  # of the first waiting sequence that no limit of prompts excludes
        while budget and at < len(self.waiting) and len(self.running) < self.limits.seqs:
            if prompts.limited and not self._gets_tokens(self.waiting[at], budget, prompts, pieces):
                if prompts.whole:
                    return
                at += 1
                continue
            admitted = self._admit_next(at, budget, prompts, pieces)
            if admitted is None:
                return
            number = prompts.take(
                admitted, admitted.due, budget, first=self._is_first(pieces, budget)
            )
            pieces.append(Piece(admitted, number))
            budget -= number

    def _gets_tokens(
        self, sequence: Sequence, budget: int, prompts: PromptPieces, pieces: Seq[Piece]
    ) -> bool:
        """Whether a waiting sequence would get tokens in this step if it were admitted."""
        due = sequence.due
        if not sequence.blocks:
            due -= self._pool.cached(self._findable(sequence)) * self._block_size
        return prompts.size(sequence, due, budget, first=self._is_first(pieces, budget)) > 0

    def _admit_next(
        self, at: int, budget: int, prompts: PromptPieces, pieces: Seq[Piece]
    ) -> Sequence | None:
        if not self._blocked:
            head = self.waiting[at]
            if self._admit(head):
                return head
            self._blocked = True
        # A sequence that holds its blocks takes none that the oldest one needs.
        for holder in self._holding:
            if prompts.limited and not self._gets_tokens(holder, budget, prompts, pieces):
                continue
            if self._admit(holder):
                return holder
        return None

    def _findable(self, sequence: Sequence) -> Seq[BlockHash]:
        """Hashes of the blocks that a waiting sequence without blocks may take from the cache. At
        least one token is left to compute: sampling needs the logits of the last one."""
        if sequence.state.reads_no_cache:
            return ()
        return sequence.hashes_of((sequence.known - 1) // self._block_size)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence blocks for all its known tokens, cached blocks first, and run it.
        Returns False, without any effect, if the blocks are not free."""
        size, held = self._block_size, sequence.blocks
        if self._admit_fork(sequence):
            return True
        hashes: Seq[BlockHash] = () if held else self._findable(sequence)
        new = blocks_for(sequence.known, size) - len(held) // self._groups
        spare = 0 if held else self.spare
        taken = self._pool.take(new, hashes, spare=spare)
        if taken is None and self.pins.names:
            self.pins.make_room(blocks_for(sequence.known, size), self._findable(sequence))
            taken = self._pool.take(new, hashes, spare=spare)
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
        self._run(sequence)
        return True

    def _run(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        sequence.forked_from = None
        sequence.running, sequence.blocks_id = True, next(self._blocks_ids)
        insort(self.running, sequence, key=_order)

    def _admit_fork(self, sequence: Sequence) -> bool:
        """Run a fork of a beam: share the beam's full blocks, copy the last one if it is partly
        filled, and take blocks for the fork's own token. Returns False, without any effect, unless
        the beam still has these blocks and new ones are free."""
        parent, computed = sequence.forked_from, sequence.known - 1
        if parent is None or parent.computed < computed or not self._pool.fits(self._groups):
            return False
        full, groups = computed // self._block_size, self._groups
        layout = sequence.state.layout
        seen_from = layout.first_complete(computed // layout.chunk_tokens) * layout.chunk_blocks
        sources = parent.blocks[full * groups : (full + 1) * groups]
        if parent.released_spans > seen_from or 0 in sources:
            return False  # a window has left blocks that the fork sees
        shared = parent.blocks[: full * groups]
        self._pool.touch(id for id in shared if id)
        targets = self._pool.allocate(groups)
        sequence.set_blocks([*shared, *targets], [(0, computed)])
        sequence.released_spans = parent.released_spans
        if computed % self._block_size:
            found = full * self._block_size
            self.copies.append(TailCopy(sequence, found, sources, targets))
        self._run(sequence)
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
        """Preempt the youngest waiting sequence that holds blocks, or else the youngest beam that
        waits for others, in favour of the oldest waiting one. Waiting sequences can hold the blocks
        that each other needs, and then nothing runs. Returns False if there is no sequence to
        preempt."""
        if self._blocked and self._holding and self._holding[-1] is not self.waiting[0]:
            victim = self._holding[-1]
        elif self.waiting and self.running and self.running[-1].idle:
            victim = self.running[-1]  # all are idle if nothing runs
        else:
            return False
        self._preempt(victim)
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
            if self._by_priority:
                victim = max(victim, self.running[-1], key=_order)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.add_blocks(self._pool.allocate(self._groups))
        return True

    def shrink(self, tokens: int) -> Sequence | None:
        """Make the next steps smaller, because the device lacks memory for one of `tokens` tokens.
        Call it while no step is in flight. Returns None; or, if there is no smaller step, the
        sequence that runs alone."""
        if self._uncut and tokens == self.running[0].known:
            return self.running[0]
        if not self.limits.lower(tokens, len(self.running)):
            return self.running[0]
        if len(self.running) > self.limits.seqs:
            self._preempt(self.running[-1])
        return None

    def _preempt(self, victim: Sequence) -> None:
        """Release a sequence's blocks and queue it again. It recomputes the tokens whose blocks are
        no longer cached when it is admitted."""
        victim.note_eviction()
        self._pool.release(self.remove(victim))
        self.preemptions += 1
        self.preempted.append(victim)
        if not victim.idle:
            self.add(victim)

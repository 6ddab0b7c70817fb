"""HeadDrafts: a proposer that drafts one token after the other with a head of the target.

In: the target's steps with the hidden states of their tokens, and sequences. Out: drafts.

The head's KV of a position has the place of the target's: the same block and the same offset, in a
pool of its own with as many blocks. So it needs no allocation, and ends with the target's. It is
the KV of what the target computed at the position and of the token after it. It is computed when
the sequence gets drafts, or after a step of the target if much is lacking, as of prompts.

The head attends only to positions whose states this node had: those that the sequence computed
since it got its blocks, and cached blocks before them that are full of the head's KV. So after a
hand-off or a failover, drafts are right less often. Answers never depend on them.

Shapes: T tokens of a step, C numbers that the target returns of a token, D hidden size of the head,
R rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch

from baton_engine.attention.interface import AttentionBackend, StepBatch
from baton_engine.config.step_sizes import KEPT_POSITIONS
from baton_engine.interface import PADDING, Row
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.kv.staging import stage
from baton_engine.layers.ops import Ops
from baton_engine.models.heads.head import Head
from baton_engine.runner.draft_samples import by_sequence, draft_sample, sample_drafts
from baton_engine.runner.input_batch import InputBatch, StepInput
from baton_engine.runner.input_buffers import to_device
from baton_engine.runner.int_arrays import NONE, Ints
from baton_engine.runner.kept_states import (
    AWAITED,
    KeptStates,
    States,
    gathered,
    known_tokens,
)
from baton_engine.scheduling.sequence import Sequence
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.layout import KVLayout

# A sequence that lacks the KV of this many positions computes them also if it gets no draft: half
# of those that may be kept, as the next row may have many more.
AT_LEAST = KEPT_POSITIONS // 2
Pieces = list[tuple[torch.Tensor, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """Limits of the target's engine: blocks of its pool, sequences and tokens of a step; and the
    most drafts of a sequence."""

    num_blocks: int
    max_num_seqs: int
    max_batched_tokens: int
    most_drafts: int

    def own_blocks(self, block_size: int) -> int:
        """Blocks of a sequence for drafts beyond the target's blocks."""
        return -(-self.most_drafts // block_size)

    def all_blocks(self, block_size: int) -> int:
        """Blocks of the head's pool, without padding."""
        return self.num_blocks + self.max_num_seqs * self.own_blocks(block_size)


@dataclass(frozen=True, slots=True)
class HeadRow:
    """Tokens of one sequence to compute: `row` counts positions from `first` on."""

    row: Row
    first: int


class HeadDrafts:
    """`layout` is that of the target's pool, and `memory` the head's."""

    def __init__(
        self,
        head: Head,
        ops: Ops,
        memory: TorchMemory,
        attention: AttentionBackend,
        layout: KVLayout,
        sizes: HeadSizes,
    ) -> None:
        self._head, self._ops = head, ops
        self._memory, self._attention = memory, attention
        self._device = memory.pool.device
        self._sizes = sizes
        self._size, self._groups = layout.block_size, layout.num_groups
        self._windowed = not layout.num_full_groups
        self._batch = InputBatch(memory.layout)
        self._own = sizes.own_blocks(layout.block_size)
        # The hash of the tokens up to the end of a block that is full of the head's KV.
        self._names: dict[BlockId, BlockHash] = {}
        self.kept = KeptStates(layout.block_size, sizes.max_num_seqs)

    @property
    def kv_bytes(self) -> int:
        return self._memory.pool.nbytes

    # --- the target's steps -------------------------------------------------------------------

    @torch.inference_mode()
    def take(self, step: StepInput, hidden_TC: torch.Tensor) -> None:
        """Keep the states of a step of the target, and compute the tokens of prompts (see
        model_runner.HiddenTap)."""
        starts = step.arrays.query_starts_R1.tolist()
        taken: list[tuple[Row, States, int, int]] = []
        parts: list[Ints] = []
        count = 0
        for at, row in zip(starts, step.rows, strict=False):
            if not row.speculates:
                continue
            states, position = self.kept.begin_row(row)
            taken.append((row, states, position, count))
            skipped, number = position - row.start, row.start + len(row.tokens) - position
            parts.append(np.arange(at + skipped, at + skipped + number))
            count += number
        if not count:
            return
        states_TD = self._head.states(hidden_TC[stage(np.concatenate(parts), self._device)])
        self._compute_prompts(taken, states_TD)
        self._keep(taken, states_TD)

    def _compute_prompts(
        self, taken: Seq[tuple[Row, States, int, int]], states_TD: torch.Tensor
    ) -> None:
        rows: list[HeadRow] = []
        pieces: list[Pieces] = []
        for row, states, position, at in taken:
            end = row.start + known_tokens(row) - 1
            if end - states.done < AT_LEAST:
                continue
            spans = self._spans(row.blocks, states)
            begin = states.done
            tokens = states.tokens(begin + 1, position)
            tokens += row.tokens[max(begin + 1, position) - row.start : end + 1 - row.start]
            if begin >= end or AWAITED in tokens:
                continue
            before = states.pieces(begin, position)
            here = [
                (states_TD, at + index)
                for index in range(max(begin, position) - position, end - position)
            ]
            rows.append(HeadRow(Row(tokens, begin - states.first, spans), states.first))
            pieces.append(before + here)
            states.done = end
        if rows:
            self._compute(rows, pieces)

    def _keep(self, taken: Seq[tuple[Row, States, int, int]], states_TD: torch.Tensor) -> None:
        """Keep copies of the states that are still needed: the others use much more memory."""
        needed: list[Ints] = []
        count = 0
        adds: list[tuple[States, int, Seq[int]]] = []
        for row, states, position, at in taken:
            end = row.start + len(row.tokens)
            if states.done > position:
                states.drop(states.done)
                at, position = at + states.done - position, states.done
                if not states.pieces(states.begin, states.end):
                    states.begin = position
            tokens = row.tokens[position - row.start :]
            if row.awaited_sample is not None and position < end:
                tokens = (*tokens[:-1], AWAITED)
            adds.append((states, count, tokens))
            needed.append(np.arange(at, at + end - position))
            count += end - position
        kept_ND = states_TD
        if count < len(states_TD):
            kept_ND = states_TD[stage(np.concatenate(needed), self._device)]
        for states, begin, tokens in adds:
            states.add(kept_ND, begin, tokens)

    def _spans(self, blocks: Seq[BlockId], states: States) -> list[BlockId]:
        """The blocks of the head's context. It begins later if a window has left the first ones."""
        spans = list(blocks[:: self._groups])
        if self._windowed:
            least = states.first // self._size
            while least < len(spans) and spans[least] == PADDING:
                least += 1
            states.first = least * self._size
            states.done = max(states.done, states.first)
        return spans[states.first // self._size :]

    # --- drafts -------------------------------------------------------------------------------

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self.kept.forget(sequence)

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], most: Seq[int]) -> list[Seq[int]]:
        drafts: list[Seq[int]] = [()] * len(sequences)
        asked: list[int] = []
        rows: list[HeadRow] = []
        pieces: list[Pieces] = []
        room = self._sizes.max_batched_tokens
        for place, sequence in enumerate(sequences):
            made = self._first_row(sequence, len(asked), room)
            if made is None:
                continue
            room -= len(made[1])
            asked.append(place)
            rows.append(made[0])
            pieces.append(made[1])
        if not asked:
            return drafts
        chosen, lengths = [sequences[place] for place in asked], [most[place] for place in asked]
        try:
            found = self._chain(chosen, lengths, rows, pieces)
        except torch.OutOfMemoryError:
            for sequence in chosen:  # the head's KV may lack tokens; the target's step may fit
                self.kept.forget(sequence)
            return drafts
        for place, ids in zip(asked, found, strict=True):
            drafts[place] = ids
            self._name_blocks(sequences[place])
        return drafts

    def _find_context(self, sequence: Sequence, states: States) -> None:
        """Begin the context earlier if the blocks before it have the head's KV, of this sequence
        before it was preempted, or of another one with the same tokens."""
        span = states.first // self._size
        hashes = sequence.hashes_of(span)
        while (
            span and self._names.get(sequence.blocks[(span - 1) * self._groups]) == hashes[span - 1]
        ):
            span -= 1
        states.first, states.named = span * self._size, span

    def _name_blocks(self, sequence: Sequence) -> None:
        """Name the blocks that are full of the head's KV as the target's are named."""
        states = self.kept.of(sequence)
        if states is None:
            return
        full = states.done // self._size
        begin = max(states.named, states.first // self._size)
        for span in range(begin, full):
            self._names[sequence.blocks[span * self._groups]] = sequence.hash_spans(full)[span]
        states.named = max(states.named, full)

    def _forget_names(self, rows: Seq[HeadRow]) -> None:
        """These rows write to their blocks."""
        size = self._size
        for row in (each.row for each in rows):
            end = row.start + len(row.tokens)
            for block in row.blocks[row.start // size : -(-end // size)]:
                self._names.pop(block, None)

    def _first_row(
        self, sequence: Sequence, number: int, room: int
    ) -> tuple[HeadRow, Pieces] | None:
        """What to compute for the first draft of a step's sequence number `number`: all that is not
        yet, and at least the last position, whose output is the draft. None if its state is not
        here, or if that is more than `room` tokens."""
        states, last = self.kept.of(sequence), sequence.known - 2
        if states is None or states.first > last:
            return None
        states.cut(last + 1)
        if states.named < 0:
            self._find_context(sequence, states)
        spans = self._spans(sequence.blocks, states)
        begin = max(min(states.done, last), states.first)
        if begin < states.begin or states.end <= last or begin > last or last - begin >= room:
            return None
        tokens = sequence.tokens[begin + 1 :]
        own = self._sizes.num_blocks + 1 + number * self._own
        spans += [BlockId(own + index) for index in range(self._own)]
        pieces = states.pieces(begin, last + 1)
        states.done = last + 1
        states.drop(last)
        return HeadRow(Row(tokens, begin - states.first, spans), states.first), pieces

    def _chain(
        self, sequences: Seq[Sequence], most: Seq[int], rows: list[HeadRow], pieces: list[Pieces]
    ) -> list[list[int]]:
        alive = list(range(len(sequences)))
        states_RD = self._compute(rows, pieces)
        ids_R = self._sampled(states_RD, sequences, 0)
        found = [(alive, ids_R)]
        for number in range(1, max(most)):
            before = [row for row, place in enumerate(alive) if most[place] > number]
            alive = [alive[row] for row in before]
            rows = [_next_row(rows[row], row) for row in before]
            states_RD = states_RD[stage(np.array(before), self._device)]
            states_RD = self._compute(rows, states_RD, ids_R)
            ids_R = self._sampled(states_RD, [sequences[place] for place in alive], number)
            found.append((alive, ids_R))
        return by_sequence(found, len(sequences))

    def _sampled(
        self, states_RD: torch.Tensor, sequences: Seq[Sequence], number: int
    ) -> torch.Tensor:
        samples = [draft_sample(sequence, number) for sequence in sequences]
        return sample_drafts(self._head.logits(states_RD), samples, self._ops)

    def _compute(
        self,
        rows: Seq[HeadRow],
        states: Seq[Pieces] | torch.Tensor,
        sampled_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute rows from the states of their tokens: of each row's, or one of each row [R, D].
        Awaited tokens are among the ids `sampled_R`. Returns what the last token of each row gives
        [R, D], in the order of the call."""
        places = NONE if sampled_R is None else np.arange(len(sampled_R))
        step = self._batch.take([each.row for each in rows], places)
        if step.begun and not self._attention.recordable:
            self._memory.clear(step.begun)  # see Forward.run()
        self._forget_names(rows)
        order_R = np.argsort(step.line_of_R)
        if isinstance(states, torch.Tensor):
            states_TD = states[stage(order_R, self._device)]
        else:
            states_TD = gathered([each for row in order_R.tolist() for each in states[row]])
        arrays = step.arrays
        device = to_device(arrays, self._device)
        if sampled_R is not None:
            self._ops.put_sampled(device.tokens_T, device.awaits_T, sampled_R)
        longest = int(np.diff(arrays.query_starts_R1).max()), int(arrays.seq_lens_R.max())
        attention = self._attention.begin(StepBatch(arrays, device, *longest))
        firsts_R = np.array([rows[row].first for row in order_R.tolist()], np.int32)
        firsts_T = firsts_R.repeat(np.diff(arrays.query_starts_R1))
        positions_T = device.positions_T + stage(firsts_T, self._device)
        computed_TD = self._head.forward(states_TD, device.tokens_T, positions_T, attention)
        ends_R = arrays.query_starts_R1[1:].astype(np.int64)[step.line_of_R]
        return computed_TD[stage(ends_R - 1, self._device)]


def _next_row(before: HeadRow, awaited: int) -> HeadRow:
    """The row of the draft that is sampled after this one, as number `awaited` of its step."""
    row = before.row
    end = row.start + len(row.tokens)
    return replace(before, row=Row((0,), end, row.blocks, awaited_sample=awaited))

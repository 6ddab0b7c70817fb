"""DraftModel: a proposer with another, smaller model of the same tokenizer.

In: sequences. Out: for each the tokens that the draft model generates after them. It samples with
the sequence's own parameters and noise: where both models find the same tokens likely, they choose
the same one.

The draft model has KV of its own (see `draft_kv`), which never travels. Where tokens lack it, it
is computed here: after a hand-off, a preemption, or steps without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from baton_engine.errors import OutOfMemory
from baton_engine.interface import ListedIds, Row, Runner, Sample
from baton_engine.scheduling.sequence import Sequence
from baton_engine.speculation.draft_kv import DraftBlocks, DraftKV, Key
from baton_engine.speculation.draft_params import draft_params
from baton_engine.speculation.step_clock import StepClock
from baton_protocol.sampling import SamplingParams

# A sequence that lacks KV of more tokens catches up before it gets drafts. The time for these
# tokens says nothing about later steps.
LAG = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """The most tokens of a launch, the most tokens of a sequence, and the draft model's ids."""

    max_batched_tokens: int
    max_model_len: int
    vocab_size: int


@dataclass(slots=True)
class _Draft:
    """A sequence's drafts while they are made, at most `most`."""

    sequence: Sequence
    held: DraftBlocks
    most: int
    ids: list[int] = field(default_factory=list)

    @property
    def lag(self) -> int:
        """Number of known tokens without KV."""
        return self.sequence.known - self.held.computed

    @property
    def goes_on(self) -> bool:
        return len(self.ids) < self.most and self.ids[-1] not in self.sequence.state.stops


class DraftModel:
    """`clock` is stopped while sequences catch up."""

    def __init__(
        self, runner: Runner, kv: DraftKV, limits: DraftLimits, clock: StepClock | None = None
    ) -> None:
        self._runner = runner
        self.kv = kv
        self._limits = limits
        self._lag = min(LAG, limits.max_batched_tokens)
        self.clock = clock or StepClock()
        self._asks: dict[Key, tuple[SamplingParams, ListedIds]] = {}

    def propose(self, sequences: Seq[Sequence], most: Seq[int]) -> list[Seq[int]]:
        """None for a sequence for which blocks are short, or which lacks KV of too many tokens for
        this step. Raises nothing if the device lacks memory: then there are fewer drafts."""
        drafts = self._begin(sequences, most)
        try:
            self._catch_up([draft for draft in drafts.values() if draft.lag > self._lag])
            self._draft([draft for draft in drafts.values() if draft.lag <= self._lag])
        except OutOfMemory:
            pass  # the target's step may fit
        return [drafts[each.key].ids if each.key in drafts else () for each in sequences]

    def forget(self, sequence: Sequence) -> None:
        self.kv.forget(sequence)
        self._asks.pop(sequence.key, None)

    def _begin(self, sequences: Seq[Sequence], most: Seq[int]) -> dict[Key, _Draft]:
        """The drafts to make, none of them made, of the sequences that have blocks for them. The
        last draft needs no KV."""
        longest = self._limits.max_model_len
        lengths = [
            min(length, longest - sequence.known + 1)
            for sequence, length in zip(sequences, most, strict=True)
        ]
        asked = [
            (sequence, length)
            for sequence, length in zip(sequences, lengths, strict=True)
            if length > 0
        ]
        held = self.kv.take(
            [sequence for sequence, _ in asked],
            [sequence.known + length - 1 for sequence, length in asked],
        )
        return {
            sequence.key: _Draft(sequence, blocks, length)
            for (sequence, length), blocks in zip(asked, held, strict=True)
            if blocks is not None and self._knows(sequence.tokens[blocks.computed :])
        }

    def _knows(self, ids: Seq[int]) -> bool:
        """Whether the draft model has all these ids."""
        return max(ids) < self._limits.vocab_size

    def _catch_up(self, late: list[_Draft]) -> None:
        """Compute KV of the known tokens except the last, as far as one launch goes. Those that
        lack least come first."""
        room, rows = self._limits.max_batched_tokens, []
        counts: list[tuple[_Draft, int]] = []
        for draft in sorted(late, key=lambda each: each.lag):
            count = min(draft.lag - 1, room)
            if count:
                counts.append((draft, count))
                rows.append(self._row(draft, draft.held.computed + count))
                room -= count
        if not rows:
            return
        with self.clock.stopped():
            self._runner.launch(rows).read()
        for draft, count in counts:
            self.kv.note_computed(draft.sequence, count)

    def _draft(self, drafts: list[_Draft]) -> None:
        """Sample the first draft of each sequence after its known tokens, then the next ones."""
        room, rows, begun = self._limits.max_batched_tokens, [], []
        for draft in drafts:
            if draft.lag <= room:
                known = draft.sequence.known
                rows.append(self._row(draft, known, (self._sample(draft.sequence, known),)))
                begun.append(draft)
                room -= draft.lag
        while rows:
            results = self._runner.launch(rows).read()
            for draft, row, result in zip(begun, rows, results, strict=True):
                computed = draft.ids[-1:]
                self.kv.note_computed(draft.sequence, len(row.tokens), computed)
                draft.ids.append(result.samples[0].id)
            begun = [draft for draft in begun if draft.goes_on]
            rows = [self._next_row(draft) for draft in begun]

    def _next_row(self, draft: _Draft) -> Row:
        held, position = draft.held, draft.held.computed + 1
        samples = (self._sample(draft.sequence, position),)
        return Row(draft.ids[-1:], held.computed, held.blocks, samples, blocks_id=held.blocks_id)

    @staticmethod
    def _row(draft: _Draft, end: int, samples: tuple[Sample, ...] = ()) -> Row:
        """Compute the known tokens up to `end` that lack KV."""
        held = draft.held
        return Row(
            draft.sequence.tokens[held.computed : end],
            held.computed,
            held.blocks,
            samples,
            blocks_id=held.blocks_id,
        )

    def _sample(self, sequence: Sequence, position: int) -> Sample:
        """Without bans, penalties and grammar: with them, drafts would be right more often, but
        each would take longer."""
        ask = self._asks.get(sequence.key)
        if ask is None:
            params = draft_params(sequence.state.params, self._limits.vocab_size)
            ask = self._asks[sequence.key] = params, ListedIds.of(params)
        return Sample(sequence.choice, position, ask[0], listed=ask[1])

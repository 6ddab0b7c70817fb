"""MedusaDrafts: a proposer that drafts several tokens from one hidden state of the target.

In: the target's steps with the hidden states of their tokens, and sequences. Out: drafts. The heads
need only the state of a sequence's last computed position, so nothing is lost by a hand-off.

Shapes: T tokens of a step, C numbers that the target returns of a token, D hidden size, S rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from baton_engine.kv.staging import stage
from baton_engine.layers.ops import Ops
from baton_engine.models.heads.medusa import Medusa
from baton_engine.runner.draft_samples import by_sequence, draft_sample, sample_drafts
from baton_engine.runner.input_batch import StepInput
from baton_engine.runner.kept_states import KeptStates, States, gathered, known_tokens
from baton_engine.scheduling.sequence import Sequence


class MedusaDrafts:
    def __init__(self, heads: Medusa, ops: Ops, max_num_seqs: int) -> None:
        self._heads, self._ops = heads, ops
        self.kept = KeptStates(1, max_num_seqs)

    @torch.inference_mode()
    def take(self, step: StepInput, hidden_TC: torch.Tensor) -> None:
        """Keep the states of a step of the target, of prompts only the last one (see
        model_runner.HiddenTap)."""
        taken: list[tuple[States, int, Seq[int]]] = []
        needed: list[int] = []
        for at, row in zip(step.arrays.query_starts_R1.tolist(), step.rows, strict=False):
            if not row.speculates:
                continue
            states, _ = self.kept.begin_row(row)
            skipped = max(0, known_tokens(row) - 1)
            states.drop(states.end)
            states.begin = row.start + skipped
            taken.append((states, len(needed), row.tokens[skipped:]))
            needed += range(at + skipped, at + len(row.tokens))
        if not needed:
            return
        kept_SD = self._heads.states(hidden_TC[stage(np.array(needed), hidden_TC.device)])
        for states, begin, tokens in taken:
            states.add(kept_SD, begin, tokens)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self.kept.forget(sequence)

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], most: Seq[int]) -> list[Seq[int]]:
        asked, pieces = [], []
        for place, sequence in enumerate(sequences):
            states, last = self.kept.of(sequence), sequence.known - 2
            if states is not None and states.begin <= last < states.end:
                asked.append(place)
                pieces += states.pieces(last, last + 1)
        if not asked:
            return [()] * len(sequences)
        states_SD = gathered(pieces)
        found = []
        for head in range(max(most[place] for place in asked)):
            rows = [row for row, place in enumerate(asked) if most[place] > head]
            some_SD = states_SD[stage(np.array(rows), states_SD.device)]
            samples = [draft_sample(sequences[asked[row]], head) for row in rows]
            ids_R = sample_drafts(self._heads.logits(some_SD, head), samples, self._ops)
            found.append(([asked[row] for row in rows], ids_R))
        return list(by_sequence(found, len(sequences)))

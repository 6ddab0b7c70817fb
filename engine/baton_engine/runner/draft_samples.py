"""Sample drafts: with the parameters and the noise of the target's samples at the same positions,
but without penalties, bans and grammars.

Shapes: S samples, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from baton_engine.interface import Sample
from baton_engine.layers.ops import Ops
from baton_engine.sampling.metadata import draws_of
from baton_engine.sampling.sampler import choose
from baton_engine.scheduling.sequence import Sequence
from baton_engine.speculation.draft_params import draft_params


def draft_sample(sequence: Sequence, number: int) -> Sample:
    """The sample of the draft that `number` drafts precede."""
    params = draft_params(sequence.state.params)
    return Sample(sequence.choice, sequence.known + number, params, (), None, sequence.state.listed)


def sample_drafts(logits_SV: torch.Tensor, samples: Seq[Sample], ops: Ops) -> torch.Tensor:
    """The ids [S], on the device. Overwrites the logits."""
    changed = [
        index
        for index, sample in enumerate(samples)
        if sample.params.logit_bias or sample.params.allowed_token_ids is not None
    ]
    draws = draws_of(samples, logits_SV.device)
    return choose(logits_SV, samples, draws, ops.draw, changed=changed, asking={}).ids_S


def by_sequence(found: Seq[tuple[Seq[int], torch.Tensor]], count: int) -> list[list[int]]:
    """The drafts of each of `count` sequences. `found` has, for one position after the other, the
    places of the sequences that have a draft there, and its ids on the device. Copies once."""
    ids: list[int] = torch.cat([each for _, each in found]).tolist()
    drafts: list[list[int]] = [[] for _ in range(count)]
    for place, id in zip((place for places, _ in found for place in places), ids, strict=True):
        drafts[place].append(id)
    return drafts

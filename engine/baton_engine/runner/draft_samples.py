"""Sample drafts: with the parameters and the noise of the target's samples at the same positions,
but without penalties, bans and grammars.

Shapes: S samples, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec
import torch

from baton_engine.interface import Sample
from baton_engine.layers.ops import Ops
from baton_engine.sampling.metadata import draws_of
from baton_engine.sampling.sampler import choose
from baton_engine.scheduling.sequence import Sequence


def draft_sample(sequence: Sequence, number: int) -> Sample:
    """The sample of the draft that `number` drafts precede."""
    params = sequence.state.params
    if params.logprobs is not None:
        params = msgspec.structs.replace(params, logprobs=None)
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

"""Samples and noise outside a step: what a test draws from logits of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton_engine.config.engine_config import LogprobsMode
from baton_engine.interface import Sample, Sampled
from baton_engine.kv.staging import stage
from baton_engine.sampling.gumbel import Number, keys_at, noise_stream
from baton_engine.sampling.metadata import draws_of, shape_columns
from baton_engine.sampling.sampler import Draw, choose, draw, shape_logits
from baton_protocol.sampling import SamplingParams


def noise_keys(seed: Number, choice: Number, position: Number) -> tuple[Number, Number]:
    """The two 32-bit keys of a sample, from integers or uint64 arrays."""
    return keys_at(noise_stream(seed, choice), position)


def sample(
    logits_RV: torch.Tensor,
    row_of: Sequence[int],
    samples: Sequence[Sample],
    draw: Draw = draw,
    mode: LogprobsMode = "raw_logprobs",
) -> list[Sampled]:
    """The tokens of samples that need not be those of a step. `row_of[i]` is the row of logits of
    `samples[i]`; logits are float32 [R, V]."""
    logits_SV = logits_RV[stage(np.array(row_of), logits_RV.device)]
    draws = draws_of(samples, logits_RV.device)
    asking = {
        index: sample.params.logprobs
        for index, sample in enumerate(samples)
        if sample.params.logprobs is not None
    }
    changed = range(len(samples))
    return choose(logits_SV, samples, draws, draw, changed=changed, asking=asking, mode=mode).read()


def shaped_logits(logits_QV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits [Q, V] after temperature, min-p, top-k and top-p; dropped tokens are -inf."""
    return shape_logits(logits_QV, shape_columns(params))

"""Sample the tokens of a step from its hidden states.

Shapes: T tokens of the step, C numbers per token, S samples, P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from baton_engine.kv.staging import stage
from baton_engine.runner.input_batch import StepInput
from baton_engine.sampling.metadata import Draws
from baton_engine.sampling.sampler import ChosenTokens, Draw, choose


def sample_step(
    step: StepInput,
    hidden_TC: torch.Tensor,
    logits: Callable[[torch.Tensor], torch.Tensor],
    draw: Draw,
) -> ChosenTokens:
    """Sample for all rows at once, one token per sample. `logits` are those of rows of hidden
    states, and at least one row has a sample."""
    sampling, device = step.sampling, hidden_TC.device
    if sampling.one_each and step.max_query_len == 1:
        logits_SV = logits(hidden_TC[: len(step.rows)])
    else:
        # Several choices may share a position.
        at_P, row_of_S = np.unique(sampling.hidden_S, return_inverse=True)
        logits_SV = logits(hidden_TC[stage(at_P, device)])
        if len(at_P) < len(row_of_S):
            logits_SV = logits_SV[stage(row_of_S, device)]
    columns_6S = stage(sampling.columns_6S.view(np.int32), device)
    return choose(
        *(logits_SV, sampling.samples),
        Draws(sampling.columns_6S, columns_6S, sampling.filtered),
        draw,
        changed=sampling.changed,
        asking=sampling.asking,
    )

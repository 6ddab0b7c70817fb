"""From logits to tokens, vectorised over the step's samples.

In: logits of the sampled rows and the requests' parameters. Out: one Sampled per sample.
Order: logprobs of the raw logits; what the request says about logits (see `logit_changes`); then
greedy rows take the largest logit, and the others temperature, min-p, top-k, top-p and Gumbel noise
(see `noise`), and take the largest.
A sample depends on its own logits row alone, never on its neighbours.

Shapes: R logits rows, S samples (several choices may share a row), Q random samples among them,
V vocabulary, C candidates looked at by top-p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from baton_engine.api import Sample, Sampled
from baton_engine.logit_changes import changed_logits
from baton_engine.logprobs import position_logprobs
from baton_engine.noise import gumbel, keys_of
from baton_protocol.request import PositionLogprobs
from baton_protocol.sampling import SamplingParams

# Below this a temperature is greedy: dividing by it would overflow float32.
GREEDY_BELOW = 1e-5
# Top-p sorts this many of the largest logits before it sorts all of them: a full sort of 150,000
# costs 10 ms on a CPU, and nearly always the nucleus is far smaller.
NUCLEUS_FIRST_LOOK = 1024
# A mass this close below p has reached it: float32 cannot tell 0.4 + 0.25 + 0.15 + 0.1 from 0.9.
MASS_ROUNDING = 1e-6


def choose(logits_SV: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """The token of each sample, int64 [S], found in float32: greedy, or drawn from what shaping
    leaves."""
    logits_SV = logits_SV.float()
    drawn = [index for index, each in enumerate(samples) if not is_greedy(each.params)]
    if not drawn:
        return logits_SV.argmax(dim=-1)
    params = [samples[index].params for index in drawn]
    keys = keys_of([samples[index] for index in drawn])
    all_drawn = len(drawn) == len(samples)
    shaped_QV = shaped_logits(logits_SV if all_drawn else logits_SV[drawn], params)
    shaped_QV += gumbel(keys, shaped_QV.shape[1], shaped_QV.device)
    ids_Q = shaped_QV.argmax(dim=-1)
    if all_drawn:
        return ids_Q
    ids_S = logits_SV.argmax(dim=-1)
    ids_S[drawn] = ids_Q
    return ids_S


def sample(
    logits_RV: torch.Tensor,
    row_of: Sequence[int],
    samples: Sequence[Sample],
    choose: Callable[[torch.Tensor, Sequence[Sample]], torch.Tensor] = choose,
) -> list[Sampled]:
    """One token per sample; `row_of[i]` is the logits row of `samples[i]`."""
    shared = list(row_of) != list(range(logits_RV.shape[0]))
    raw_SV = logits_RV[list(row_of)] if shared else logits_RV
    ids: list[int] = choose(changed_logits(raw_SV, samples), samples).tolist()
    if all(each.params.logprobs is None for each in samples):
        return [Sampled(id) for id in ids]
    logprobs = _logprobs(raw_SV, ids, samples)
    return [Sampled(id, logprobs.get(index)) for index, id in enumerate(ids)]


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def shaped_logits(logits_QV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits after temperature, min-p, top-k and top-p: what cannot be drawn is -inf."""
    device = logits_QV.device
    temperature_Q = torch.tensor([each.temperature for each in params], device=device)
    logits_QV = logits_QV / temperature_Q[:, None]
    if any(each.min_p > 0 for each in params):
        logits_QV = _min_p(logits_QV, torch.tensor([each.min_p for each in params], device=device))
    if any(each.top_k > 0 for each in params):
        logits_QV = _top_k(logits_QV, [each.top_k for each in params])
    if any(each.top_p < 1 for each in params):
        logits_QV = _top_p(logits_QV, [each.top_p for each in params])
    return logits_QV


def _min_p(logits_QV: torch.Tensor, min_p_Q: torch.Tensor) -> torch.Tensor:
    """Drop what is less probable than min_p times the likeliest; log(0) = -inf drops nothing."""
    threshold_Q1 = logits_QV.amax(dim=-1, keepdim=True) + min_p_Q.log()[:, None]
    return logits_QV.masked_fill(logits_QV < threshold_Q1, -torch.inf)


def _top_k(logits_QV: torch.Tensor, ks: Sequence[int]) -> torch.Tensor:
    """Drop what is strictly below the k-th largest: ties with it survive."""
    vocab = logits_QV.shape[1]
    wanted = [min(k, vocab) if k > 0 else vocab for k in ks]
    widest = max(k for k in wanted if k < vocab) if min(wanted) < vocab else 0
    if not widest:
        return logits_QV
    device = logits_QV.device
    largest_QC = logits_QV.topk(widest, dim=-1).values
    column_Q = torch.tensor([min(k, widest) - 1 for k in wanted], device=device)
    threshold_Q1 = largest_QC.gather(1, column_Q[:, None])
    limited_Q = torch.tensor([k < vocab for k in wanted], device=device)
    return logits_QV.masked_fill((logits_QV < threshold_Q1) & limited_Q[:, None], -torch.inf)


def _top_p(logits_QV: torch.Tensor, ps: Sequence[float]) -> torch.Tensor:
    """Keep the smallest set of likeliest tokens whose probabilities reach p; of equal tokens at its
    edge those with the lowest ids. The likeliest always stays."""
    vocab = logits_QV.shape[1]
    p_Q1 = torch.tensor(ps, dtype=torch.float64, device=logits_QV.device)[:, None]
    goal_Q1 = p_Q1 - MASS_ROUNDING
    log_total_Q1 = logits_QV.logsumexp(dim=-1, keepdim=True)
    width = min(vocab, NUCLEUS_FIRST_LOOK)
    while True:
        largest_QC = logits_QV.topk(width, dim=-1).values
        mass_QC = (largest_QC - log_total_Q1).double().exp().cumsum(dim=-1)
        reached_Q1 = mass_QC[:, -1:] >= goal_Q1
        if width == vocab or bool((reached_Q1 | (p_Q1 >= 1)).all()):
            break
        width = vocab
    # A token stays while the mass before it is below p.
    kept_Q1 = (mass_QC < goal_Q1).sum(dim=-1, keepdim=True).add_(1).clamp_(max=width)
    edge_Q1 = largest_QC.gather(1, kept_Q1 - 1)
    above_QV = logits_QV > edge_Q1
    at_edge_QV = logits_QV == edge_Q1
    room_Q1 = kept_Q1 - above_QV.sum(dim=-1, keepdim=True)
    stays_QV = above_QV | (at_edge_QV & (at_edge_QV.cumsum(dim=-1) <= room_Q1)) | (p_Q1 >= 1)
    return logits_QV.masked_fill(~stays_QV, -torch.inf)


def _logprobs(
    raw_SV: torch.Tensor, ids: Sequence[int], samples: Sequence[Sample]
) -> dict[int, PositionLogprobs]:
    """Of the samples that ask for them, by their place."""
    tops = {
        index: each.params.logprobs
        for index, each in enumerate(samples)
        if each.params.logprobs is not None
    }
    asking = list(tops)
    found = position_logprobs(raw_SV[asking], [ids[index] for index in asking], [*tops.values()])
    return dict(zip(asking, found, strict=True))

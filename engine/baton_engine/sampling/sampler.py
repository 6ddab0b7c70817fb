"""From logits to tokens, vectorised over the step's samples.

In: logits of the sampled rows in float32, and the requests' parameters. Out: one Sampled per
sample; ids and logprobs stay on the device until they are read.

Logprobs come from the raw logits, unless --logprobs-mode says otherwise. For sampling, the logits
are first changed as the request asks (see `logits_processors`). A greedy sample then takes the
largest logit. Any other sample applies temperature, min-p, top-k and top-p, adds Gumbel noise (see
`gumbel`), and takes the largest. A sample depends only on its own row of logits, never on other
rows.

Shapes: R rows of logits, S samples (several choices may share a row), Q non-greedy samples,
V vocabulary, C candidates of top-k or top-p, N samples that ask for logprobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton_engine.config.engine_config import LogprobsMode
from baton_engine.interface import Sample, Sampled
from baton_engine.kv.staging import stage
from baton_engine.sampling.gumbel import gumbel
from baton_engine.sampling.logits_processors import change_logits
from baton_engine.sampling.logprobs import Logprobs, log_softmax, select
from baton_engine.sampling.metadata import (
    ALL_MASS,
    KEY_A,
    LOG_MIN_P,
    MASS,
    TEMPERATURE,
    TOP_K,
    Columns,
    Draws,
)

# Top-p first sorts this number of the largest logits, and all logits only if that is not enough: a
# full sort of 150,000 takes 10 ms on a CPU, and the nucleus is nearly always far smaller.
NUCLEUS_FIRST_LOOK = 1024
# Number of logits for which a CPU draws noise at a time, 2 MB in float32. The noise takes forty
# passes, and each reads data again that does not fit the CPU's caches. With this limit 64 rows of
# 150,000 took 50 instead of 200 ms.
CPU_PART = 1 << 19

Draw = Callable[[torch.Tensor, Draws], torch.Tensor]


def draw(logits_SV: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The token of each sample, int64 [S]. Greedy, or drawn after the filters; logits are float32
    [S, V], already changed as the requests ask."""
    temperature_S = draws.host_6S[TEMPERATURE]  # the bits of a float >= 0 are 0 only for 0.0
    drawn_Q = np.flatnonzero(temperature_S)
    all_drawn = len(drawn_Q) == len(temperature_S)
    if not all_drawn:
        ids_S = logits_SV.argmax(dim=-1)
    else:
        ids_S = torch.empty(len(drawn_Q), dtype=torch.int64, device=logits_SV.device)
    at_once = max(1, len(drawn_Q))
    if logits_SV.device.type == "cpu":
        at_once = max(1, CPU_PART // logits_SV.shape[1])
    for begin in range(0, len(drawn_Q), at_once):
        part_Q = drawn_Q[begin : begin + at_once]
        index_Q = stage(part_Q, logits_SV.device)
        whole = len(part_Q) == len(temperature_S)
        ids_Q = _drawn(logits_SV if whole else logits_SV[index_Q], draws.host_6S[:, part_Q])
        if whole:
            return ids_Q
        ids_S[index_Q] = ids_Q
    return ids_S


def _drawn(logits_QV: torch.Tensor, columns_6Q: Columns) -> torch.Tensor:
    shaped_QV = shape_logits(logits_QV, columns_6Q)
    shaped_QV += gumbel(columns_6Q[KEY_A:].T, shaped_QV.shape[1], shaped_QV.device)
    return shaped_QV.argmax(dim=-1)


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The sampled ids [S], and logprobs of the samples in `asking`, each with those of the ids
    `named` by its request. After to_host(), call read() only when the device has finished the
    step."""

    ids_S: torch.Tensor
    asking: Mapping[int, int]  # index of the sample -> number of most likely tokens to return
    logprobs: Logprobs | None
    named: Sequence[Sequence[int]] = ()

    def to_host(self) -> ChosenTokens:
        """Start copies to the host. The ids on the device stay valid for the next step."""
        there = None if self.logprobs is None else self.logprobs.to_host()
        ids_S = self.ids_S.to("cpu", non_blocking=True)
        return ChosenTokens(ids_S, self.asking, there, self.named)

    def read(self) -> list[Sampled]:
        ids: list[int] = self.ids_S.tolist()
        if self.logprobs is None:
            return [Sampled(id) for id in ids]
        positions = self.logprobs.read(
            [ids[index] for index in self.asking], [*self.asking.values()], self.named
        )
        likely = dict(zip(self.asking, positions, strict=True))
        return [Sampled(id, likely.get(index)) for index, id in enumerate(ids)]


def choose(
    logits_SV: torch.Tensor,
    samples: Sequence[Sample],
    draws: Draws,
    draw: Draw = draw,
    *,
    changed: Sequence[int],
    asking: Mapping[int, int],
    mode: LogprobsMode = "raw_logprobs",
) -> ChosenTokens:
    """Sample one token per sample without waiting for the device. Overwrites the logits, float32
    [S, V]. `changed` are the samples that change logits, and `asking` maps those that want logprobs
    to the number of most likely tokens."""
    device = logits_SV.device
    score_NV = None
    if asking:
        asking_N = np.array(list(asking))
        places_N = stage(asking_N, device)
        if not mode.startswith("processed") or _has_beams(samples, asking):
            score_NV = logits_SV[places_N]
    if changed:
        changed_N = stage(np.array(changed), device)
        changing = [samples[index] for index in changed]
        logits_SV[changed_N] = change_logits(logits_SV[changed_N], changing)
    processed_NV = None
    if asking and mode.startswith("processed"):
        processed_NV = _processed(logits_SV[places_N], draws.host_6S[:, asking_N])
    ids_S = draw(logits_SV, draws)
    if not asking:
        return ChosenTokens(ids_S, asking, None)
    if mode == "raw_logprobs":
        assert score_NV is not None
        score_NV = log_softmax(score_NV)
    else:
        beams = [row for row, index in enumerate(asking) if samples[index].params.use_beam_search]
        score_NV = _scores(mode, score_NV, processed_NV, stage(np.array(beams, np.int64), device))
    named = [samples[index].params.logprob_token_ids for index in asking]
    logprobs = select(score_NV, ids_S[places_N], max(asking.values()), named)
    return ChosenTokens(ids_S, asking, logprobs, named)


def _has_beams(samples: Sequence[Sample], asking: Mapping[int, int]) -> bool:
    return any(samples[index].params.use_beam_search for index in asking)


def _processed(logits_NV: torch.Tensor, columns_6N: Columns) -> torch.Tensor:
    """Changed logits [N, V] after temperature and filters; greedy samples have neither."""
    drawn_Q = np.flatnonzero(columns_6N[TEMPERATURE])
    if len(drawn_Q):
        index_Q = stage(drawn_Q, logits_NV.device)
        logits_NV[index_Q] = shape_logits(logits_NV[index_Q], columns_6N[:, drawn_Q])
    return logits_NV


def _scores(
    mode: LogprobsMode,
    raw_NV: torch.Tensor | None,
    processed_NV: torch.Tensor | None,
    beams_B: torch.Tensor,
) -> torch.Tensor:
    """What this mode gives as logprobs, [N, V]. The rows `beams_B` are of beams, whose scores are
    always the raw logprobs."""
    logits_NV = raw_NV if processed_NV is None else processed_NV
    assert logits_NV is not None
    score_NV = log_softmax(logits_NV) if mode == "processed_logprobs" else logits_NV
    if raw_NV is not None and len(beams_B):
        score_NV = score_NV.clone()
        score_NV[beams_B] = log_softmax(raw_NV[beams_B])
    return score_NV


def shape_logits(logits_QV: torch.Tensor, columns_6Q: Columns) -> torch.Tensor:
    """Logits [Q, V] after temperature, min-p, top-k and top-p; dropped tokens are -inf."""

    def floats(column: int) -> torch.Tensor:
        return stage(columns_6Q[column].view(np.float32), logits_QV.device)

    logits_QV = logits_QV / floats(TEMPERATURE)[:, None]
    log_min_p_Q, mass_Q = columns_6Q[[LOG_MIN_P, MASS]].view(np.float32)
    if (log_min_p_Q > -np.inf).any():
        logits_QV = _min_p(logits_QV, floats(LOG_MIN_P))
    if columns_6Q[TOP_K].any():
        logits_QV = _top_k(logits_QV, columns_6Q[TOP_K].tolist())
    if (mass_Q < ALL_MASS).any():
        logits_QV = _top_p(logits_QV, floats(MASS))
    return logits_QV


def _min_p(logits_QV: torch.Tensor, log_min_p_Q: torch.Tensor) -> torch.Tensor:
    """Drop tokens whose probability is below min_p times the largest; -inf drops nothing."""
    threshold_Q1 = logits_QV.amax(dim=-1, keepdim=True) + log_min_p_Q[:, None]
    return logits_QV.masked_fill(logits_QV < threshold_Q1, -torch.inf)


def _top_k(logits_QV: torch.Tensor, ks: Sequence[int]) -> torch.Tensor:
    """Drop logits below the k-th largest. Ties with it stay."""
    vocab = logits_QV.shape[1]
    wanted = [min(k, vocab) if k > 0 else vocab for k in ks]
    widest = max(k for k in wanted if k < vocab) if min(wanted) < vocab else 0
    if not widest:
        return logits_QV
    device = logits_QV.device
    largest_QC = logits_QV.topk(widest, dim=-1).values
    column_Q = stage(np.array([min(k, widest) - 1 for k in wanted]), device)
    threshold_Q1 = largest_QC.gather(1, column_Q[:, None])
    limited_Q = stage(np.array([k < vocab for k in wanted]), device)
    return logits_QV.masked_fill((logits_QV < threshold_Q1) & limited_Q[:, None], -torch.inf)


def _top_p(logits_QV: torch.Tensor, mass_Q: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of most likely tokens whose probabilities reach the mass. Of equal
    tokens at its edge, those with the lowest ids stay. The most likely token always stays."""
    vocab = logits_QV.shape[1]
    goal_Q1 = mass_Q.double()[:, None]
    unlimited_Q1 = goal_Q1 >= 1
    log_total_Q1 = logits_QV.logsumexp(dim=-1, keepdim=True)
    width = min(vocab, NUCLEUS_FIRST_LOOK)
    while True:
        largest_QC = logits_QV.topk(width, dim=-1).values
        mass_QC = (largest_QC - log_total_Q1).double().exp().cumsum(dim=-1)
        reached_Q1 = mass_QC[:, -1:] >= goal_Q1
        if width == vocab or bool((reached_Q1 | unlimited_Q1).all()):
            break
        width = vocab
    # A token stays while the mass before it is below p.
    kept_Q1 = (mass_QC < goal_Q1).sum(dim=-1, keepdim=True).add_(1).clamp_(max=width)
    edge_Q1 = largest_QC.gather(1, kept_Q1 - 1)
    above_QV = logits_QV > edge_Q1
    at_edge_QV = logits_QV == edge_Q1
    room_Q1 = kept_Q1 - above_QV.sum(dim=-1, keepdim=True)
    stays_QV = above_QV | (at_edge_QV & (at_edge_QV.cumsum(dim=-1) <= room_Q1)) | unlimited_Q1
    return logits_QV.masked_fill(~stays_QV, -torch.inf)

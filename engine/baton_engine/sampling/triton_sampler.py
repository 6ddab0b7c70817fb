"""Sampling in three parts: shape, draw, pick. Torch twin: `sampler.draw`.

In: logits in float32, and the sampling columns (see `metadata`). Out: token ids on the device.

    shape   only if a sample has filters. Per sample: the limits of the tokens that stay after
            temperature, min-p, top-k and top-p, as two numbers, in at most nine launches (see
            `triton_topk_topp`)
    draw    one launch. Per sample and tile of the vocabulary: the largest logit / temperature +
            noise (see `gumbel`) among the tokens that stay; for a greedy sample the largest logit
    pick    one launch. Per sample: the best of its tiles; the lowest id of equals

A sample depends only on its own row. The kernels read the parameters from device memory. The host
knows which filters the step has, and leaves out the launches that no sample needs.

Shapes: S samples, V vocabulary, L tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_engine.sampling.metadata import Draws
from baton_engine.sampling.triton_gumbel import gumbel_noise
from baton_engine.sampling.triton_topk_topp import shape

DRAW_TILE = 2048


def choose_tokens(logits_SV: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The token of each sample, int64 [S]. Each row of `logits_SV` must be contiguous."""
    samples, vocab = logits_SV.shape
    device = logits_SV.device
    tiles = triton.cdiv(vocab, DRAW_TILE)
    edge_S = torch.empty(samples, dtype=torch.float32, device=device)
    last_S = torch.empty(samples, dtype=torch.int32, device=device)
    score_SL = torch.empty(samples, tiles, dtype=torch.float32, device=device)
    token_SL = torch.empty(samples, tiles, dtype=torch.int32, device=device)
    ids_S = torch.empty(samples, dtype=torch.int64, device=device)
    if draws.filtered:
        shape(logits_SV, draws, edge_S, last_S)
    _draw[(samples, tiles)](
        *(score_SL, token_SL, logits_SV, draws.columns_6S, edge_S, last_S),
        *(samples, vocab, logits_SV.stride(0)),
        FILTERED=draws.filtered,
        TILE=DRAW_TILE,
        # Another sample's filters must not change a score's bits.
        enable_fp_fusion=False,
    )
    _pick[(samples,)](ids_S, score_SL, token_SL, tiles, TILES=triton.next_power_of_2(tiles))
    return ids_S


@triton.jit(do_not_specialize=["samples"])
def _draw(
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    edge_ptr: tl.tensor,
    last_ptr: tl.tensor,
    samples: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    FILTERED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    sample, tile = tl.program_id(0), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    row_ptr = logits_ptr + sample.to(tl.int64) * stride
    score = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
    temperature = tl.load(columns_ptr + sample).to(tl.float32, bitcast=True)
    if temperature > 0:
        score = tl.math.div_rn(score, temperature)
        stays = token < vocab
        if FILTERED:
            edge, last = tl.load(edge_ptr + sample), tl.load(last_ptr + sample)
            stays = (score > edge) | ((score == edge) & (token <= last))
        a = tl.load(columns_ptr + 4 * samples + sample)
        b = tl.load(columns_ptr + 5 * samples + sample)
        score = tl.where(stays, score + gumbel_noise(a, b, token), float("-inf"))
    best, index = tl.max(score, axis=0, return_indices=True)
    at = sample * tl.num_programs(1) + tile
    tl.store(score_ptr + at, best)
    tl.store(token_ptr + at, tile * TILE + index)


@triton.jit
def _pick(
    ids_ptr: tl.tensor,
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    tiles: tl.tensor,
    TILES: tl.constexpr,
) -> None:
    sample = tl.program_id(0)
    tile = tl.arange(0, TILES)
    score = tl.load(score_ptr + sample * tiles + tile, mask=tile < tiles, other=float("-inf"))
    _, index = tl.max(score, axis=0, return_indices=True)
    tl.store(ids_ptr + sample, tl.load(token_ptr + sample * tiles + index).to(tl.int64))

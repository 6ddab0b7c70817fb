"""Gumbel noise that is a pure function of (seed, choice, position, token).

A sample depends only on its logits and these keys. It does not depend on the batch, the node, or
the number of placements of the request. The generator is counter-based and uses only 32-bit integer
operations, so a Triton kernel can produce the same bits (`triton_gumbel.noise_bits`):

    (a, b)  two 32-bit keys from (seed, choice, position), computed on the host
    bits    mix(mix(token ^ a) + b), mix = MurmurHash3's 32-bit finalizer
    w       (bits + 0.5) / 2^32, which gives 0 < w < 1
    noise   -log(-log(1 - w)): the largest noise comes from the smallest w, where float32 is most
            precise

Shapes: S samples, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.kv.staging import stage

MASK_32 = 0xFFFFFFFF
MASK_64 = 0xFFFFFFFFFFFFFFFF
# The largest float32 below 1: w must not round up to 1, or a lone candidate would score -inf.
W_MAX = 1.0 - 2.0**-24

Number = TypeVar("Number", int, npt.NDArray[Any])
Keys = Sequence[tuple[int, int]] | npt.NDArray[np.uint32]  # [S, 2]


def noise_stream(seed: Number, choice: Number) -> Number:
    """The 64-bit state from which keys_at() derives the keys of all positions of one choice, from
    integers or uint64 arrays. SplitMix64's finalizer runs after each input is added, so
    neighbouring seeds, choices and positions give unrelated keys."""
    return _mix64(_mix64(seed & MASK_64) + 0x9E3779B97F4A7C15 * (choice + 1))


def keys_at(stream: Number, position: Number) -> tuple[Number, Number]:
    """The two 32-bit keys of a position."""
    state = _mix64(stream + 0xD1B54A32D192ED03 * (position + 1))
    return state & MASK_32, state >> 32


def random_bits(keys: Keys, vocab: int, device: torch.device) -> torch.Tensor:
    """32 random bits per (key pair, token) as int32 [S, V]."""
    pairs_S2 = stage(np.asarray(keys, np.uint32).view(np.int32), device)
    a_S1, b_S1 = pairs_S2.chunk(2, dim=1)
    tokens_V = torch.arange(vocab, dtype=torch.int32, device=device)
    return _mix32(_mix32(tokens_V[None, :] ^ a_S1).add_(b_S1))


def gumbel(keys: Keys, vocab: int, device: torch.device) -> torch.Tensor:
    """Noise [S, V] in float32, one row per key pair."""
    bits_SV = random_bits(keys, vocab, device)
    unsigned_SV = bits_SV.to(torch.int64).bitwise_and_(MASK_32).to(torch.float32)
    w_SV = unsigned_SV.add_(0.5).mul_(2.0**-32).clamp_(max=W_MAX)
    return w_SV.neg_().log1p_().neg_().log_().neg_()


def _mix64(value: Number) -> Number:
    value &= MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    value ^= value >> 31
    return value


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finalizer on int32 bits, in place. Products wrap. Masks make the shifts
    logical, because torch shifts signed numbers arithmetically."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x85EBCA6B))
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(_signed(0xC2B2AE35))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(value: int) -> int:
    """The int32 with the same bits."""
    return value - (1 << 32) if value >= 1 << 31 else value

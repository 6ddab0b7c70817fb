"""Gumbel noise that is a pure function of (seed, choice, position, token).

A sample then depends on nothing but its own logits: not on the batch, the node, or how often the
request was placed. The generator is counter-based and uses 32-bit integer operations only, so that
a Triton kernel can repeat it bit for bit:

    (a, b)  two 32-bit keys of (seed, choice, position), computed on the host
    bits    mix(mix(token ^ a) + b), mix = MurmurHash3's 32-bit finalizer
    w       (bits + 0.5) / 2^32, so that 0 < w < 1
    noise   -log(-log(1 - w)): the smallest w decide who wins, and floats are finest there

Shapes: S samples, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MASK_32 = 0xFFFFFFFF
MASK_64 = 0xFFFFFFFFFFFFFFFF
# The largest float32 below 1: w must not round up to 1, or a lone candidate would score -inf.
W_MAX = 1.0 - 2.0**-24


def noise_keys(seed: int, choice: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys. SplitMix64's finalizer is applied after each part is added, so that
    neighbouring seeds, choices and positions give unrelated keys."""
    state = _mix64(seed & MASK_64)
    state = _mix64(state + 0x9E3779B97F4A7C15 * (choice + 1))
    state = _mix64(state + 0xD1B54A32D192ED03 * (position + 1))
    return state & MASK_32, state >> 32


def gumbel(keys: Sequence[tuple[int, int]], vocab: int, device: torch.device) -> torch.Tensor:
    """Noise [S, V] in float32, one row per key pair."""
    pairs = torch.tensor([[_signed(a), _signed(b)] for a, b in keys], dtype=torch.int32)
    a_S1, b_S1 = pairs.to(device).chunk(2, dim=1)
    tokens_V = torch.arange(vocab, dtype=torch.int32, device=device)
    bits_SV = _mix32(_mix32(tokens_V[None, :] ^ a_S1) + b_S1)
    unsigned_SV = bits_SV.to(torch.int64).bitwise_and_(MASK_32).to(torch.float32)
    w_SV = unsigned_SV.add_(0.5).mul_(2.0**-32).clamp_(max=W_MAX)
    return w_SV.neg_().log1p_().neg_().log_().neg_()


def _mix64(value: int) -> int:
    value &= MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finalizer on int32 bits; products wrap, and shifts are made logical by masks
    because torch shifts signed numbers arithmetically."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _signed(0x85EBCA6B)
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * _signed(0xC2B2AE35)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(value: int) -> int:
    """The int32 with the same bits."""
    return value - (1 << 32) if value >= 1 << 31 else value

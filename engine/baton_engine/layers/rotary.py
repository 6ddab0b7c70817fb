"""Rotary position embedding: plain, linearly scaled, Llama 3's, yarn and longrope.

Shapes: T tokens of the step, X heads of q and k together, H head_dim, R its rotated dimensions,
P positions.
Source of the formulas: the configs' own definitions (inv_freq = theta^(-2i/R); Llama 3 divides the
long wavelengths by `factor` and interpolates between `low_freq_factor` and `high_freq_factor`;
yarn does so between two numbers of turns, see RopeConfig; longrope divides each frequency by a
factor of its own).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from baton_engine.config.model_config import RopeConfig

RopeTables = tuple[torch.Tensor, torch.Tensor]  # cos and sin, each [T, 1, R/2]
# The most bytes that Rope.keep() keeps: enough for 131,072 positions of 128 numbers in float32.
KEPT_BYTES = 64 << 20
# Positions that keep() computes at a time: its float32 tables then take some MB.
KEPT_AT_ONCE = 8192


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """inv_freq [R/2], float32. Frequencies are computed in the order of operations of
    transformers, because tests compare logits to 1e-4."""
    rotary_dim = config.rotary_dim(head_dim)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    if config.type == "longrope":
        factors = torch.tensor(config.long_factors if config.long else config.short_factors)
        return 1.0 / (factors * config.theta**exponents)
    plain = 1.0 / (config.theta**exponents)
    if config.type == "yarn":
        return _yarn(config, config.theta**exponents)
    if config.type == "linear":
        return plain / config.factor
    if config.type == "default":
        return plain
    low_wavelength = config.original_max_positions / config.low_freq_factor
    high_wavelength = config.original_max_positions / config.high_freq_factor
    wavelength = 2 * math.pi / plain
    smooth = (config.original_max_positions / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    between = (1 - smooth) * plain / config.factor + smooth * plain
    scaled = torch.where(wavelength > low_wavelength, plain / config.factor, between)
    return torch.where(wavelength < high_wavelength, plain, scaled)


def _yarn(config: RopeConfig, powers: torch.Tensor) -> torch.Tensor:
    """inv_freq [R/2] of yarn; `powers` are the inverse of the plain frequencies."""
    rotary_dim = 2 * len(powers)
    # The indexes of the frequencies with these numbers of turns in the original length.
    low, high = (
        rotary_dim
        * math.log(config.original_max_positions / (turns * 2 * math.pi))
        / (2 * math.log(config.theta))
        for turns in (config.beta_fast, config.beta_slow)
    )
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    divided = ((torch.arange(len(powers), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - divided
    return 1.0 / (config.factor * powers) * (1 - kept) + 1.0 / powers * kept


class Rope:
    """Computes cos and sin once per step, for use by every layer."""

    def __init__(
        self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._inv_freq = inverse_frequencies(config, head_dim).to(device)
        self._factor = config.attention_factor
        self._dtype = dtype
        self._kept_P1R: torch.Tensor | None = None  # cos, then sin

    def keep(self, positions: int) -> None:
        """Compute the tables of positions [0, positions) now, unless they take more than
        KEPT_BYTES. Later positions must be among these. On a GPU a step then reads them with one
        launch instead of seven: 15 us of a step of one row that takes 1.3 ms. The bits are the
        same."""
        size = positions * 2 * len(self._inv_freq) * self._dtype.itemsize
        if size > KEPT_BYTES:
            return
        parts = []
        for first in range(0, positions, KEPT_AT_ONCE):
            some_P = torch.arange(
                first, min(first + KEPT_AT_ONCE, positions), device=self._inv_freq.device
            )
            parts.append(torch.cat(self._computed(some_P), -1))
        self._kept_P1R = torch.cat(parts)

    def tables(self, positions_T: torch.Tensor) -> RopeTables:
        """cos and sin at these positions, each [T, 1, R/2] in the compute dtype."""
        if self._kept_P1R is None:
            return self._computed(positions_T)
        cos_T1R, sin_T1R = self._kept_P1R.index_select(0, positions_T).chunk(2, dim=-1)
        return cos_T1R, sin_T1R

    def _computed(self, positions_T: torch.Tensor) -> RopeTables:
        angles_TR = positions_T.float()[:, None] * self._inv_freq[None, :]
        cos_TR, sin_TR = angles_TR.cos(), angles_TR.sin()
        if self._factor != 1.0:
            cos_TR, sin_TR = cos_TR.mul_(self._factor), sin_TR.mul_(self._factor)
        return cos_TR.to(self._dtype)[:, None, :], sin_TR.to(self._dtype)[:, None, :]


def rotate(heads_TXH: torch.Tensor, tables: RopeTables) -> torch.Tensor:
    """The rotated heads, a new tensor: the halves (a, b) of a head's first R numbers become
    (a cos - b sin, b cos + a sin). The other numbers do not change."""
    cos_T1R, sin_T1R = tables
    rotary_dim = 2 * cos_T1R.shape[-1]
    rotated_TXH = torch.empty_like(heads_TXH, memory_format=torch.contiguous_format)
    first, second = heads_TXH[..., :rotary_dim].chunk(2, dim=-1)
    low, high = rotated_TXH[..., :rotary_dim].chunk(2, dim=-1)
    torch.mul(first, cos_T1R, out=low)
    low.addcmul_(second, sin_T1R, value=-1)
    torch.mul(second, cos_T1R, out=high)
    high.addcmul_(first, sin_T1R)
    rotated_TXH[..., rotary_dim:] = heads_TXH[..., rotary_dim:]
    return rotated_TXH


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each head of q and k, with a weight per head."""

    weight_XH: torch.Tensor
    eps: float

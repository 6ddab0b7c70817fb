"""Rotary position embedding: plain, linearly scaled and Llama 3's.

Shapes: T tokens of the step, X heads of q and k together, H head_dim.
Source of the formulas: the configs' own definitions (inv_freq = theta^(-2i/H); Llama 3 divides the
long wavelengths by `factor` and interpolates between `low_freq_factor` and `high_freq_factor`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from baton_engine.config.model_config import RopeConfig

RopeTables = tuple[torch.Tensor, torch.Tensor]  # cos and sin, each [T, 1, H/2]


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """inv_freq [H/2], float32. Frequencies are computed in the order of operations of
    transformers, because tests compare logits to 1e-4."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (config.theta**exponents)
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


class Rope:
    """Computes cos and sin once per step, for use by every layer."""

    def __init__(
        self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._inv_freq = inverse_frequencies(config, head_dim).to(device)
        self._dtype = dtype

    def tables(self, positions_T: torch.Tensor) -> RopeTables:
        """cos and sin at these positions, each [T, 1, H/2] in the compute dtype."""
        angles_TH = positions_T.float()[:, None] * self._inv_freq[None, :]
        cos_T1H = angles_TH.cos().to(self._dtype)[:, None, :]
        sin_T1H = angles_TH.sin().to(self._dtype)[:, None, :]
        return cos_T1H, sin_T1H


def rotate(heads_TXH: torch.Tensor, tables: RopeTables) -> torch.Tensor:
    """The rotated heads, a new tensor: halves (a, b) become (a cos - b sin, b cos + a sin)."""
    cos_T1H, sin_T1H = tables
    first, second = heads_TXH.chunk(2, dim=-1)
    rotated_TXH = torch.empty_like(heads_TXH, memory_format=torch.contiguous_format)
    low, high = rotated_TXH.chunk(2, dim=-1)
    torch.mul(first, cos_T1H, out=low)
    low.addcmul_(second, sin_T1H, value=-1)
    torch.mul(second, cos_T1H, out=high)
    high.addcmul_(first, sin_T1H)
    return rotated_TXH


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each head of q and k, with a weight per head."""

    weight_XH: torch.Tensor
    eps: float

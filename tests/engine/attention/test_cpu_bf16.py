"""CPU kernels in bfloat16 against float64: bounds on their rounding errors."""

from __future__ import annotations

import pytest
import torch

from baton_engine.attention.cpu_bf16 import rms_norm, wide_scores


def bf16_noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("native", [None, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 270), (564, 188), (64, 2000)])
def test_attention_scores_are_accurate_to_16_bits(
    queries: int, keys: int, native: bool | None
) -> None:
    q, k = bf16_noise(4, queries, 64), bf16_noise(4, keys, 64, seed=1) * 4
    exact = torch.bmm(q.double(), k.double().transpose(1, 2)) / 8
    error = (wide_scores(q, k, 1 / 8, native=native).double() - exact).abs()
    assert error.max() <= exact.abs().max() * 2**-16


@pytest.mark.parametrize("shape", [(768,), (6, 64)])
def test_rms_norm_rounds_once(shape: tuple[int, ...]) -> None:
    x, weight = bf16_noise(5, *shape) * 30, bf16_noise(*shape, seed=1)
    exact = (
        x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    )
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), exact, rtol=2**-8, atol=0)

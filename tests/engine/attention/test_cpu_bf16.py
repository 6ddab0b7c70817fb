"""CPU kernels in bfloat16 against float64: bounds on their rounding errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from baton_engine.attention.cpu_bf16 import prompt_attention, rms_norm, wide_scores


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


@pytest.mark.pairwise
@pytest.mark.parametrize("most", [1 << 20, 3000, 40])  # the most scores computed at once
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (33, 33), (7, 90), (60, 61)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_prompt_attention_equals_the_definition(
    heads: int, kv_heads: int, tokens: int, keys: int, most: int
) -> None:
    q = bf16_noise(tokens, heads, 16)
    k, v = bf16_noise(kv_heads, keys, 16, seed=1), bf16_noise(kv_heads, keys, 16, seed=2)
    hidden = ~torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
    mask = torch.zeros(tokens, keys).masked_fill_(hidden, -torch.inf)
    actual = prompt_attention(q, k, v, mask.bfloat16(), most=most)
    group = heads // kv_heads
    exact = F.scaled_dot_product_attention(
        q.double().transpose(0, 1),
        k.double().repeat_interleave(group, 0),
        v.double().repeat_interleave(group, 0),
        attn_mask=mask.double(),
    ).transpose(0, 1)
    torch.testing.assert_close(actual.double(), exact, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("shape", [(768,), (6, 64)])
def test_rms_norm_rounds_once(shape: tuple[int, ...]) -> None:
    x, weight = bf16_noise(5, *shape) * 30, bf16_noise(*shape, seed=1)
    exact = (
        x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    )
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), exact, rtol=2**-8, atol=0)

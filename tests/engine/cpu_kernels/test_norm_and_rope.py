"""Compiled norms and rotations: near their definitions in float64, and with the same bits for a
token wherever it is."""

from __future__ import annotations

import pytest
import torch

from baton_engine.cpu_kernels.norm import add_norm
from baton_engine.cpu_kernels.rope_store import can_rotate_store, rotate_store
from baton_engine.kv.eight_bits import rounded

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
EPS = 1e-5


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The definition, in float64."""
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return wide * scale * weight.double()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    near = ROUNDING[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=near, atol=near)


@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [(1, 16), (3, 100), (9, 768), (70, 96)])
def test_the_norm_of_a_sum_equals_its_definition(
    shape: tuple[int, int], dtype: torch.dtype, wide_weight: bool
) -> None:
    x, delta = noise(*shape).to(dtype), noise(*shape, seed=1).to(dtype)
    weight = noise(shape[1], seed=2).to(torch.float32 if wide_weight else dtype)
    total = x + delta
    actual = add_norm(x, delta, weight, EPS)
    assert torch.equal(x, total)
    assert actual.dtype == dtype
    assert_close(actual, normed(total, weight))
    without = add_norm(x, None, weight, EPS)
    assert torch.equal(without, actual)
    assert torch.equal(x, total)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_row_has_the_same_norm_at_any_place(dtype: torch.dtype) -> None:
    x, weight = noise(1, 200).to(dtype).expand(37, -1).contiguous(), noise(200, seed=1).to(dtype)
    found = add_norm(x, None, weight, EPS)
    assert (found == found[0]).all()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "half"), [(4, 4, 32, 16), (8, 2, 96, 48), (5, 1, 64, 16)]
)
def test_heads_are_normed_rotated_and_stored(
    heads: int, kv_heads: int, dim: int, half: int, with_norm: bool, dtype: torch.dtype
) -> None:
    slots = torch.tensor([5, 35, 16, -1, 19])
    block, layer, both = 4, 1, heads + kv_heads
    given = noise(len(slots), both + kv_heads, dim).to(dtype)
    weight = noise(both, dim, seed=1).to(dtype)
    angles = noise(len(slots), 1, half, seed=2) * 100
    rope = angles.cos().to(dtype), angles.sin().to(dtype)
    pool = torch.full((9, 3, 2, kv_heads, block, dim), torch.nan, dtype=dtype)
    assert can_rotate_store(given, rope[0])
    turned = normed(given[:, :both], weight) if with_norm else given[:, :both].double()
    a, b = turned[..., :half].clone(), turned[..., half : 2 * half].clone()
    cos, sin = (table.double() for table in rope)
    turned[..., :half], turned[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    values = given[:, both:].clone()
    kv = pool[:, layer, 0], pool[:, layer, 1]
    q = rotate_store(given, heads, (weight, EPS) if with_norm else None, rope, kv, slots)
    assert_close(q, turned[:, :heads])
    assert_close(given[:, heads:both], turned[:, heads:])
    assert torch.equal(given[:, both:], values)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            place = pool[slot // block, layer, :, :, slot % block]
            assert torch.equal(place, given[token, heads:].view(2, kv_heads, dim))
            place.fill_(torch.nan)
    assert pool.isnan().all()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_heads_are_rounded_when_they_are_stored(dtype: torch.dtype) -> None:
    given, pool = noise(2, 4, 64).to(dtype), torch.zeros(1, 2, 1, 4, 64, dtype=dtype)
    rope = noise(2, 1, 32).to(dtype), noise(2, 1, 32, seed=1).to(dtype)
    kv = pool[:, 0], pool[:, 1]
    rotate_store(given, 2, None, rope, kv, torch.tensor([3, 1]), rounds=True)
    for token, slot in enumerate((3, 1)):
        assert torch.equal(pool[0, :, 0, slot], rounded(given[token, 2:]))


def test_heads_are_not_stored_in_a_pool_of_another_dtype() -> None:
    pool = torch.full((2, 1, 2, 1, 4, 32), torch.nan, dtype=torch.bfloat16)
    rope, slots = (noise(1, 1, 16), noise(1, 1, 16)), torch.tensor([5])
    with pytest.raises(ValueError, match=r"torch\.float32 do not fit a pool in torch\.bfloat16"):
        rotate_store(noise(1, 3, 32), 1, None, rope, (pool[:, 0, 0], pool[:, 0, 1]), slots)
    assert pool.isnan().all()


@pytest.mark.parametrize(("dim", "half"), [(40, 20), (64, 24)])
def test_heads_that_are_not_whole_vectors_are_not_supported(dim: int, half: int) -> None:
    assert not can_rotate_store(noise(1, 3, dim), noise(1, 1, half))

"""Compiled activations and softmax: near their definitions in float64, and with the same bits for a
number wherever it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from baton_engine.cpu_kernels.silu import silu_mul
from baton_engine.cpu_kernels.softmax import (
    SplitFactors,
    prompt_weights,
    softmax_,
    split_weights_,
)
from baton_engine.cpu_kernels.split_sums import add_splits, can_add_splits, sum_splits

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 8


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (3, 16), (7, 100), (2, 3000)])
def test_silu_equals_its_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tokens, size = shape
    gate_up = noise(tokens, 2 * size).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    near = TOLERANCES[dtype]
    actual = silu_mul(gate_up)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), F.silu(gate) * up, rtol=near, atol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_has_the_same_silu_at_any_place(dtype: torch.dtype) -> None:
    gate = noise(1).to(dtype).expand(5, 37)
    found = silu_mul(torch.cat((gate, torch.ones_like(gate)), 1))
    assert (found == found[0, 0]).all()


def test_silu_of_very_large_and_small_gates_is_finite() -> None:
    gate = torch.tensor([[-3e38, -1e4, -90.0, -88.0, 0.0, 88.0, 90.0, 1e4, 3e38]])
    found = silu_mul(torch.cat((gate, torch.ones_like(gate)), 1))
    torch.testing.assert_close(found, F.silu(gate), rtol=1e-6, atol=1e-35)
    assert found.isfinite().all()


def test_softmax_equals_its_definition_whatever_is_hidden_beside_it() -> None:
    scores = noise(40, 320)
    scores[:, 272:] = -torch.inf
    scores[5, :100] = -torch.inf
    found = softmax_(scores.clone())
    torch.testing.assert_close(found.double(), scores.double().softmax(-1), rtol=1e-5, atol=1e-7)
    assert (found[:, 272:] == 0).all()
    shorter = softmax_(scores[:, :272].contiguous())
    assert torch.equal(found[:, :272], shorter)


def test_a_sink_is_one_more_score_whose_weight_is_left_out() -> None:
    """Below, among and far above the other scores; -inf is no sink."""
    scores, sinks = noise(4, 64), torch.tensor([-9.0, 3.0, 90.0, -torch.inf])
    found = softmax_(scores.clone(), sinks)
    expected = torch.cat((scores, sinks[:, None]), 1).double().softmax(-1)[:, :-1]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-30)
    assert torch.equal(found[3], softmax_(scores[3:].clone())[0])


@pytest.mark.parametrize("sunk", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_a_prompt_are_the_softmax_of_what_each_row_sees(
    dtype: torch.dtype, sunk: bool
) -> None:
    """Of 6 rows of scores, 5 are used; the keys that a row does not see may be NaN."""
    matrices, height, keys, split = 2, 6, 192, 64
    scores = noise(matrices, height, keys)
    seen = np.array([(0, 192), (0, 1), (17, 70), (64, 128), (191, 192)], np.int32)
    expected = torch.full((matrices, len(seen), keys), -torch.inf)
    for row, (begin, end) in enumerate(seen):
        expected[:, row, begin:end] = scores[:, row, begin:end]
        scores[:, row, :begin] = scores[:, row, end:] = torch.nan
    sinks = noise(matrices, len(seen)) if sunk else None
    softmax_(expected.view(-1, keys), None if sinks is None else sinks.flatten())
    found = prompt_weights(scores, seen, split, dtype, sinks_XM=sinks)[:, :, : len(seen)]
    assert torch.equal(found.transpose(1, 2).flatten(2), expected.to(dtype))


def test_scores_may_be_given_in_two_parts() -> None:
    near, lost = noise(2, 3, 64).bfloat16(), noise(2, 3, 64).bfloat16() * 2**-9
    seen = np.array([(0, 64), (0, 40), (0, 3)], np.int32)
    whole = near.float().add_(lost).mul_(0.125)
    expected = prompt_weights(whole, seen, 32, torch.bfloat16)
    assert torch.equal(prompt_weights((near, lost), seen, 32, torch.bfloat16, 0.125), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splits_are_added_in_ascending_order_and_written_to_their_heads(dtype: torch.dtype) -> None:
    """Two matrices of kv heads 1 and 2, of three; 5 tokens with 2 heads each, padded to 12 rows."""
    matrices, splits, height, dim, tokens, group, first = 2, 7, 12, 48, 5, 2, 1
    sums = noise(matrices, splits, height, dim).to(dtype)
    out = torch.full((tokens, 3 * group, dim), torch.nan, dtype=dtype)
    assert can_add_splits(out)
    add_splits(sums, out, group, first)
    expected = sums[:, 0].float().clone()
    for split in range(1, splits):
        expected += sums[:, split]
    for x in range(matrices):
        found = out[:, (first + x) * group : (first + x + 1) * group]
        assert torch.equal(found.flatten(0, 1), expected[x, : tokens * group].to(dtype))
    assert out[:, :group].isnan().all()


def test_sums_with_weights_by_split_are_those_of_the_softmax() -> None:
    """Also with splits that a row does not see, and with a prompt's kernels to the last bit."""
    matrices, rows, keys, split, dim = 2, 4, 192, 64, 32
    scores, v_XLH = noise(matrices, rows, keys), noise(matrices, keys, dim)
    seen = np.array([(0, 192), (0, 40), (70, 100), (130, 192)], np.int32)
    hidden = torch.full_like(scores, -torch.inf)
    for row, (begin, end) in enumerate(seen):
        hidden[:, row, begin:end] = scores[:, row, begin:end]
    expected = hidden.double().softmax(-1) @ v_XLH.double()
    factors, of_prompt = (SplitFactors.empty(matrices, rows, 3) for _ in range(2))
    weights_XCMS = prompt_weights(scores, seen, split, torch.float32, factors=of_prompt)
    split_weights_(hidden, split, factors)
    weights_XMCS = hidden.view(matrices, rows, 3, split)
    assert torch.equal(weights_XCMS, weights_XMCS.transpose(1, 2))
    assert set(weights_XMCS.amax(-1).flatten().tolist()) == {0.0, 1.0}
    sums_XMCH = torch.einsum("xmcs,xcsh->xmch", weights_XMCS, v_XLH.view(matrices, 3, split, dim))
    found = sum_splits(sums_XMCH, factors)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    out = torch.empty(rows, matrices, dim)
    add_splits(sums_XMCH.transpose(1, 2).contiguous(), out, 1, 0, of_prompt)
    assert torch.equal(out.transpose(0, 1), found)

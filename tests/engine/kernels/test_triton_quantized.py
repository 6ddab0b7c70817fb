"""Products and experts with quantized weights in Triton: values of the twins, and the same bits for
a row in any step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from baton_engine.build import linear_methods, ops_for
from baton_engine.config.quantization.scheme import BITS, Numbers
from baton_engine.layers.experts import ClampedSwiGLU, QuantizedExperts, Routes, experts_twin
from baton_engine.layers.linear_method import HEAD, packed_methods
from baton_engine.layers.ops import Ops
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight, quantized_twin
from baton_engine.layers.triton_matmul import FIXED_TILE, FIXED_TILE_HEAD
from baton_engine.layers.triton_quantized.products import (
    QUANTIZED_TILE,
    QUANTIZED_TILE_HEAD,
    quantized_tile_product,
)
from baton_engine.layers.triton_quantized.weight import TritonExperts, triton_weight
from baton_engine.layers.triton_splits import STORED_ROWS
from tests.support.engines.kernels import DEVICE, assert_close, can_compute, noise, poisoned
from tests.support.engines.launches import launches
from tests.support.engines.quantized.random_weights import Case, moved, random_weight
from tests.support.engines.waits import waits
from tests.support.needs import needs

# Of 4 bits and of 8.
QUICK_KINDS: tuple[Numbers, ...] = ("nf4", "fp8")
OTHERS = sorted(BITS.keys() - QUICK_KINDS)
# One scale, and inputs that end within a step; groups of half a step, the last of them not whole;
# groups of steps.
CASES = [Case(40, 33, 0), Case(35, 88, 16), Case(20, 256, 64)]
# Half of all pairs are quick: an interpreted kernel is slow.
SOME = [
    (torch.float32, False),
    (torch.float16, True),
    *(
        pytest.param(dtype, flag, marks=mark)
        for mark, pairs in (
            (pytest.mark.long, [(torch.float32, True), (torch.float16, False)]),
            (pytest.mark.gpu, [(torch.bfloat16, False), (torch.bfloat16, True)]),
        )
        for dtype, flag in pairs
    ),
]
# Codes of NF4 have numbers that 16 bits round.
ROUNDED = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
EXACT = 5e-6


def weight_of(numbers: Numbers, case: Case, *, shifted: bool = False) -> QuantizedWeight:
    return moved(random_weight(numbers, case, shifted=shifted), DEVICE)


def check(weight: QuantizedWeight, x: torch.Tensor, some: Sequence[tuple[int, int]] = ()) -> None:
    """Float32 results are the twin's, and `some` rows (begin, end) have the same bits alone."""
    bias = noise(weight.shape[0], dtype=x.dtype, seed=3)
    product = quantized_tile_product(weight, bias, torch.float32)
    with poisoned():
        whole = product(x)
    close = ROUNDED[x.dtype] if weight.numbers == "nf4" else EXACT
    expected = quantized_twin(weight, bias, torch.float32)(x)
    torch.testing.assert_close(whole, expected, rtol=close, atol=close)
    for begin, end in some:
        with poisoned():
            assert torch.equal(product(x[begin:end]), whole[begin:end]), f"rows {begin} to {end}"


@pytest.mark.parametrize(("dtype", "shifted"), SOME)
@pytest.mark.parametrize(
    "numbers", [*QUICK_KINDS, *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)]
)
def test_products_are_the_twins_and_a_row_has_the_same_bits_in_any_step(
    numbers: Numbers, dtype: torch.dtype, shifted: bool
) -> None:
    can_compute(dtype)
    for case, rows in zip(CASES, (18, 2, 2), strict=True):
        x = noise(rows, case.inputs, dtype=dtype, seed=1)
        check(weight_of(numbers, case, shifted=shifted), x, [(rows - 1, rows)])


@pytest.mark.parametrize("shifted", [False, True], ids=["", "shifted"])
@pytest.mark.parametrize("numbers", ["int4", "int8"])
def test_groups_that_end_within_a_half_are_padded(numbers: Numbers, shifted: bool) -> None:
    check(weight_of(numbers, Case(34, 90, 24), shifted=shifted), noise(3, 90))


@pytest.mark.parametrize("scale", [None, 0.03], ids=["a scale per row", "one scale"])
@pytest.mark.parametrize("activations", ["int8", "fp8"])
def test_inputs_are_rounded_and_ordered_as_the_weight_asks(
    activations: Numbers, scale: float | None
) -> None:
    """Also small numbers, and those beyond the one scale. The codes of all are exact in 16 bits,
    and results as precise."""
    case, order = Case(34, 1056, 32), torch.randperm(1056, generator=torch.Generator())
    x = noise(5, case.inputs, dtype=torch.float16)
    x[1] = 0
    x[2] *= 20
    x[3, 1:] *= 0.01
    for shifted in (False, True):
        weight = replace(
            weight_of(activations, case, shifted=shifted),
            activations=activations,
            input_scale=scale,
            order_I=order.to(DEVICE),
        )
        expected = quantized_twin(weight, None, torch.float32)(x)
        actual = quantized_tile_product(weight, None, torch.float32)(x)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        pytest.param(torch.float32, marks=pytest.mark.long),
        pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_a_row_has_the_same_bits_if_one_program_adds_all_splits_or_a_second_kernel_does(
    dtype: torch.dtype,
) -> None:
    can_compute(dtype)
    weight = weight_of("int4", Case(20, 1152, 64), shifted=True)
    weight = replace(weight, activations="int8")
    x = noise(STORED_ROWS + 1, 1152, dtype=dtype, seed=1)
    product = quantized_tile_product(weight, noise(20, dtype=dtype, seed=3))
    with launches() as found:
        whole = product(x)
    assert [each.kernel for each in found] == ["_prepare_inputs", "_quantized_matmul"]
    assert_close(whole, quantized_twin(weight, noise(20, dtype=dtype, seed=3))(x))
    for begin, end in ((0, 1), (63, 80)):
        with launches() as found, poisoned():
            part = product(x[begin:end])
        kernels = ["_prepare_inputs", "_quantized_matmul", "_add_splits"]
        assert [each.kernel for each in found] == kernels
        assert torch.equal(part, whole[begin:end]), f"rows {begin} to {end}"


def test_results_have_the_dtype_of_the_inputs_and_logits_are_float32() -> None:
    weight, x = weight_of("int8", Case(20, 64, 0)), noise(3, 64, dtype=torch.float16)
    assert QUANTIZED_TILE.product(weight, None)(x).dtype == torch.float16
    assert QUANTIZED_TILE_HEAD.product(weight, None)(x).dtype == torch.float32


def test_quantized_weights_take_these_kernels_with_and_without_batch_invariance() -> None:
    weight, plain = weight_of("int8", Case(20, 64, 0)), noise(20, 64)
    libraries = packed_methods("q_proj", plain), packed_methods(HEAD, plain)
    for exact, methods in ((True, (FIXED_TILE, FIXED_TILE_HEAD)), (False, libraries)):
        method_of = linear_methods("triton", exact=exact)
        assert method_of("q_proj", weight) is QUANTIZED_TILE
        assert method_of(HEAD, weight) is QUANTIZED_TILE_HEAD
        assert (method_of("q_proj", plain), method_of(HEAD, plain)) == methods


def test_codes_take_no_more_memory_than_before_and_those_of_8_bits_are_not_copied() -> None:
    cases: list[tuple[Numbers, Case]] = [
        ("int4", Case(20, 576, 32)),
        ("int8", Case(20, 100, 0)),
    ]
    for numbers, case in cases:
        weight = weight_of(numbers, case, shifted=True)
        packed = triton_weight(weight)
        assert packed.nbytes == weight.nbytes
        same = packed.codes_OB.data_ptr() == weight.codes_OJ.data_ptr()
        assert same == (numbers == "int8")


# Of gate and up, and of down.
EXPERT_CASES = Case(48, 64, 32), Case(64, 24, 0)
EXPERTS, CHOSEN = 4, 2


# With a clamped gate, inputs are rounded, and there are biases.
def experts_of(numbers: Numbers, dtype: torch.dtype, *, clamped: bool) -> QuantizedExperts:
    gate_up, down = (
        moved(random_weight(numbers, case, experts=(EXPERTS,)), DEVICE) for case in EXPERT_CASES
    )
    if not clamped:
        return QuantizedExperts(gate_up, down)
    gate_up, down = (replace(each, activations="int8") for each in (gate_up, down))
    biases = noise(EXPERTS, 48, dtype=dtype), noise(EXPERTS, 64, dtype=dtype, seed=1)
    return QuantizedExperts(gate_up, down, *biases, ClampedSwiGLU(1.7, 0.8))


def routed(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, Routes]:
    ids = noise(tokens, EXPERTS, seed=4).topk(CHOSEN).indices.sort(-1).values
    x = noise(tokens, EXPERT_CASES[0].inputs, dtype=dtype, seed=5)
    return x, Routes(ids, noise(tokens, CHOSEN, seed=6).abs())


def packed(ops: Ops, weights: QuantizedExperts) -> TritonExperts:
    made = ops.pack_experts(weights)
    assert isinstance(made, TritonExperts)
    return made


@pytest.mark.parametrize(("dtype", "clamped"), SOME)
@pytest.mark.parametrize("numbers", ["int4", pytest.param("fp8", marks=pytest.mark.long)])
def test_experts_are_the_twins_and_a_token_has_the_same_bits_in_any_step(
    dtype: torch.dtype, numbers: Numbers, clamped: bool
) -> None:
    can_compute(dtype)
    weights, ops = experts_of(numbers, dtype, clamped=clamped), ops_for("triton")
    ready, (x, routes) = packed(ops, weights), routed(19, dtype)
    with poisoned():
        whole = ops.experts(x, routes, ready)
    assert whole.dtype == dtype
    assert_close(whole, experts_twin(x, routes, weights))
    for some in (slice(0, 1), slice(11, 19)):
        its = Routes(routes.ids_TC[some], routes.weights_TC[some])
        assert torch.equal(ops.experts(x[some], its, ready), whole[some]), some


def test_experts_are_launched_without_waiting_for_the_device() -> None:
    ops = ops_for("triton")
    ready = packed(ops, experts_of("int4", torch.float32, clamped=True))
    x, routes = routed(1, torch.float32)
    with waits() as found:
        ops.experts(x, routes, ready)
    assert found == []


@pytest.mark.gpu
def test_a_cuda_graph_computes_routes_that_were_not_known_when_it_was_recorded() -> None:
    needs("gpu")
    ops, graph = ops_for("triton"), torch.cuda.CUDAGraph()
    weights = experts_of("int4", torch.bfloat16, clamped=True)
    ready, (x, routes) = packed(ops, weights), routed(19, torch.bfloat16)
    ops.experts(x, routes, ready)  # compiles
    with torch.cuda.graph(graph):
        actual = ops.experts(x, routes, ready)
    routes.ids_TC.copy_(torch.tensor([0, 3], device=DEVICE))
    graph.replay()
    assert_close(actual, experts_twin(x, routes, weights))

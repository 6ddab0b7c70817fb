"""The experts of a step, with a CPU's compiled kernels and with Triton: values of the twin, and the
same bits for a token whatever is beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from baton_engine.attention.selector import Kernels
from baton_engine.build import ops_for
from baton_engine.cpu_kernels.experts import PART_PAIRS, PackedExperts
from baton_engine.layers.experts import ClampedSwiGLU, ExpertWeights, Routes, experts_twin
from baton_engine.layers.triton_experts import TILE_32_BITS, most_tiles
from tests.support.engines.kernels import DEVICE, assert_close, noise, poisoned
from tests.support.engines.waits import waits
from tests.support.needs import needs

CPU = torch.device("cpu")
COMPUTED = [
    pytest.param("torch", torch.float32, id="CPU, float32"),
    pytest.param("torch", torch.bfloat16, id="CPU, bfloat16"),
    pytest.param("triton", torch.float32, id="Triton, float32"),
    pytest.param("triton", torch.float16, id="Triton, float16"),
    pytest.param("triton", torch.bfloat16, id="Triton, bfloat16", marks=pytest.mark.gpu),
]


class Case(NamedTuple):
    tokens: int
    experts: int
    chosen: int
    hidden: int
    size: int


# One token; sizes below, at and above blocks and tiles, odd and even; all experts chosen; one of
# them, so that most have none; more pairs of an expert than a tile has.
CASES = [
    Case(1, 4, 2, 64, 32),
    Case(3, 5, 5, 33, 7),
    Case(9, 7, 1, 96, 37),
    Case(40, 3, 2, 70, 40),
]


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def weights_of(case: Case, dtype: torch.dtype, kernels: Kernels, *, clamped: bool) -> ExpertWeights:
    """With biases if the gate is clamped, as in gpt-oss. The limit holds for some numbers."""
    _, experts, _, hidden, size = case
    shapes = [(2 * size, hidden), (hidden, size), (2 * size,), (hidden,)]
    made = [
        (noise(experts, *shape, dtype=dtype, seed=number) / shape[-1] ** 0.5).to(place(kernels))
        for number, shape in enumerate(shapes)
    ]
    gate_up, down, gate_up_bias, down_bias = made
    if not clamped:
        return ExpertWeights(gate_up, down)
    return ExpertWeights(gate_up, down, gate_up_bias, down_bias, ClampedSwiGLU(1.7, 0.8))


def place(kernels: Kernels) -> torch.device:
    return CPU if kernels == "torch" else DEVICE


def inputs_of(case: Case, dtype: torch.dtype, kernels: Kernels) -> tuple[torch.Tensor, Routes]:
    scores, factors = noise(case.tokens, case.experts, seed=5), noise(case.tokens, case.chosen)
    ids = scores.topk(case.chosen).indices.sort(-1).values
    x = noise(case.tokens, case.hidden, dtype=dtype, seed=6).to(place(kernels))
    return x, Routes(ids.to(x.device), factors.to(x.device))


def compute(
    x: torch.Tensor, routes: Routes, weights: ExpertWeights, kernels: Kernels
) -> torch.Tensor:
    """Weights stay as they are: packing overwrites a copy."""
    copy = replace(
        weights, gate_up_EGD=weights.gate_up_EGD.clone(), down_EDF=weights.down_EDF.clone()
    )
    ops = ops_for(kernels)
    with poisoned():
        return ops.experts(x, routes, ops.pack_experts(copy))


@pytest.mark.parametrize("clamped", [False, True], ids=["silu", "clamped, with biases"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("kernels", "dtype"), COMPUTED)
def test_the_outputs_equal_those_of_the_twin(
    case: Case, kernels: Kernels, dtype: torch.dtype, clamped: bool
) -> None:
    if dtype == torch.bfloat16 and kernels == "triton":
        needs("gpu")
    weights = weights_of(case, dtype, kernels, clamped=clamped)
    x, routes = inputs_of(case, dtype, kernels)
    actual = compute(x, routes, weights, kernels)
    assert actual.dtype == dtype
    assert_close(actual, experts_twin(x, routes, weights))


@pytest.mark.parametrize(("kernels", "dtype"), COMPUTED)
def test_a_token_has_the_same_bits_alone_and_beside_any_others(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    """Also if all choose the same experts, so that some experts have no token."""
    if dtype == torch.bfloat16 and kernels == "triton":
        needs("gpu")
    case = Case(23, 6, 2, 40, 24)
    weights = weights_of(case, dtype, kernels, clamped=True)
    x, routes = inputs_of(case, dtype, kernels)
    whole = compute(x, routes, weights, kernels)
    for token, count in ((0, 1), (11, 1), (22, 1), (22, 19)):
        some = torch.full((count,), token, device=x.device)
        its = Routes(routes.ids_TC[some], routes.weights_TC[some])
        assert torch.equal(compute(x[some], its, weights, kernels), whole[some]), (token, count)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_with_any_number_of_threads(dtype: torch.dtype) -> None:
    """Experts have several parts, which threads compute side by side."""
    case = Case(2 * PART_PAIRS + 5, 2, 1, 70, 40)
    weights = weights_of(case, dtype, "torch", clamped=False)
    x, routes = inputs_of(case, dtype, "torch")
    divided = compute(x, routes, weights, "torch")
    torch.set_num_threads(1)
    assert torch.equal(compute(x, routes, weights, "torch"), divided)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_whole_blocks_are_packed_in_their_own_memory(dtype: torch.dtype) -> None:
    ops = ops_for("torch")
    for size, own in ((64, True), (40, False)):
        weights = weights_of(Case(1, 2, 1, 128, size), dtype, "torch", clamped=False)
        packed = ops.pack_experts(weights)
        assert isinstance(packed, PackedExperts)
        same = packed.gate_up_EBIW.data_ptr() == weights.gate_up_EGD.data_ptr()
        assert same == own, size


def test_weights_that_the_cpu_kernels_do_not_compute_stay_as_they_are() -> None:
    weights = weights_of(CASES[0], torch.float16, "torch", clamped=True)
    ops = ops_for("torch")
    x, routes = inputs_of(CASES[0], torch.float16, "torch")
    assert ops.pack_experts(weights) is weights
    assert torch.equal(ops.experts(x, routes, weights), experts_twin(x, routes, weights))


def test_triton_launches_experts_without_waiting_for_the_device() -> None:
    weights = weights_of(CASES[0], torch.float32, "triton", clamped=True)
    x, routes = inputs_of(CASES[0], torch.float32, "triton")
    with waits() as found:
        ops_for("triton").experts(x, routes, weights)
    assert found == []


@pytest.mark.parametrize(
    ("pairs", "experts", "most"),
    [(1, 32, 1), (4, 32, 4), (33, 32, 32), (48, 32, 33), (512, 32, 62), (512, 1, 32)],
)
def test_a_grid_has_as_many_tiles_as_any_routes_need(pairs: int, experts: int, most: int) -> None:
    tile = TILE_32_BITS.pairs
    assert most_tiles(pairs, experts, tile) == most
    used = min(pairs, experts)  # one pair each, and the rest to one of them
    assert used - 1 + -(-(pairs - used + 1) // tile) <= most


@pytest.mark.gpu
def test_a_cuda_graph_computes_routes_that_were_not_known_when_it_was_recorded() -> None:
    needs("gpu")
    case = Case(40, 6, 2, 130, 40)
    weights = weights_of(case, torch.float32, "triton", clamped=False)
    x, routes = inputs_of(case, torch.float32, "triton")
    ops, graph = ops_for("triton"), torch.cuda.CUDAGraph()
    ops.experts(x, routes, weights)  # compiles
    with torch.cuda.graph(graph):
        actual = ops.experts(x, routes, weights)
    routes.ids_TC.copy_(torch.tensor([0, 5], device=DEVICE))
    graph.replay()
    assert_close(actual, experts_twin(x, routes, weights))

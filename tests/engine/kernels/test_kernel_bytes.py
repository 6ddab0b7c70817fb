"""The bytes that kernels are said to move are those that the interpreter counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton_engine.attention.interface import KVSlots
from baton_engine.attention.layer_kv import LayerKV
from baton_engine.attention.triton_paged_attention import (
    MOST_LATENT,
    StepRows,
    paged_attention,
    tile_shape,
)
from baton_engine.attention.triton_store_kv import store_kv
from baton_engine.build import ops_for
from baton_engine.config.quantization.scheme import Numbers
from baton_engine.interface import Sample
from baton_engine.layers.experts import ExpertWeights, QuantizedExperts, Routes
from baton_engine.layers.rotary import HeadNorm
from baton_engine.layers.triton_activation import activation_mul
from baton_engine.layers.triton_experts import experts as compute_experts
from baton_engine.layers.triton_matmul import FIXED_TILE
from baton_engine.layers.triton_norm import add_norm
from baton_engine.layers.triton_quantized.products import QUANTIZED_TILE
from baton_engine.layers.triton_rope_store import rotate_store
from baton_engine.layers.triton_sampled import put_sampled
from baton_engine.layers.triton_splits import STORED_ROWS
from baton_engine.sampling.metadata import draws_of
from baton_engine.sampling.triton_sampler import choose_tokens
from baton_protocol.sampling import SamplingParams
from tests.support.engines.kernel_bytes import ESTIMATES, Bytes, Rows, Shape, bytes_of
from tests.support.engines.kernels import DEVICE, noise
from tests.support.engines.launches import Launched, launches
from tests.support.engines.paged import pages_of
from tests.support.engines.quantized.random_weights import Case, random_weight
from tests.support.engines.small_pool import slots_in

SMALL = Shape(
    hidden=48, mlp=40, heads=4, kv_heads=2, dim=32, block=16, item=4, vocab=3000, chosen=2
)
# All query heads share a row of 40 numbers, the first 24 of which are v. V smaller than K.
LATENT = replace(SMALL, kv_heads=1, dim=40, value_dim=24, latent=True)
NARROW = replace(SMALL, value_dim=16)
# Bytes of single numbers, such as a row's length, that a program loads and the estimates omit.
UNCOUNTED = 40
# Of a program of sampling: parameters, digits and goals.
UNCOUNTED_SAMPLING = 80

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="needs triton's interpreter")


def attend(
    rows: Rows,
    shape: Shape = SMALL,
    *,
    programs: int = 1,
    exact: bool = False,
    window: int | None = None,
    sinks: bool = False,
) -> None:
    """Attention over rows that all read the same blocks."""
    count = len(rows.counts)
    blocks = -(-rows.keys // shape.block)
    where = StepRows(
        torch.tensor([0, *rows.counts]).cumsum(0).int(),
        torch.full((count,), rows.keys).int(),
        torch.arange(blocks).int().repeat(count, 1),
        one_token=set(rows.counts) == {1},
    )
    q_TNH = noise(rows.tokens, shape.heads, shape.dim)
    kept = (shape.dim,) if shape.latent else (shape.dim, shape.value)
    pool = noise(blocks, shape.kv_heads * shape.block * shape.kept)
    pages = pages_of(pool, kept, shape.kv_heads, shape.block)
    out_TNV = torch.empty(rows.tokens, shape.heads, shape.value)
    paged_attention(
        *(q_TNH, LayerKV(pages[0], pages[-1][..., : shape.value]), where, out_TNV),
        window=window,
        sinks_N=noise(shape.heads) if sinks else None,
        programs=programs,
        exact=exact,
    )


def check(launched: Launched, estimate: Bytes | None, uncounted: int = UNCOUNTED) -> None:
    assert estimate is not None
    single = launched.moved - estimate.moved
    assert 0 <= single <= uncounted * math.prod(launched.grid), launched
    assert estimate.floor <= estimate.moved


ATTENTION: dict[str, tuple[Rows, dict[str, Any]]] = {
    "one-token rows": (Rows((1, 1), 150), {}),
    "divided one-token rows": (Rows((1, 1), 600), {"programs": 4}),
    "divided one-token rows, exact": (Rows((1, 1), 600), {"programs": 4, "exact": True}),
    "divided one-token rows with a window": (Rows((1,), 600), {"programs": 4, "window": 300}),
    "a prompt": (Rows((21,), 40), {}),
    "a prompt, exact": (Rows((21,), 40), {"exact": True}),
    "a prompt beside a divided row": (Rows((1, 21), 300), {"programs": 2}),
    "a prompt with a window": (Rows((21,), 60), {"window": 30}),
    "one-token rows with sinks": (Rows((1, 1), 150), {"sinks": True}),
    "divided one-token rows with sinks": (Rows((1, 1), 600), {"programs": 4, "sinks": True}),
    "a prompt with sinks": (Rows((21,), 40), {"sinks": True}),
}


@pytest.mark.parametrize("shape", [SMALL, LATENT, NARROW], ids=["K and V", "latent", "narrow V"])
@pytest.mark.parametrize("name", ATTENTION)
def test_the_bytes_of_attention_are_those_that_the_interpreter_counts(
    name: str, shape: Shape
) -> None:
    """So latent rows are read once, for k and for v."""
    rows, options = ATTENTION[name]
    with launches() as found:
        attend(rows, shape, **options)
    assert [each.kernel for each in found] == ["_attend", "_join"][: 1 + ("divided" in name)]
    for each in found:
        estimate = ESTIMATES[each.kernel](shape, rows, each.constants)
        check(each, estimate)


def test_latent_rows_are_read_again_only_for_more_query_heads_than_fit_a_program() -> None:
    rows, read = Rows((1,), 100), []
    for heads in (MOST_LATENT, 2 * MOST_LATENT):
        with launches() as found:
            attend(rows, replace(LATENT, heads=heads))
        [each] = found
        check(each, ESTIMATES["_attend"](replace(LATENT, heads=heads), rows, each.constants))
        read.append(each.grid)
    # Neighbours in the grid run at the same time.
    assert read == [(1, 1, 1), (2, 1, 1)]


def heads_and_slots(tokens: int) -> tuple[torch.Tensor, KVSlots]:
    shape = SMALL
    heads_TZH = noise(tokens, shape.heads + 2 * shape.kv_heads, shape.dim)
    pool = noise(2, 1, 2, shape.kv_heads, shape.block, shape.dim)
    return heads_TZH, slots_in(pool, 0, torch.arange(tokens))


def rotated(*, norm: bool) -> None:
    heads_TZH, slots = heads_and_slots(3)
    weight_XH = noise(SMALL.heads + SMALL.kv_heads, SMALL.dim)
    tables = noise(3, 1, SMALL.dim // 2), noise(3, 1, SMALL.dim // 2)
    rotate_store(heads_TZH, SMALL.heads, HeadNorm(weight_XH, 1e-6) if norm else None, tables, slots)


def stored() -> None:
    heads_TZH, slots = heads_and_slots(3)
    store_kv(slots, heads_TZH[:, 4:6], heads_TZH[:, 6:])


def multiplied(rows: int, outputs: int, inputs: int, *, biased: bool = False) -> None:
    bias = noise(outputs) if biased else None
    FIXED_TILE.product(noise(outputs, inputs), bias)(noise(rows, inputs))


def quantized_multiplied(
    rows: int, numbers: Numbers, case: Case, *, shifted: bool = False, biased: bool = False
) -> None:
    weight = replace(random_weight(numbers, case, shifted=shifted), activations="int8")
    bias = noise(case.outputs) if biased else None
    QUANTIZED_TILE.product(weight, bias)(noise(rows, case.inputs))


def quantized_experts(tokens: int, *, shifted: bool) -> None:
    """As computed_by_experts, with shifts of gate and up only: a step has as many rows of their
    inputs as tokens."""
    hidden, size, experts = 48, 40, 6
    gate_up = random_weight("int4", Case(2 * size, hidden, 16), shifted=shifted, experts=(experts,))
    down = random_weight("int4", Case(hidden, size, 0), experts=(experts,))
    biases = (noise(experts, 2 * size), noise(experts, hidden)) if shifted else (None, None)
    ids = torch.arange(tokens * SMALL.chosen).view(tokens, SMALL.chosen) % experts
    ops = ops_for("triton")
    packed = ops.pack_experts(QuantizedExperts(gate_up, down, *biases))
    ops.experts(noise(tokens, hidden), Routes(ids, noise(tokens, SMALL.chosen)), packed)


def computed_by_experts(tokens: int, *, biased: bool) -> None:
    """Pairs are divided evenly among 6 experts."""
    hidden, size, experts, chosen = 48, 40, 6, SMALL.chosen
    biases = (noise(experts, 2 * size), noise(experts, hidden)) if biased else (None, None)
    weights = ExpertWeights(noise(experts, 2 * size, hidden), noise(experts, hidden, size), *biases)
    ids = torch.arange(tokens * chosen).view(tokens, chosen) % experts
    compute_experts(noise(tokens, hidden), Routes(ids, noise(tokens, chosen)), weights)


LAYERS: dict[str, tuple[int, Callable[[], object]]] = {
    "rope and store": (3, lambda: rotated(norm=False)),
    "norm, rope and store": (3, lambda: rotated(norm=True)),
    "store": (3, stored),
    "a norm": (3, lambda: add_norm(noise(3, 48), None, noise(48), 1e-6)),
    "a sum and a norm": (3, lambda: add_norm(noise(3, 48), noise(3, 48), noise(48), 1e-6)),
    "ids of the previous step": (
        3,
        lambda: put_sampled(torch.zeros(3).int(), torch.arange(3).int(), torch.arange(3)),
    ),
    "an activation": (3, lambda: activation_mul(noise(3, 80), "silu")),
    "experts": (1, lambda: computed_by_experts(1, biased=False)),
    "experts with several tiles": (60, lambda: computed_by_experts(60, biased=True)),
    "a product": (70, lambda: multiplied(70, 70, 100)),
    "a product with a bias": (70, lambda: multiplied(70, 70, 100, biased=True)),
    "a quantized product": (
        18,
        lambda: quantized_multiplied(18, "int4", Case(40, 96, 16), biased=True),
    ),
    "a quantized product with shifts": (
        3,
        lambda: quantized_multiplied(3, "int8", Case(33, 100, 0), shifted=True),
    ),
    "stored splits of a quantized product": (
        3,
        lambda: quantized_multiplied(3, "int8", Case(33, 1152, 128)),
    ),
    "quantized experts": (1, lambda: quantized_experts(1, shifted=True)),
    "quantized experts with several tiles": (60, lambda: quantized_experts(60, shifted=False)),
    "stored splits": (3, lambda: multiplied(3, 70, 1100, biased=True)),
    "splits in a program": (
        STORED_ROWS + 1,
        lambda: multiplied(STORED_ROWS + 1, 70, 600, biased=True),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_bytes_of_layers_are_those_that_the_interpreter_counts(name: str) -> None:
    tokens, run = LAYERS[name]
    with launches() as found:
        run()
    assert found
    for each in found:
        estimate = ESTIMATES[each.kernel](SMALL, Rows((1,) * tokens), each.constants)
        check(each, estimate)


def test_the_bytes_of_sampling_are_those_that_the_interpreter_counts() -> None:
    """All logits are equal, so that most tokens on the edge of top-p must go."""
    params = SamplingParams(top_k=5, top_p=0.5, seed=0)
    draws = draws_of([Sample(0, 0, params)] * 2, DEVICE)
    with launches() as found:
        choose_tokens(torch.zeros(2, SMALL.vocab), draws)
    largest = {each.kernel: each for each in sorted(found, key=lambda each: each.moved)}
    assert {"_count", "_weigh", "_count_ties", "_limits", "_draw", "_pick"} == set(largest)
    for each in largest.values():
        estimate = ESTIMATES[each.kernel](SMALL, Rows((1, 1)), each.constants)
        check(each, estimate, UNCOUNTED_SAMPLING)


def test_the_bytes_of_a_row_of_1024_keys_are_those_counted_by_hand() -> None:
    tile = tile_shape(True, 2, 128, 2)
    constants = {
        **{"ONE_TOKEN": True, "PROGRAMS": 8, "EXACT": False, "WINDOW": 0, "SINKS": False},
        **{"KEYS": tile.keys, "QUERIES": tile.queries, "SPLIT": 128 // tile.keys},
    }
    kv = 1024 * 8 * 128 * 2 * 2
    query = 16 * 128 * 2
    # Eight programs per kv head have 128 keys each; each key's block number is an int32.
    parts = 8 * 16 * (128 + 2) * 4
    moved = kv + 1024 * 8 * 4 + 8 * query + parts
    floor = kv + 64 * 4 + 2 * query
    assert bytes_of("_attend", Shape(), 1, constants) == Bytes(moved, floor)
    assert bytes_of("_join", Shape(), 1, constants) == Bytes(parts + query, parts + query)
    # With 256 rows, a program has all keys of a row.
    moved = 256 * (kv + 1024 * 8 * 4 + 2 * query)
    assert bytes_of("_attend", Shape(), 256, constants) == Bytes(moved, 256 * floor)
    assert bytes_of("_join", Shape(), 256, constants) is None


def test_the_bytes_of_latent_rows_and_of_a_window_are_those_counted_by_hand() -> None:
    """DeepSeek V2-Lite's 16 heads share a row of 576 numbers; a window of 256 keys."""
    constants = {
        **{"ONE_TOKEN": True, "PROGRAMS": 1, "EXACT": False, "WINDOW": 0, "SINKS": False},
        **{"KEYS": 16, "QUERIES": 16, "SPLIT": 8, "GROUP": 16},
    }
    latent = Shape(heads=16, kv_heads=1, dim=576, value_dim=512, latent=True)
    ends = 16 * (576 + 512) * 2
    bytes_of_row = bytes_of("_attend", latent, 1, constants)
    assert bytes_of_row == Bytes(1024 * (576 * 2 + 4) + ends, 1024 * 576 * 2 + 64 * 4 + ends)
    window = {**constants, "WINDOW": 256, "GROUP": 2}
    seen, ends = 256 * 8 * 128 * 2 * 2, 2 * 16 * 128 * 2
    bytes_of_row = bytes_of("_attend", Shape(), 1, window)
    assert bytes_of_row == Bytes(seen + 256 * 8 * 4 + ends, seen + 16 * 4 + ends)


def test_the_bytes_of_a_product_are_those_counted_by_hand() -> None:
    constants = {
        **{"OUTPUTS": 1024, "INPUTS": 2048, "SPLITS": 8, "STORED": True},
        **{"HAS_BIAS": False, "M": 64, "N": 32},
    }
    weight, x = 1024 * 2048 * 2, 2048 * 2
    moved = weight + 32 * x + 8 * 1024 * 4  # each of 32 tiles loads x
    assert bytes_of("_matmul", Shape(), 1, constants) == Bytes(moved, weight + x + 1024 * 2)
    sums = 8 * 1024 * 4 + 1024 * 2
    assert bytes_of("_add_splits", Shape(), 1, constants) == Bytes(sums, sums)
    assert bytes_of("_matmul", Shape(), 256, constants) is None
    moved = 4 * weight + 256 * (32 * x + 1024 * 2)
    floor = weight + 256 * (x + 1024 * 2)
    within = {**constants, "STORED": False}
    assert bytes_of("_matmul", Shape(), 256, within) == Bytes(moved, floor)


def test_a_kernel_without_an_estimate_has_no_bytes() -> None:
    assert bytes_of("_unknown", Shape(), 1, {}) is None

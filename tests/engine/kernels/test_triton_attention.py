"""TritonAttention gives the same outputs, pool and slots as TorchAttention."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from baton_engine.attention import triton_backend
from baton_engine.attention.exact.backend import TorchAttention
from baton_engine.attention.interface import StepAttention, StepBatch
from baton_engine.attention.triton_backend import TritonAttention
from baton_engine.interface import Row
from baton_engine.kv.eight_bits import encoded
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.runner.input_buffers import StepShape, fill, to_device
from baton_protocol.ids import BlockId
from baton_protocol.layout import EXPONENTS, LATENT, KVField, KVLayout, in_codes
from tests.support.engines.attention_specs import batch_of, specs_of
from tests.support.engines.demands import kv_layout
from tests.support.engines.kernels import DEVICE, noise
from tests.support.engines.launches import launches
from tests.support.engines.paged import assert_near
from tests.support.engines.small_pool import kv_of

BLOCK, DIM, HEADS, KV_HEADS, POOL = 4, 16, 4, 2, 100
WINDOWS = (None, 6)  # of two layers
SPANS = {
    "one-token rows": [(60, 1), (13, 1), (4, 1), (0, 1)],
    "a prompt": [(0, 13)],
    "a mix": [(33, 1), (5, 1), (0, 9), (8, 7), (7, 2)],
}


def make_memory(code: str | None = None) -> TorchMemory:
    layout = kv_layout(layers=len(WINDOWS), heads=KV_HEADS, dim=DIM, block=BLOCK)
    if code is not None:
        return coded_memory(layout.in_dtype(code))
    memory = TorchMemory(layout, POOL, DEVICE)
    kv_of(memory).copy_(noise(*kv_of(memory).shape))
    return memory


def coded_memory(layout: KVLayout) -> TorchMemory:
    """A pool of codes of noise."""
    memory = TorchMemory(layout, POOL, DEVICE)
    for name, codes in memory.fields.items():
        if not name.endswith(EXPONENTS):
            found = encoded(noise(*codes.shape), codes.dtype)
            codes.copy_(found[0])
            memory.fields[name + EXPONENTS].copy_(found[1])
    return memory


def rows_of(spans: Sequence[tuple[int, int]]) -> list[Row]:
    """Rows from spans (start, tokens), each with its own blocks and one block more than it
    needs."""
    free = list(range(1, POOL + 1))
    random.Random(0).shuffle(free)
    return [
        Row(
            [0] * tokens, start, [BlockId(free.pop()) for _ in range((start + tokens) // BLOCK + 2)]
        )
        for start, tokens in spans
    ]


@pytest.mark.parametrize("name", SPANS)
def test_outputs_and_the_pool_equal_those_of_torch(name: str) -> None:
    rows, tokens = rows_of(SPANS[name]), sum(count for _, count in SPANS[name])
    both = make_memory(), make_memory()
    specs = specs_of(both[0].layout, HEADS, WINDOWS)
    batch = batch_of(rows, both[0].layout, DEVICE)
    torch_step: StepAttention = TorchAttention(both[0], specs).begin(batch)
    step: StepAttention = TritonAttention(both[1], specs).begin(batch)
    for layer in range(len(WINDOWS)):
        qkv = noise(tokens, HEADS + 2 * KV_HEADS, DIM, seed=layer)
        q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
        expected = torch_step.attend(layer, q, k, v).cpu().double()
        assert_near(step.attend(layer, q, k, v), expected)
    assert torch.equal(both[0].pool, both[1].pool)


@pytest.mark.parametrize(
    ("code", "exact"),
    [
        ("float8_e4m3fn", False),
        pytest.param("int8", False, marks=pytest.mark.long),
        pytest.param("int8", True, marks=pytest.mark.long),
    ],
)
def test_outputs_and_the_pool_of_codes_equal_those_of_torch(code: str, exact: bool) -> None:
    spans = SPANS["a mix"]
    both, tokens = (make_memory(code), make_memory(code)), sum(count for _, count in spans)
    specs = specs_of(both[0].layout, HEADS, WINDOWS)
    batch = batch_of(rows_of(spans), both[0].layout, DEVICE)
    torch_step = TorchAttention(both[0], specs, dtype=torch.float32).begin(batch)
    step = TritonAttention(both[1], specs, exact=exact).begin(batch)
    for layer in range(len(WINDOWS)):
        qkv = noise(tokens, HEADS + 2 * KV_HEADS, DIM, seed=layer)
        qkv *= torch.exp2(noise(tokens, HEADS + 2 * KV_HEADS, 1, seed=9))
        qkv[:, :, 1] *= 1e-4  # subnormal codes
        q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
        expected = torch_step.attend(layer, q, k, v).cpu().double()
        assert_near(step.attend(layer, q, k, v), expected)
    assert torch.equal(both[0].pool, both[1].pool)


@pytest.mark.parametrize("code", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.long)])
def test_latent_rows_of_codes_equal_those_of_torch(code: str) -> None:
    rank, rotated, spans = 16, 8, SPANS["a mix"]
    layout = KVLayout.of_fields(
        in_codes([KVField(LATENT, 1, rank + rotated, code)], code),
        num_layers=1,
        block_size=BLOCK,
        chunk_blocks=1,
    )
    both, tokens = (coded_memory(layout), coded_memory(layout)), sum(count for _, count in spans)
    [spec] = specs_of(layout, HEADS)
    spec = replace(spec, value_dim=rank, latent=True)
    batch = batch_of(rows_of(spans), layout, DEVICE)
    q, k = noise(tokens, HEADS, rank + rotated), noise(tokens, 1, rank + rotated, seed=1)
    torch_step = TorchAttention(both[0], [spec], dtype=torch.float32).begin(batch)
    expected = torch_step.attend(0, q, k, None).cpu().double()
    assert_near(TritonAttention(both[1], [spec]).begin(batch).attend(0, q, k, None), expected)
    assert torch.equal(both[0].pool, both[1].pool)


@pytest.mark.parametrize("name", SPANS)
def test_slots_equal_those_of_torch(name: str) -> None:
    memory = make_memory()
    batch = batch_of(rows_of(SPANS[name]), memory.layout, DEVICE)
    for layer in range(len(WINDOWS)):
        expected = TorchAttention(memory, specs_of(memory.layout, HEADS)).begin(batch).slots(layer)
        slots = TritonAttention(memory, specs_of(memory.layout, HEADS)).begin(batch).slots(layer)
        assert torch.equal(slots.slots_T, expected.slots_T)
        both = (slots.k_PKBH, expected.k_PKBH), (slots.v_PKBV, expected.v_PKBV)
        for part, (one, other) in enumerate(both):
            pages = kv_of(memory)[:, layer, part]
            assert one.data_ptr() == other.data_ptr() == pages.data_ptr()
            assert one.stride() == other.stride() == pages.stride()


def test_triton_attention_does_not_store_kv_that_is_marked_as_stored() -> None:
    rows, memory = rows_of(SPANS["a mix"]), make_memory()
    before = memory.pool.clone()
    batch = batch_of(rows, memory.layout, DEVICE)
    step = TritonAttention(memory, specs_of(memory.layout, HEADS)).begin(batch)
    qkv = noise(20, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    step.attend(0, q, k, v, stored=True)
    assert torch.equal(memory.pool, before)


@pytest.mark.parametrize("starts", [[290], [30, 7, 0]], ids=["split keys", "several rows"])
def test_a_padded_step_equals_a_step_without_padding(starts: list[int]) -> None:
    """If there are several rows, a line of padding follows them. It reads block 0 and stores
    nothing."""
    rows = rows_of([(start, 1) for start in starts])
    lines = len(rows) if len(rows) == 1 else len(rows) + 1
    both = make_memory(), make_memory()
    specs = specs_of(both[0].layout, HEADS, WINDOWS)
    batch = batch_of(rows, both[0].layout, DEVICE)
    shape = StepShape(lines, lines, POOL, 1)
    host = shape.arrays_in(np.zeros(shape.size, np.int32))
    fill(host, batch.host)
    fixed = StepBatch(host, to_device(host, DEVICE), 1, POOL * BLOCK)
    plain, padded = TritonAttention(both[0], specs), TritonAttention(both[1], specs)
    for layer in range(len(WINDOWS)):
        qkv = noise(lines, HEADS + 2 * KV_HEADS, DIM, seed=layer)
        q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
        real = slice(len(rows))
        expected = plain.begin(batch).attend(layer, q[real], k[real], v[real])
        actual = padded.begin(fixed).attend(layer, q, k, v)
        assert_near(actual[real], expected.cpu().double())
        assert bool(actual.isfinite().all())
    assert torch.equal(both[0].pool, both[1].pool)


@pytest.mark.parametrize(
    ("spans", "programs"),
    [([(60, 1), (2, 1)], 2), ([(60, 1), (40, 20)], 2), ([(0, 20)], 1), ([(0, 9), (30, 7)], 1)],
    ids=["one-token rows", "a mix", "a prompt", "two prompts"],
)
def test_keys_are_divided_only_if_a_step_has_a_one_token_row(
    spans: list[tuple[int, int]], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number of programs would compile another variant for prompts of other lengths."""
    monkeypatch.setattr(triton_backend, "programs_for", lambda *sizes: 2)
    rows, memory = rows_of(spans), make_memory()
    step = TritonAttention(memory, specs_of(memory.layout, HEADS)).begin(
        batch_of(rows, memory.layout, DEVICE)
    )
    qkv = noise(sum(count for _, count in spans), HEADS + 2 * KV_HEADS, DIM)
    q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    with launches() as found:
        step.attend(0, q, k, v, stored=True)
    kernels = ["_attend", "_join"] if programs > 1 else ["_attend"]
    assert [each.kernel for each in found] == kernels
    assert {each.constants["PROGRAMS"] for each in found} == {programs}

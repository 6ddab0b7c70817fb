"""Triton and torch Ops give the same attention and logits. Also: the KV slots of a step."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton_engine.attention.exact.backend import TorchAttention
from baton_engine.attention.selector import Kernels
from baton_engine.build import ops_for
from baton_engine.config.families import read_config
from baton_engine.config.model_config import RopeConfig
from baton_engine.interface import Row
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.layers.ops import TORCH_OPS, Ops
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.rotary import HeadNorm, Rope
from baton_engine.models.registry import build_model
from baton_engine.weights.loader import load_weights
from baton_protocol.ids import BlockId
from tests.support.engines.attention_specs import batch_of, specs_of
from tests.support.engines.demands import kv_layout
from tests.support.engines.kernels import DEVICE, assert_close, noise
from tests.support.engines.small_pool import kv_of
from tests.support.engines.tiny_models import prompt_of

N, K, H, BLOCK, LAYERS = 4, 2, 16, 4, 2
# A decode row, a later piece of a prompt and a whole prompt. Their blocks are scattered over the
# pool.
ROWS = [
    Row([0], 9, [BlockId(7), BlockId(2), BlockId(11)]),
    Row([0] * 3, 3, [BlockId(4), BlockId(9)]),
    Row([0] * 6, 0, [BlockId(1), BlockId(12)]),
]
POSITIONS = [9, 3, 4, 5, 0, 1, 2, 3, 4, 5]
# block id * BLOCK + offset in the block
SLOTS = [45, 19, 36, 37, 4, 5, 6, 7, 48, 49]


def memory_of(kv_heads: int, dim: int, layers: int) -> TorchMemory:
    layout = kv_layout(layers=layers, heads=kv_heads, dim=dim, block=BLOCK)
    memory = TorchMemory(layout, 12, DEVICE)
    kv_of(memory).copy_(noise(*kv_of(memory).shape, seed=3))
    return memory


def test_a_steps_slots_are_where_it_stores_its_tokens_kv() -> None:
    memory = memory_of(K, H, LAYERS)
    step = TorchAttention(memory, specs_of(memory.layout, N)).begin(batch_of(ROWS, memory.layout))
    assert step.slots(0).slots_T.tolist() == SLOTS
    k, v = noise(len(SLOTS), K, H, seed=1), noise(len(SLOTS), K, H, seed=2)
    step.attend(1, noise(len(SLOTS), N, H), k, v)
    for token, slot in enumerate(SLOTS):
        block, offset = divmod(slot, BLOCK)
        stored = kv_of(memory)[block, 1, :, :, offset]
        assert torch.equal(stored, torch.stack([k[token], v[token]]))


def test_torch_attention_does_not_store_kv_that_is_marked_as_stored() -> None:
    memory = memory_of(K, H, LAYERS)
    before = kv_of(memory).clone()
    q, k, v = (noise(len(SLOTS), heads, H) for heads in (N, K, K))
    TorchAttention(memory, specs_of(memory.layout, N)).begin(batch_of(ROWS, memory.layout)).attend(
        0, q, k, v, stored=True
    )
    assert torch.equal(kv_of(memory), before)


@pytest.mark.parametrize("with_norm", [False, True], ids=["Llama", "Qwen3"])
def test_attention_outputs_and_the_pool_are_the_same_with_kernels_and_with_torch(
    with_norm: bool,
) -> None:
    norm = HeadNorm(noise(N + K, H, seed=5), 1e-6) if with_norm else None
    rope = Rope(RopeConfig(type="default", theta=1e4), H, torch.float32, DEVICE)
    tables = rope.tables(torch.tensor(POSITIONS, device=DEVICE))
    results = []  # (outputs, pool) of torch, then of the kernels
    for ops in (TORCH_OPS, ops_for("triton")):
        memory = memory_of(K, H, LAYERS)
        step = TorchAttention(memory, specs_of(memory.layout, N)).begin(
            batch_of(ROWS, memory.layout)
        )
        heads = noise(len(SLOTS), N + 2 * K, H, seed=6)
        out_TNH = ops.attend(heads, N, norm, tables, 1, step)
        results.append((out_TNH, kv_of(memory)))
    assert_close(results[1][0], results[0][0])
    assert_close(results[1][1], results[0][1])


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("tokens", [1, 5, 1024, 1500])
def test_awaited_tokens_become_the_ids_that_were_sampled_for_them(
    tokens: int, kernels: Kernels
) -> None:
    draw = random.Random(tokens)
    known = [draw.randrange(1 << 17) for _ in range(tokens)]
    sampled = [draw.randrange(1 << 17) for _ in range(7)]
    awaits = [draw.randrange(-1, 7) for _ in range(tokens)]
    tokens_T, awaits_T = (torch.tensor(each, dtype=torch.int32) for each in (known, awaits))
    device_T = tokens_T.to(DEVICE)
    ops_for(kernels).put_sampled(
        device_T, awaits_T.to(DEVICE), torch.tensor(sampled, device=DEVICE)
    )
    expected = [
        id if await_ < 0 else sampled[await_] for id, await_ in zip(known, awaits, strict=True)
    ]
    assert device_T.tolist() == expected


@pytest.mark.parametrize("name", ["llama3-rope", "qwen3-gqa4"])
def test_a_models_logits_are_the_same_with_kernels_and_with_torch(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(name)
    config = read_config(folder)
    tokens, positions = torch.tensor(prompt_of(9, seed=1)), torch.arange(9)
    row = Row(tokens.tolist(), 0, [BlockId(5), BlockId(3), BlockId(8)])

    def logits(ops: Ops) -> torch.Tensor:
        slots = WeightSlots(torch.float32, DEVICE, ops)
        model = build_model(config, slots)
        load_weights(folder, config, slots)
        slots.finish()
        memory = memory_of(config.num_kv_heads, config.head_dim, config.num_layers)
        step = TorchAttention(memory, specs_of(memory.layout, config.num_heads)).begin(
            batch_of([row], memory.layout)
        )
        return model.logits(model.forward(tokens.to(DEVICE), positions.to(DEVICE), step))

    with torch.inference_mode():
        torch.testing.assert_close(logits(ops_for("triton")), logits(TORCH_OPS), rtol=0, atol=1e-4)


@pytest.mark.integration
def test_an_engine_with_torch_kernels_never_imports_triton() -> None:
    """CPU wheels of torch do not install triton."""
    script = """
import sys
from baton_engine.build import ops_for
ops_for("torch")
sys.exit("triton" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0

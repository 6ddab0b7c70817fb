"""Scale, window, soft cap and sinks of a layer: TritonAttention gives the outputs of
TorchAttention."""

from __future__ import annotations

import pytest
import torch

from baton_engine.attention.exact.backend import TorchAttention
from baton_engine.attention.triton_backend import TritonAttention
from baton_engine.config.model_config import AttentionSpec
from baton_engine.interface import Row
from baton_engine.kv.kv_pool import TorchMemory
from baton_protocol.ids import BlockId
from tests.support.engines.attention_specs import batch_of, sinks_of
from tests.support.engines.demands import kv_layout
from tests.support.engines.kernels import DEVICE, noise
from tests.support.engines.paged import assert_near
from tests.support.engines.small_pool import kv_of

BLOCK, HEADS, KV_HEADS = 4, 4, 2
ROWS = {
    "a mix": [
        Row([0], 30, [BlockId(block) for block in (7, 2, 11, 3, 15, 6, 9, 20)]),
        Row([0] * 5, 3, [BlockId(block) for block in (4, 10)]),
        Row([0] * 9, 0, [BlockId(block) for block in (1, 12, 5)]),
    ],
    "one-token rows": [
        Row([0], 30, [BlockId(block) for block in (7, 2, 11, 3, 15, 6, 9, 20)]),
        Row([0], 0, [BlockId(1)]),
    ],
}


def spec(
    dim: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    *,
    sinks: bool = False,
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=dim,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )


# Many scores are far above the cap of 2, and few are above that of 50.
SPECS = {
    "a scale": spec(16, 0.7),
    "a soft cap": spec(16, 1.0, soft_cap=2.0),
    "a soft cap and a window": spec(24, 0.5, window=6, soft_cap=50.0),
    "a soft cap and wide heads": spec(256, 256**-0.5, soft_cap=2.0),
    "sinks, a window and a soft cap": spec(16, 0.5, window=6, soft_cap=2.0, sinks=True),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rows", ROWS)
def test_outputs_equal_those_of_torch(name: str, rows: str) -> None:
    layer, step_rows = SPECS[name], ROWS[rows]
    tokens = sum(len(row.tokens) for row in step_rows)
    layout = kv_layout(heads=KV_HEADS, dim=layer.head_dim, block=BLOCK)
    qkv = noise(tokens, HEADS + 2 * KV_HEADS, layer.head_dim, seed=1) * 2
    q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    outputs = []
    for backend in (TorchAttention, TritonAttention):
        memory = TorchMemory(layout, 24, DEVICE)
        kv_of(memory).copy_(noise(*kv_of(memory).shape))
        step = backend(memory, [layer]).begin(batch_of(step_rows, layout, DEVICE))
        sinks_N = sinks_of(HEADS, DEVICE) if layer.sinks else None
        outputs.append(step.attend(0, q, k, v, sinks_N=sinks_N))
    assert_near(outputs[1], outputs[0].cpu().double())

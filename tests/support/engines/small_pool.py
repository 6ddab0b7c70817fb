"""A small KV pool filled with noise, and attention over it computed from its definition.

In: the number of kv heads; a row with its queries. Out: a TorchMemory; outputs in float64.

Shapes: T tokens of the row, N query heads, K kv heads, H head_dim, S keys, M blocks of the row,
B block size.
"""

from __future__ import annotations

import torch

from baton_engine.interface import Row
from baton_engine.kv.kv_pool import TorchMemory
from tests.support.engines.demands import kv_layout

LAYERS, BLOCK, DIM, POOL = 2, 16, 32, 400


def memory_of(kv_heads: int, dtype: str = "float32") -> TorchMemory:
    layout = kv_layout(layers=LAYERS, heads=kv_heads, dim=DIM, block=BLOCK, dtype=dtype)
    memory = TorchMemory(layout, POOL, torch.device("cpu"))
    memory.pool.normal_(generator=torch.Generator().manual_seed(1))
    return memory


def expected_of(
    memory: TorchMemory,
    layer: int,
    row: Row,
    q_TNH: torch.Tensor,
    window: int | None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply attention_of to a row's queries and its blocks in the pool."""
    table_M2KBH = memory.pool[list(row.blocks), layer]
    k_KSH, v_KSH = table_M2KBH.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return attention_of(q_TNH, k_KSH, v_KSH, row.start, window, sinks_N)


def attention_of(
    q_TNH: torch.Tensor,
    k_KSH: torch.Tensor,
    v_KSH: torch.Tensor,
    start: int,
    window: int | None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k / sqrt(H)) v in float64, one query and one head at a time. A head's sink is the
    score of one more key, whose value is 0."""
    group = q_TNH.shape[1] // k_KSH.shape[0]
    out_TNH = torch.empty(q_TNH.shape, dtype=torch.float64)
    for index in range(q_TNH.shape[0]):
        end = start + index + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        for head in range(q_TNH.shape[1]):
            k_SH, v_SH = k_KSH[head // group, seen].double(), v_KSH[head // group, seen].double()
            scores_S = k_SH @ q_TNH[index, head].double() / q_TNH.shape[2] ** 0.5
            if sinks_N is not None:
                scores_S = torch.cat((scores_S, sinks_N[head : head + 1].double().cpu()))
                v_SH = torch.cat((v_SH, torch.zeros_like(v_SH[:1])))
            out_TNH[index, head] = scores_S.softmax(0) @ v_SH
    return out_TNH

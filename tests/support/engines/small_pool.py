"""A small KV pool full of noise, and what attention over it is by its definition.

In: the number of kv heads; a row with its queries. Out: a TorchMemory; outputs in float64.

Shapes: T tokens of the row, N query heads, H head_dim, S keys.
"""

from __future__ import annotations

import torch

from baton_engine.api import Row
from baton_engine.torch_memory import TorchMemory
from baton_protocol.layout import KVLayout

LAYERS, BLOCK, DIM, POOL = 2, 4, 8, 400


def memory_of(kv_heads: int, dtype: str = "float32") -> TorchMemory:
    layout = KVLayout(
        num_layers=LAYERS,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        block_size=BLOCK,
        dtype=dtype,
        chunk_blocks=1,
    )
    memory = TorchMemory(layout, POOL, torch.device("cpu"))
    memory.pool.normal_(generator=torch.Generator().manual_seed(1))
    return memory


def expected_of(
    memory: TorchMemory,
    layer: int,
    row: Row,
    q_TNH: torch.Tensor,
    group: int,
    window: int | None,
) -> torch.Tensor:
    """softmax(q k / sqrt(H)) v over what a query sees, one query and one head at a time, of heads
    in groups of so many per kv head; float64 [T, N, H]."""
    table = memory.pool[list(row.blocks), layer].double()  # [M, 2, K, B, H]
    k_SKH, v_SKH = table.permute(1, 0, 3, 2, 4).reshape(2, -1, *table.shape[2:3], DIM)
    out_TNH = torch.empty(q_TNH.shape, dtype=torch.float64)
    for index in range(q_TNH.shape[0]):
        end = row.start + index + 1
        seen = slice(max(0, end - window) if window else 0, end)
        for head in range(q_TNH.shape[1]):
            scores_S = k_SKH[seen, head // group] @ q_TNH[index, head].double() / DIM**0.5
            out_TNH[index, head] = scores_S.softmax(0) @ v_SKH[seen, head // group]
    return out_TNH

"""A small KV pool filled with noise, and attention over it computed from its definition.

In: the number of kv heads; a row with its queries. Out: a TorchMemory; outputs in float64.

Shapes: T tokens of the row, N query heads, K kv heads, H head_dim, V numbers of a head of v,
S keys, M blocks of the row, B block size, P blocks and L layers of the pool.
"""

from __future__ import annotations

import torch

from baton_engine.attention.interface import KVSlots
from baton_engine.interface import Row
from baton_engine.kv.kv_pool import TorchMemory
from tests.support.engines.demands import kv_layout

LAYERS, BLOCK, DIM, POOL = 2, 16, 32, 400


def memory_of(kv_heads: int, dtype: str = "float32") -> TorchMemory:
    layout = kv_layout(layers=LAYERS, heads=kv_heads, dim=DIM, block=BLOCK, dtype=dtype)
    memory = TorchMemory(layout, POOL, torch.device("cpu"))
    kv_of(memory).normal_(generator=torch.Generator().manual_seed(1))
    return memory


def kv_of(memory: TorchMemory) -> torch.Tensor:
    """The pool as K and V of one shape, [P, L, 2, K, B, H]."""
    layout = memory.layout
    kv = memory.pool.view(memory.fields["k"].dtype)
    heads = layout.num_kv_heads, layout.block_size, layout.head_dim
    return kv.view(len(kv), layout.layer_slots(), 2, *heads)


def slots_in(pool: torch.Tensor, layer: int, slots_T: torch.Tensor) -> KVSlots:
    """The slots of a layer of a pool [P, L, 2, K, B, H]."""
    return KVSlots(pool[:, layer, 0], pool[:, layer, 1], slots_T)


def expected_of(
    memory: TorchMemory,
    layer: int,
    row: Row,
    q_TNH: torch.Tensor,
    window: int | None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply attention_of to a row's queries and its blocks in the pool."""
    table_M2KBH = kv_of(memory)[list(row.blocks), layer]
    k_KSH, v_KSV = table_M2KBH.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return attention_of(q_TNH, k_KSH, v_KSV, row.start, window, sinks_N)


def attention_of(
    q_TNH: torch.Tensor,
    k_KSH: torch.Tensor,
    v_KSV: torch.Tensor,
    start: int,
    window: int | None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k / sqrt(H)) v in float64, one query and one head at a time. A head's sink is the
    score of one more key, whose value is 0."""
    group = q_TNH.shape[1] // k_KSH.shape[0]
    out_TNV = torch.empty(*q_TNH.shape[:2], v_KSV.shape[2], dtype=torch.float64)
    for index in range(q_TNH.shape[0]):
        end = start + index + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        for head in range(q_TNH.shape[1]):
            k_SH, v_SV = k_KSH[head // group, seen].double(), v_KSV[head // group, seen].double()
            scores_S = k_SH @ q_TNH[index, head].double() / q_TNH.shape[2] ** 0.5
            if sinks_N is not None:
                scores_S = torch.cat((scores_S, sinks_N[head : head + 1].double().cpu()))
                v_SV = torch.cat((v_SV, torch.zeros_like(v_SV[:1])))
            out_TNV[index, head] = scores_S.softmax(0) @ v_SV
    return out_TNV

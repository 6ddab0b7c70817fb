"""Attention specs and batches for tests of attention backends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton_engine.attention.interface import StepArrays, StepBatch
from baton_engine.config.model_config import AttentionSpec
from baton_engine.interface import Row
from baton_engine.runner.block_tables import BlockTables
from baton_engine.runner.input_buffers import to_device
from baton_protocol.layout import KVLayout


def specs_of(
    layout: KVLayout, num_heads: int, windows: Sequence[int | None] = (), *, sinks: bool = False
) -> list[AttentionSpec]:
    """One spec per layer; scores are scaled by 1 / sqrt(head_dim)."""
    return [
        AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            scale=layout.head_dim**-0.5,
            window=window,
            sinks=sinks,
        )
        for window in windows or [None] * layout.num_layers
    ]


def sinks_of(num_heads: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """A sink per head: above and below usual scores, and the first far above them."""
    return torch.linspace(3.0, -2.0, num_heads).to(device)


def batch_of(
    rows: Sequence[Row], layout: KVLayout, device: str | torch.device = "cpu"
) -> StepBatch:
    """The batch of a step with the rows in this order."""
    counts = np.array([len(row.tokens) for row in rows])
    starts = np.array([row.start for row in rows])
    ends = starts + counts
    positions = np.concatenate([np.arange(*span) for span in zip(starts, ends, strict=True)])
    tables = BlockTables(layout)
    tables.rearrange(np.full(len(rows), -1))
    tables.extend(starts, (ends - 1) // layout.block_size, rows)
    host = StepArrays(
        np.array([token for row in rows for token in row.tokens], np.int32),
        positions.astype(np.int32),
        np.full(len(positions), -1, np.int32),
        np.concatenate([[0], counts.cumsum()]).astype(np.int32),
        ends.astype(np.int32),
        tables.groups(
            np.arange(len(rows)).repeat(counts), *np.divmod(positions, layout.block_size)
        ),
    )
    return StepBatch(
        host, to_device(host, torch.device(device)), int(counts.max()), int(ends.max())
    )

"""Views of the paged pool as rows that torch's operators select by index, and copies of pages.

In: the pool; block tables. Out: one view per layer, made once, and the indexes of a step. The
indexes are the same for all layers of a KV group, because each layer's view begins at that layer's
K or V.

Shapes: T tokens, R rows, M blocks, K kv heads, H head_dim, B block size, P blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.config.step_sizes import KEYS_COPIED, SCORES_AT_ONCE
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.kv.staging import stage

Positions = npt.NDArray[np.int64]
Table = npt.NDArray[np.signedinteger[Any]]  # blocks
Visible = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes on which attention's speed depends, but no output."""

    # Elements of K that are copied at a time for one-token rows.
    max_copied: int = KEYS_COPIED
    # Scores that exist at a time.
    max_scores: int = SCORES_AT_ONCE
    # Tokens times keys of a prompt whose tokens are computed like one-token rows. Up to this size
    # that was faster, in float32 up to any size.
    max_pairs: int = 96 * 96


SIZES = Sizes()


class PagedKV:
    """Views of the pool by page and by slot.

    A page is one (block, layer, K or V, head) of shape [B, H]; a slot is one token's [H] in it. All
    views have one entry per layer. An index that selects a row of one layer selects the same row of
    any layer of its KV group in that layer's view. `places` has each layer's KV group and index in
    it.
    """

    def __init__(self, memory: TorchMemory, num_heads: int, sizes: Sizes = SIZES) -> None:
        layout = memory.layout
        self.sizes = sizes
        self.pool = memory.pool
        self.device = memory.pool.device
        self.num_heads = num_heads
        self.num_kv_heads = layout.num_kv_heads
        self.head_dim = layout.head_dim
        self.block_size = layout.block_size
        self.places = layout.layer_places
        layer_pages = 2 * layout.num_kv_heads
        self._block_pages = layer_pages * layout.group_layers
        pages = memory.pool.view(-1, layout.block_size * layout.head_dim)
        slots = memory.pool.view(-1, layout.head_dim)
        k_starts = [index * layer_pages for _, index in self.places]
        v_starts = [start + layout.num_kv_heads for start in k_starts]
        self.k_pages, self.v_pages = (
            [pages[start:] for start in starts] for starts in (k_starts, v_starts)
        )
        self._k_slots, self._v_slots = (
            [slots[start * layout.block_size :] for start in starts]
            for starts in (k_starts, v_starts)
        )
        self._copies = [pages[:0], pages[:0]]

    def pages_of(self, table_RM: Table) -> Table:
        """Indexes of the pages of K in `k_pages`, and of V in `v_pages`: [R K, M]."""
        heads = np.arange(self.num_kv_heads)[:, None]
        pages_RKM = table_RM.astype(np.int64)[:, None] * self._block_pages + heads
        return pages_RKM.reshape(-1, table_RM.shape[1])

    def page_rows(self, table_RM: Table) -> torch.Tensor:
        """The indexes of pages_of() for gather_k() and gather_v()."""
        return stage(self.pages_of(table_RM).reshape(-1), self.device)

    def slot_rows(self, slots_T: Positions) -> torch.Tensor:
        """Indexes of the slots of each (token, kv head), in order [T, K], flattened. A token
        without a slot gets one of block 0, which belongs to no request."""
        blocks, offsets = np.divmod(slots_T.clip(min=0), self.block_size)
        pages = blocks[:, None] * self._block_pages + np.arange(self.num_kv_heads)
        return stage((pages * self.block_size + offsets[:, None]).reshape(-1), self.device)

    def store(
        self, layer: int, targets: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> None:
        """Store K and V at the indexes `targets` from slot_rows()."""
        self._k_slots[layer].index_copy_(0, targets, k_TKH.reshape(-1, self.head_dim))
        self._v_slots[layer].index_copy_(0, targets, v_TKH.reshape(-1, self.head_dim))

    def gather_k(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Copy pages of K. The copy is valid until the next call. Its memory is reused: filling
        fresh memory of 32 MB and more took twice as long, because malloc maps it from the kernel
        each time."""
        return self._gather(self.k_pages[layer], rows, 0)

    def gather_v(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Copy pages of V; otherwise like gather_k()."""
        return self._gather(self.v_pages[layer], rows, 1)

    def _gather(self, pages: torch.Tensor, rows: torch.Tensor, copy: int) -> torch.Tensor:
        if len(self._copies[copy]) < len(rows):
            self._copies[copy] = pages.new_empty(len(rows), pages.shape[1])
        return torch.index_select(pages, 0, rows, out=self._copies[copy][: len(rows)])

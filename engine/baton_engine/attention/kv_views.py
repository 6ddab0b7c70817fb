"""Views of the paged pool as rows that torch's operators select by index.

In: the pool. Out: one view per layer, made once, and the indices of a step. The indices are the
same for all layers of a KV group, because each layer's view begins at that layer's K or V.

Shapes: T tokens, R rows, M blocks, K kv heads, H head_dim, B block size, P blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.kv.staging import stage

Positions = npt.NDArray[np.int64]
Table = npt.NDArray[np.signedinteger[Any]]  # blocks
Visible = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Parameters of attention's speed. They change outputs by rounding only."""

    # Whether one-token rows on a CPU read the pool in place, if torch has the operators.
    in_place: bool = True
    # How many elements of K are copied at a time, 2 MB in bf16. Smaller parts take more calls, and
    # larger ones do not fit the CPU's caches.
    max_copied: int = 1 << 20
    # The cost of sharing a prefix, in keys that one row reads in place. A product of few rows is
    # slow, each row's two parts must be merged, and a dozen small operations cost the same for any
    # number of rows. Sharing never pays for two rows. It pays for 3 rows from 964 keys on, for 4
    # from 514, for 8 from 214, and for 16 from 129. Measured with 12 heads over 4 kv heads of 64 on
    # one thread; larger heads would pay a little sooner.
    rows_paid: int = 2
    keys_paid_each: int = 64
    keys_paid: int = 900
    # How many scores of a shared prefix exist at a time. More than a few MB would not stay in the
    # CPU's caches between two passes over them.
    max_scores: int = 1 << 20


TUNED = Tuning()


class PagedKV:
    """Views of the pool by page and by slot.

    A page is one (block, layer, K or V, head) of shape [B, H]; a slot is one token's [H] in it.
    `pages`, `k_slots` and `v_slots` have one view per layer. An index that selects a row of one
    layer selects the same row of any layer of its KV group in that layer's view. `places` has each
    layer's KV group and index in it.
    """

    def __init__(self, memory: TorchMemory, num_heads: int, tuning: Tuning = TUNED) -> None:
        layout = memory.layout
        self.tuning = tuning
        self.pool = memory.pool
        self.device = memory.pool.device
        self.num_heads = num_heads
        self.num_kv_heads = layout.num_kv_heads
        self.head_dim = layout.head_dim
        self.block_size = layout.block_size
        layer_pages = 2 * layout.num_kv_heads
        self.places = layout.layer_places
        self.block_pages = layer_pages * layout.group_layers  # number of pages of a block
        pages = memory.pool.view(-1, layout.block_size * layout.head_dim)
        slots = memory.pool.view(-1, layout.head_dim)
        # All slot views get the length of the shortest one, because an operator may need equal
        # lengths.
        last = (self.block_pages - layout.num_kv_heads) * layout.block_size
        starts = [index * layer_pages for _, index in self.places]
        self.pages = [pages[start:] for start in starts]

        def views(start_page: int) -> list[torch.Tensor]:
            begins = [(start + start_page) * layout.block_size for start in starts]
            return [slots[begin : begin + len(slots) - last] for begin in begins]

        self.k_slots = views(0)
        self.v_slots = views(layout.num_kv_heads)
        self._copy = pages[:0]

    def page_rows(self, table_RM: Table) -> torch.Tensor:
        """Indexes of the pages of K and V, in order [2, R, K, M], flattened."""
        return self._page_rows(table_RM, 2)

    def key_rows(self, table_RM: Table) -> torch.Tensor:
        """Indexes of the pages of K, in order [R, K, M], flattened."""
        return self._page_rows(table_RM, 1)

    def _page_rows(self, table_RM: Table, kinds: int) -> torch.Tensor:
        heads = np.arange(kinds)[:, None, None, None] * self.num_kv_heads
        rows = self.key_pages(table_RM).reshape(1, len(table_RM), self.num_kv_heads, -1) + heads
        return stage(rows.reshape(-1), self.device)

    def key_pages(self, table_RM: Table) -> Table:
        """Indexes of the pages of K [R K, M]."""
        heads = np.arange(self.num_kv_heads)[:, None]
        pages_RKM = table_RM.astype(np.int64)[:, None] * self.block_pages + heads
        return pages_RKM.reshape(-1, table_RM.shape[1])

    def slot_rows(self, slots_T: Positions) -> torch.Tensor:
        """Indexes of the slots of each (token, kv head), in order [T, K], flattened. A token
        without a slot gets one of block 0, which belongs to no request."""
        blocks, offsets = np.divmod(slots_T.clip(min=0), self.block_size)
        pages = blocks[:, None] * self.block_pages + np.arange(self.num_kv_heads)
        return stage((pages * self.block_size + offsets[:, None]).reshape(-1), self.device)

    def store(
        self, layer: int, targets: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> None:
        """Store K and V at the indexes `targets` from slot_rows()."""
        self.k_slots[layer].index_copy_(0, targets, k_TKH.reshape(-1, self.head_dim))
        self.v_slots[layer].index_copy_(0, targets, v_TKH.reshape(-1, self.head_dim))

    def gather(self, layer: int, source: torch.Tensor) -> torch.Tensor:
        """Copy the pages at the indexes from page_rows() or key_rows(). The copy is valid until the
        next call. Its memory is reused: filling fresh memory of 32 MB and more took twice as long,
        because malloc maps it from the kernel each time."""
        if len(self._copy) < len(source):
            self._copy = torch.empty(
                len(source), self._copy.shape[1], dtype=self.pool.dtype, device=self.device
            )
        return torch.index_select(self.pages[layer], 0, source, out=self._copy[: len(source)])

    def additive(self, visible: Visible) -> torch.Tensor:
        """An additive mask: 0 where visible, else -inf. From a bool mask, torch would compute this
        again in each layer."""
        mask = torch.zeros(visible.shape, dtype=self.pool.dtype, device=self.device)
        return mask.masked_fill_(stage(~visible, self.device), -torch.inf)

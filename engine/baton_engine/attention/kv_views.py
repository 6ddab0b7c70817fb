"""The paged pool as torch's operators want it: as rows that an index chooses.

In: the pool. Out: views of it per layer, made once, and the indices of a step, which are the same
for all layers: each layer's view begins where its K or V does.

Shapes: T tokens, R rows, M blocks, K kv heads, H head_dim, B block size, L layers, P blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.kv.staging import stage

Positions = npt.NDArray[np.int64]
Table = npt.NDArray[np.int64]
Visible = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What attention's speed depends on; outputs are the same up to rounding with any values."""

    # Whether one-token rows on a CPU read the pool in place, where torch has the operators.
    in_place: bool = True
    # Numbers of keys that are copied at one time, 2 MB: fewer take more calls, and more do not stay
    # in a cache.
    max_copied: int = 1 << 20
    # What sharing a prefix costs, in keys that one row reads in place: a product of few rows is
    # slow, a row's two parts must be merged, and a dozen small operations cost the same for any
    # number of rows. So two rows never pay; 3 rows pay from 964 keys on, 4 from 514, 8 from 214, 16
    # from 129. Measured with 12 heads over 4 kv heads of 64 on one thread; larger heads would pay a
    # little sooner.
    rows_paid: int = 2
    keys_paid_each: int = 64
    keys_paid: int = 900
    # Scores of a shared prefix that exist at one time: beyond some MB they leave the cache between
    # two passes over them.
    max_scores: int = 1 << 20


TUNED = Tuning()


class PagedKV:
    """A page is one (block, layer, K or V, head) of [B, H]; a slot is one token's H in it.

    `pages`, `k_slots` and `v_slots` have a view per layer. An index counts from layer 0's K."""

    def __init__(self, memory: TorchMemory, num_heads: int, tuning: Tuning) -> None:
        layout = memory.layout
        self.tuning = tuning
        self.pool = memory.pool
        self.device = memory.pool.device
        self.num_heads = num_heads
        self.num_kv_heads = layout.num_kv_heads
        self.head_dim = layout.head_dim
        self.block_size = layout.block_size
        layer_pages = 2 * layout.num_kv_heads
        self.block_pages = layer_pages * layout.num_layers  # from one block to the next
        pages = memory.pool.view(-1, layout.block_size * layout.head_dim)
        slots = memory.pool.view(-1, layout.head_dim)
        # All as long as the last one can be: an operator may want one length for all.
        last = (self.block_pages - layout.num_kv_heads) * layout.block_size
        starts = [layer * layer_pages for layer in range(layout.num_layers)]
        self.pages = [pages[start:] for start in starts]

        def views(start_page: int) -> list[torch.Tensor]:
            begins = [(start + start_page) * layout.block_size for start in starts]
            return [slots[begin : begin + len(slots) - last] for begin in begins]

        self.k_slots = views(0)
        self.v_slots = views(layout.num_kv_heads)
        self._copy = pages[:0]

    def page_rows(self, table_RM: Table) -> torch.Tensor:
        """Pages of K and V, ordered [2, R, K, M] and flattened."""
        return self._page_rows(table_RM, 2)

    def key_rows(self, table_RM: Table) -> torch.Tensor:
        """Pages of K alone, ordered [R, K, M] and flattened."""
        return self._page_rows(table_RM, 1)

    def _page_rows(self, table_RM: Table, kinds: int) -> torch.Tensor:
        heads = np.arange(kinds * self.num_kv_heads).reshape(kinds, 1, self.num_kv_heads, 1)
        rows = table_RM[None, :, None, :] * self.block_pages + heads
        return stage(rows.reshape(-1), self.device)

    def slot_rows(self, slots_T: Positions) -> torch.Tensor:
        """Index of each (token, kv head) among the slots, flattened, for tokens at block * B +
        place in the block."""
        blocks, offsets = np.divmod(slots_T, self.block_size)
        pages = blocks[:, None] * self.block_pages + np.arange(self.num_kv_heads)
        return stage((pages * self.block_size + offsets[:, None]).reshape(-1), self.device)

    def gather(self, layer: int, source: torch.Tensor) -> torch.Tensor:
        """A copy of the pages that `page_rows` or `key_rows` gave, valid until the next one. Its
        memory is kept: what malloc maps anew, 32 MB and more, took twice as long to fill."""
        if len(self._copy) < len(source):
            self._copy = torch.empty(
                len(source), self._copy.shape[1], dtype=self.pool.dtype, device=self.device
            )
        return torch.index_select(self.pages[layer], 0, source, out=self._copy[: len(source)])

    def additive(self, visible: Visible) -> torch.Tensor:
        """0 where visible, else -inf: torch would make this of a bool mask in each layer."""
        mask = torch.zeros(visible.shape, dtype=self.pool.dtype, device=self.device)
        return mask.masked_fill_(stage(~visible, self.device), -torch.inf)

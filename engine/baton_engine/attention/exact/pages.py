"""Copies of K and V pages of the pool.

In: block tables and a layer. Out: the pages as matrices.

Shapes: R rows, M blocks, K kv heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton_engine.attention.kv_views import PagedKV
from baton_engine.config.engine_config import KEYS_COPIED, SCORES_AT_ONCE
from baton_engine.kv.kv_pool import TorchMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes on which attention's speed depends, but no output."""

    # Elements of K that are copied at a time for one-token rows.
    max_copied: int = KEYS_COPIED
    # Scores that exist at a time.
    max_scores: int = SCORES_AT_ONCE


SIZES = Sizes()


class CopiedKV(PagedKV):
    """PagedKV that copies K and V separately. `key_rows` gives the indexes for both."""

    def __init__(self, memory: TorchMemory, num_heads: int, sizes: Sizes = SIZES) -> None:
        super().__init__(memory, num_heads)
        self.sizes = sizes
        self.v_pages = [pages[self.num_kv_heads :] for pages in self.pages]
        self._copies = [self.pages[0][:0], self.pages[0][:0]]

    def gather_k(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Copy pages of K. The copy is valid until the next call. Its memory is reused: filling
        fresh memory of 32 MB and more took twice as long, because malloc maps it from the kernel
        each time."""
        return self._gather(self.pages[layer], rows, 0)

    def gather_v(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Copy pages of V; otherwise like gather_k()."""
        return self._gather(self.v_pages[layer], rows, 1)

    def _gather(self, pages: torch.Tensor, rows: torch.Tensor, copy: int) -> torch.Tensor:
        if len(self._copies[copy]) < len(rows):
            self._copies[copy] = pages.new_empty(len(rows), pages.shape[1])
        return torch.index_select(pages, 0, rows, out=self._copies[copy][: len(rows)])

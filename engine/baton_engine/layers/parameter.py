"""Where weights go: each model part declares the checkpoint's names and gets its tensors here.

Projections that read the same input are stacked into one matrix, since one large product is faster
than three small ones; each checkpoint tensor then has a view of its part as its slot. The loader
fills every slot and takes a name without a slot for an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from baton_engine.layers.ops import TORCH_OPS, Ops


class WeightSlots:
    """Allocates tensors of one dtype on one device and remembers which name fills which view; and
    says by which `ops` the parts compute there."""

    def __init__(self, dtype: torch.dtype, device: torch.device, ops: Ops = TORCH_OPS) -> None:
        self.dtype = dtype
        self.device = device
        self.ops = ops
        self.views: dict[str, torch.Tensor] = {}
        self._then: list[Callable[[], None]] = []

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor that one checkpoint entry fills."""
        return self.stacked([name], [shape[0]], *shape[1:])

    def stacked(self, names: Sequence[str], rows: Sequence[int], *tail: int) -> torch.Tensor:
        """A tensor [sum(rows), *tail] whose consecutive row ranges are filled by `names`."""
        whole = torch.empty(sum(rows), *tail, dtype=self.dtype, device=self.device)
        begin = 0
        for name, count in zip(names, rows, strict=True):
            if name in self.views:
                raise AssertionError(f"slot {name} declared twice")
            self.views[name] = whole[begin : begin + count]
            begin += count
        return whole

    def when_filled(self, act: Callable[[], None]) -> None:
        """Have `act` called by `finish`: what a part derives from its weights."""
        self._then.append(act)

    def finish(self) -> None:
        """All slots are filled. Views are dropped first, so that a part that replaces its weight
        frees it at once and loading never needs the model's memory twice."""
        self.views.clear()
        acts, self._then = self._then, []
        for act in acts:
            act()

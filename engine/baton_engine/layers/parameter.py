"""Weight slots: each layer declares the checkpoint names of its weights and gets its tensors here.

Projections with the same input are stacked into one matrix, because one large product is faster
than three small ones. The slot of a checkpoint tensor is then a view of its part of the matrix. The
loader fills every slot, and treats a checkpoint name without a slot as an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from baton_engine.layers.ops import TORCH_OPS, Ops


class WeightSlots:
    """Allocates tensors of one dtype on one device and records the view that each checkpoint name
    fills. `ops` are the operations that the model uses on that device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, ops: Ops = TORCH_OPS) -> None:
        self.dtype = dtype
        self.device = device
        self.ops = ops
        self.views: dict[str, torch.Tensor] = {}
        self._then: list[Callable[[], None]] = []

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor of the given shape that one checkpoint entry fills."""
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
        """Register a callback for finish(), for what a layer derives from its weights."""
        self._then.append(act)

    def finish(self) -> None:
        """Call the registered callbacks; all slots must be filled. The views are dropped first. A
        layer that replaces its weight then frees it at once, and loading never needs the model's
        memory twice."""
        self.views.clear()
        acts, self._then = self._then, []
        for act in acts:
            act()

"""The figures of all nodes as arrays, a row for each node, so that a request is priced on all of
them at once.

In: what the view learns of a node, when it learns it. Out: the Group of some rows, copied: what
changes later does not change it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton_protocol.ids import NodeId
from baton_protocol.store import NodeReport
from baton_router.nodes.prefix_index import Lengths
from baton_router.placement.cost import SPEEDS, Ints, NodeGroup

LOADS = ("queued_tokens", "sequences", "requests")
FIRST_ROWS = 16


class NodeArrays:
    """Rows of nodes that have gone are used again."""

    def __init__(self) -> None:
        self._figures = np.zeros((len(LOADS) + len(SPEEDS), FIRST_ROWS))
        self._store_up = np.zeros(FIRST_ROWS, dtype=np.bool_)
        self._slots = np.zeros(FIRST_ROWS, dtype=np.int64)
        self._free = list(range(FIRST_ROWS))
        self._unmeasured: set[int] = set()

    def add(self) -> int:
        """A row for one node."""
        if not self._free:
            rows = self._figures.shape[1]
            self._figures = np.concatenate((self._figures, np.zeros_like(self._figures)), axis=1)
            self._store_up = np.concatenate((self._store_up, np.zeros_like(self._store_up)))
            self._slots = np.concatenate((self._slots, np.zeros_like(self._slots)))
            self._free = list(range(rows, 2 * rows))
        return self._free.pop()

    def remove(self, row: int) -> None:
        self._free.append(row)
        self._unmeasured.discard(row)

    def says(self, row: int, report: NodeReport) -> None:
        """Its speeds and its store."""
        speeds = [getattr(report.speeds, name) for name in SPEEDS]
        self._figures[len(LOADS) :, row] = speeds
        if min(speeds) > 0:
            self._unmeasured.discard(row)
        else:
            self._unmeasured.add(row)
        self._store_up[row] = report.store == "up"

    def loaded(self, row: int, queued_tokens: int, sequences: int, requests: int) -> None:
        self._figures[: len(LOADS), row] = (queued_tokens, sequences, requests)

    def listed(self, row: int, slot: int) -> None:
        """Its bit in the chunk index."""
        self._slots[row] = slot

    def group(self, nodes: Sequence[NodeId], rows: Ints, lengths: Lengths) -> NodeGroup:
        """`nodes` are in `rows`; `lengths` is what each slot holds of the prompt."""
        figures = self._figures.take(rows, axis=1)
        return NodeGroup(
            nodes=nodes,
            cached_chunks=lengths[self._slots[rows]],
            store_up=self._store_up[rows],
            measured=not self._unmeasured,
            **dict(zip(LOADS + SPEEDS, figures, strict=True)),
        )

"""The figures of all nodes as arrays, so that placement prices all nodes at once.

In: a node's figures whenever the view learns them. Out: the groups that placement chooses from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton_protocol.ids import NodeId
from baton_protocol.store import NodeReport
from baton_router.nodes.prefix_index import Lengths
from baton_router.placement.costs import SPEEDS, Floats, Ints, NodeGroup

LOADS = ("queued_tokens", "sequences", "requests")
FIRST_ROWS = 16


class NodeArrays:
    """The figures of all nodes as arrays, one row per node, to price all nodes at once.

    In: a node's figures whenever the view learns them. Out: a NodeGroup of some rows, as copies
    that later changes do not affect. Rows of forgotten nodes are reused.
    """

    def __init__(self) -> None:
        self._figures = np.zeros((len(LOADS) + len(SPEEDS), FIRST_ROWS))
        self._store_up = np.zeros(FIRST_ROWS, dtype=np.bool_)
        self._slots = np.zeros(FIRST_ROWS, dtype=np.int64)
        self._free = list(range(FIRST_ROWS))
        self.speed_changes = 0  # grows with each new speed of a node

    def add(self) -> int:
        """Reserve a row for one node."""
        if not self._free:
            rows = self._figures.shape[1]
            self._figures = np.concatenate((self._figures, np.zeros_like(self._figures)), axis=1)
            self._store_up = np.concatenate((self._store_up, np.zeros_like(self._store_up)))
            self._slots = np.concatenate((self._slots, np.zeros_like(self._slots)))
            self._free = list(range(rows, 2 * rows))
        return self._free.pop()

    def remove(self, row: int) -> None:
        self._free.append(row)

    def set_report(self, row: int, report: NodeReport) -> None:
        """Set a node's speeds and store state."""
        speeds = [getattr(report.speeds, name) for name in SPEEDS]
        if self._figures[len(LOADS) :, row].tolist() != speeds:
            self._figures[len(LOADS) :, row] = speeds
            self.speed_changes += 1
        self._store_up[row] = report.store == "up"

    def set_load(self, row: int, queued_tokens: int, sequences: int, requests: int) -> None:
        self._figures[: len(LOADS), row] = (queued_tokens, sequences, requests)

    def set_slot(self, row: int, slot: int) -> None:
        """Set a node's bit in the chunk index."""
        self._slots[row] = slot

    def speeds(self, rows: Ints) -> Floats:
        """The reported speeds of these rows, in the order of SPEEDS; 0 if not measured."""
        return self._figures[len(LOADS) :, rows]

    def group(
        self, nodes: Sequence[NodeId], rows: Ints, lengths: Lengths, speeds: Floats
    ) -> NodeGroup:
        """A group of `nodes`, which have these `rows` and `speeds`, none of which is 0. `lengths`:
        prompt chunks held, per slot."""
        return NodeGroup(
            nodes=nodes,
            cached_chunks=lengths[self._slots[rows]],
            store_up=self._store_up[rows],
            **dict(zip(LOADS, self._figures[: len(LOADS), rows], strict=True)),
            **dict(zip(SPEEDS, speeds, strict=True)),
        )


NOBODY = NodeArrays().group(
    (), np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros((len(SPEEDS), 0))
)

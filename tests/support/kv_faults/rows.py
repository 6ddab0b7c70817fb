"""The KV fault matrix: all of its rows.

In: the rows of kv_faults_*. Out: FAULTS in the order of the table, and their cells as ROWS.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.kv_faults import links, names, races, servers, values, writers
from tests.support.kv_faults.cells import Cell, Fault

FAULTS: tuple[Fault, ...] = (
    *servers.FAULTS,
    *links.FAULTS,
    *values.FAULTS,
    *names.FAULTS,
    *writers.FAULTS,
    *races.FAULTS,
)


@dataclass(frozen=True)
class Row:
    fault: Fault
    cell: Cell

    def __str__(self) -> str:
        return f"{self.fault.name}-{self.cell.case}".replace(" ", "_").replace(",", "")


ROWS = tuple(Row(fault, cell) for fault in FAULTS for cell in fault.cells)

"""The KV fault matrix: all of its rows.

In: the rows of kv_faults_*. Out: FAULTS in the order of the table, and their cells as ROWS.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.support import (
    kv_faults_links,
    kv_faults_names,
    kv_faults_races,
    kv_faults_servers,
    kv_faults_values,
    kv_faults_writers,
)
from tests.support.kv_cells import Cell, Fault

FAULTS: tuple[Fault, ...] = (
    *kv_faults_servers.FAULTS,
    *kv_faults_links.FAULTS,
    *kv_faults_values.FAULTS,
    *kv_faults_names.FAULTS,
    *kv_faults_writers.FAULTS,
    *kv_faults_races.FAULTS,
)


@dataclass(frozen=True)
class Row:
    fault: Fault
    cell: Cell

    def __str__(self) -> str:
        return f"{self.fault.name}-{self.cell.case}".replace(" ", "_").replace(",", "")


ROWS = tuple(Row(fault, cell) for fault in FAULTS for cell in fault.cells)

"""All rows of the KV fault matrix, and the table of them in docs/kv-exchange.md.

In: the faults of each module beside this one. Out: FAULTS in the order of the table, and their
cells as ROWS. `python -m tests.faults.kv.rows` prints the table; --write updates the page.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.faults.kv import links, names, races, servers, values, writers
from tests.faults.kv.cells import Cell, Fault

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kv-exchange.md"
BEGIN, END = "<!-- begin of the fault table -->", "<!-- end of the fault table -->"
HEAD = "| fault | how and when it is injected | checks besides the right tokens | cells | at most |"

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


def table() -> str:
    """Return the table as Markdown, with one line per fault."""
    lines = [HEAD, "|---|---|---|---|---|"]
    for fault in FAULTS:
        columns = (fault.name, fault.how, fault.checks, str(len(fault.cells)), str(fault.deadline))
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """Return the page's text with the present table."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_table(PAGE.read_text()))
    else:
        print(table())

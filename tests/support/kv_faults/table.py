"""The table of faults in kvstore/README.md, made from the rows of the matrix.

`python -m tests.support.kv_faults.table` prints it; --write puts it between the README's markers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.kv_faults.rows import FAULTS

README = Path(__file__).resolve().parents[3] / "kvstore" / "README.md"
BEGIN, END = "<!-- begin of the fault table -->", "<!-- end of the fault table -->"
HEAD = "| fault | how it is done, and when | what is seen beside right tokens | cells | at most |"


def table() -> str:
    """One line per fault."""
    lines = [HEAD, "|---|---|---|---|---|"]
    for fault in FAULTS:
        words = (fault.name, fault.how, fault.seen, str(len(fault.cells)), str(fault.deadline))
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The README with the table as it is now."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(with_table(README.read_text()))
    else:
        print(table())

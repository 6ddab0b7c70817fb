"""The output of a running pool: a live table on a terminal, plain lines elsewhere.

In: rows (the current table) and notes (lines that stay). Out: text. On a terminal the table stays
at the bottom: printing a line erases the table and draws it again below the line.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

HEADER = ("NODE", "ROLE", "PID", "STATE", "EXACT", "REQUESTS", "ADDRESS")


@dataclass(frozen=True)
class TableRow:
    """One supervised process. `pid` 0, `requests` None and `exact` "" mean unknown."""

    node: str
    role: str
    pid: int
    state: str
    requests: int | None
    address: str
    exact: str = ""

    def cells(self) -> tuple[str, ...]:
        requests = "-" if self.requests is None else str(self.requests)
        pid, exact = str(self.pid or "-"), self.exact or "-"
        return (self.node, self.role, pid, self.state, exact, requests, self.address)

    def news(self) -> tuple[object, ...]:
        """The fields whose change prints a line. The load is left out: it changes too often."""
        return (self.pid, self.state, self.address)


class Display:
    """Writes notes and the table to `out`, the children's logs to `err`."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._live = out.isatty()
        self._rows: tuple[TableRow, ...] = ()
        self._drawn = 0  # lines of the table now on the screen

    def note(self, text: str) -> None:
        self._say(self._out, text)

    def log(self, text: str) -> None:
        self._say(self._err, text)

    def rows(self, rows: Sequence[TableRow]) -> None:
        before = {row.node: row.news() for row in self._rows}
        self._rows = tuple(rows)
        if self._live:
            self._erase()
            self._draw()
            return
        for row in rows:
            if row.pid and before.get(row.node) != row.news():
                where = f" {row.address}" if row.address else ""
                pid = f" pid {row.pid}" if row.pid else ""
                print(f"{row.node}: {row.state}{pid}{where}", file=self._out, flush=True)

    def close(self) -> None:
        """Leave the last table on the screen and stop drawing."""
        self._live = False

    def _say(self, stream: TextIO, text: str) -> None:
        self._erase()
        print(text, file=stream, flush=True)
        if self._live:
            self._draw()

    def _erase(self) -> None:
        if self._drawn:
            # Move up to the table's first line, then erase to the end of the screen.
            self._out.write(f"\x1b[{self._drawn}A\x1b[J")
            self._out.flush()
            self._drawn = 0

    def _draw(self) -> None:
        if not self._rows:
            return
        width = shutil.get_terminal_size().columns
        lines = table([HEADER, *(row.cells() for row in self._rows)])
        self._out.write("".join(line[: width - 1] + "\n" for line in lines))
        self._out.flush()
        self._drawn = len(lines)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]

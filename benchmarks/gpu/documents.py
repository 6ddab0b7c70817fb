"""Writes the figures of GPUs into README.md and docs/figures.md, from the newest committed results.

    python -m benchmarks.gpu.documents

In: benchmarks/results/gpu. Out: both pages; where a figure belongs they say "not yet" until a card
has been measured. Tests compare the pages with the results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.names import ONE_BY_ONE, WORKLOAD
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.processes import ROOT
from benchmarks.gpu.results import FINDINGS_HEAD, Results, finding_rows, newest, number, part_row

README, FIGURES = ROOT / "README.md", ROOT / "docs" / "figures.md"
SECTION = "docs/figures.md#on-gpus"
NOT_YET = "**not yet**"
BEGIN, END = "<!-- begin of the figures of GPUs -->\n", "<!-- end of the figures of GPUs -->\n"
# Rows of README's tables, by how they begin.
COMPARED, FIGURE = "| benchmarked on GPUs |", f"| [Qwen3-0.6B on a GPU]({SECTION}) |"


def pages(results: Results | None) -> dict[Path, str]:
    """Both pages, with these results."""
    readme = _with_row(README.read_text(), COMPARED, compared_cell(results))
    return {
        README: _with_row(readme, FIGURE, figure_cells(results)),
        FIGURES: _with_section(FIGURES.read_text(), "".join(section(results))),
    }


def _with_row(page: str, begin: str, cells: str) -> str:
    """The page with other cells behind the beginning of a row: as many as `cells` has."""
    count = cells.count("|")
    pattern = re.escape(begin) + r"(?:[^|\n]*\|)" + f"{{{count}}}"
    changed, found = re.subn(pattern, lambda match: f"{begin} {cells}", page)
    assert found == 1, f"{found} rows begin with {begin}"
    return changed


def _with_section(page: str, text: str) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{text}{END}{after}"


def compared_cell(results: Results | None) -> str:
    return f"{NOT_YET} |" if results is None else f"[yes]({SECTION}) |"


def figure_cells(results: Results | None) -> str:
    """Command, ours, rival, ratio and machine."""
    speed = results.measured("speed") if results else {}
    if results is None or WORKLOAD not in speed:
        return f"`make gpu` | {NOT_YET} | | | |"
    found = speed[WORKLOAD]
    ours = f"{number(found.value or 0.0)} {found.unit}"
    if ONE_BY_ONE not in speed:
        return f"`make gpu` | {ours} | | | {results.card} |"
    ratio = number(speed[ONE_BY_ONE].value or 0.0)
    return f"`make gpu` | {ours} | transformers, one by one | {ratio}x | {results.card} |"


def section(results: Results | None) -> Iterator[str]:
    """What `make gpu` measures, and what it found on the newest card: every measurement, and the
    checks that failed."""
    yield "\n| part | what it tells |\n|---|---|\n"
    yield from (f"| {part.name} | {part.tells} |\n" for part in PARTS)
    if results is None:
        yield "\n**Result:** not yet. No card has been measured.\n\n"
        return
    yield f"\n**Result:** {results.card}, {results.date[:10]}.\n\n"
    yield "| part | state | time | checks passed |\n|---|---|---|---|\n"
    yield from (f"{part_row(part)}\n" for part in results.parts)
    for part in results.parts:
        shown = [each for each in part.findings if each.passed is not True]
        if shown:
            yield f"\n### GPU: {part.name}\n\n{FINDINGS_HEAD}\n{finding_rows(shown)}\n"
    yield "\n"


if __name__ == "__main__":
    for path, text in pages(newest()).items():
        path.write_text(text)

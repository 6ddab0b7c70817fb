"""Writes the quality of quantized models into docs/engine.md: a table and a plot.

    python -m benchmarks.support.engine.quality_page

In: benchmarks/results/quality.json, which `benchmarks.engine.quality --write` makes. Out: the part
of the page between two marks, and docs/quality.svg. Tests compare both with the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[3]
RESULTS, PAGE = ROOT / "benchmarks/results/quality.json", ROOT / "docs/engine.md"
PLOT = ROOT / "docs/quality.svg"
BEGIN, END = "<!-- begin of the quality -->\n", "<!-- end of the quality -->\n"


class QualityRow(msgspec.Struct, frozen=True, kw_only=True):
    """An engine beside float32. `increase` of the perplexity is a share, with its standard error;
    `equal_answer` counts tokens."""

    name: str
    kind: str
    bits: float
    perplexity: float
    increase: float
    error: float
    equal_next: float
    equal_answer: float

    @property
    def line(self) -> str:
        return (
            f"{self.name:38} {self.bits:5.2f} bits  perplexity {self.perplexity:7.3f} "
            f"({self.increase:+8.2%}, error {self.error:.2%})  equal next tokens "
            f"{self.equal_next:6.1%}  equal answer {self.equal_answer:4.1f}"
        )


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """The rows, and what they share: `tokens` of the text, which has this digest, greedy answers to
    `prompts`, and the perplexity of float32."""

    machine: str
    digest: str
    tokens: int
    prompts: int
    perplexity: float
    rows: tuple[QualityRow, ...]


def pages(found: Quality) -> dict[Path, str]:
    """The page and the plot with these results."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    return {PAGE: f"{before}{BEGIN}{''.join(table(found))}{END}{after}", PLOT: plot(found.rows)}


def table(found: Quality) -> Iterator[str]:
    yield f"\n{found.tokens:,} tokens in {found.prompts} windows, and an answer of 64 tokens after "
    yield f"each beginning; {found.machine}. Perplexity in float32: {found.perplexity:.2f}.\n\n"
    yield "| | rounds | bits per weight | perplexity | equal next tokens | equal answer |\n"
    yield "|---|---|---|---|---|---|\n"
    for row in found.rows:
        yield f"| {row.kind} | {row.name} | {row.bits:.1f} | {row.increase:+.1%} "
        yield f"| {row.equal_next:.1%} | {row.equal_answer:.0f} |\n"
    yield "\n"


# --- the plot -------------------------------------------------------------------------------------

LINE, HEAD, TOP, TEXT, BAR, GAP = 22, 26, 34, 300, 190, 70
STYLE = """\
svg { --back: #ffffff; --ink: #1f2328; --faint: #59636e; --bar: #0969da; --other: #1a7f37 }
@media (prefers-color-scheme: dark) {
  svg { --back: #0d1117; --ink: #e6edf3; --faint: #9198a1; --bar: #4493f8; --other: #3fb950 }
}
text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.head { fill: var(--faint) }
.back { fill: var(--back) }
.more { fill: var(--bar) }
.unequal { fill: var(--other) }
"""


def plot(rows: Sequence[QualityRow]) -> str:
    """Two bars per row: how much the perplexity grows, and how many next tokens differ."""
    parts, y = [], TOP
    left, right = TEXT, TEXT + BAR + GAP
    most = max(max(row.increase for row in rows), 1e-9)
    most_unequal = max(max(1 - row.equal_next for row in rows), 1e-9)
    parts += [_text(left, 20, "perplexity, increase", "head")]
    parts += [_text(right, 20, "next tokens that differ", "head")]
    for kind, each in groupby(rows, lambda row: row.kind):
        parts.append(_text(12, y + 16, kind.replace("`", ""), "head"))
        y += HEAD
        for row in each:
            parts.append(_text(24, y + 14, row.name))
            parts += _bar(left, y, row.increase / most, f"{row.increase:+.1%}", "more")
            unequal = 1 - row.equal_next
            parts += _bar(right, y, unequal / most_unequal, f"{unequal:.1%}", "unequal")
            y += LINE
    width, height = right + BAR + GAP, y + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">\n'
        "<title>Perplexity and next tokens of quantized models beside float32</title>\n"
        f'<style>\n{STYLE}</style>\n<rect class="back" width="{width}" height="{height}"/>\n'
        + "".join(f"{part}\n" for part in parts)
        + "</svg>\n"
    )


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{named}>{escape(text)}</text>'


def _bar(x: float, y: float, share: float, label: str, kind: str) -> list[str]:
    width = round(max(share, 0.0) * BAR, 1)
    bar = f'<rect class="{kind}" x="{x:g}" y="{y + 3:g}" width="{max(width, 1):g}" height="14"/>'
    return [bar, _text(x + width + 6, y + 14, label)]


def read_results() -> Quality:
    return msgspec.json.decode(RESULTS.read_bytes(), type=Quality)


def write_results(found: Quality) -> None:
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def write_pages(found: Quality) -> None:
    for path, text in pages(found).items():
        path.write_text(text)


if __name__ == "__main__":
    write_pages(read_results())

"""Draws the tables of figures in README.md and docs/figures.md with matplotlib.

    python -m tests.support.pictures.figure_plots        a part of `make pictures`

In: the tables, as `figure_tables` reads them. Out: docs/pictures/ratios.svg, drafts.svg and
autoscaling.svg, equal for equal tables, in the viewer's light or dark scheme; and a digest, which
tests/bones/test_pictures.py compares with the tables.
"""

from __future__ import annotations

import io
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.support.pictures.digests import PICTURES, write_digest
from tests.support.pictures.figure_tables import Rows, autoscaling, drafts, ratios, tables

# matplotlib knows colours, a viewer has two schemes: these three become variables of CSS.
INK, FAINT, BACK = "#1f2328", "#d1d9e0", "#ffffff"
STYLE = f"""\
<style>
svg {{ --ink: {INK}; --faint: {FAINT}; --back: {BACK} }}
@media (prefers-color-scheme: dark) {{
  svg {{ --ink: #e6edf3; --faint: #3d444d; --back: #0d1117 }}
}}
</style>
"""
OURS, RIVALS, THIRD = "#3b86d6", "#b0803a", "#3f9a5a"
LOOK: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "baton",  # ids are equal in each run
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "grid.color": FAINT,
    "figure.facecolor": BACK,
    "axes.facecolor": BACK,
    **dict.fromkeys(
        ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], INK
    ),
}
WIDTH = 7.6  # inches


def ratios_plot(rows: Rows) -> Figure:
    """A bar per figure with a rival, to the right of 1 if Baton is better."""
    found = ratios(rows)[::-1]
    figure = Figure((WIDTH, 0.6 + 0.33 * len(found)), layout="constrained")
    axes = figure.subplots()
    for at, one in enumerate(found):
        mean = (one.low * one.high) ** 0.5
        axes.barh(at, mean - 1, left=1, height=0.6, color=OURS if mean >= 1 else RIVALS)
        if one.low < one.high:
            axes.plot([one.low, one.high], [at, at], color=INK, linewidth=1.2, marker="|")
        text = " to ".join(_times(value) for value in dict.fromkeys([one.low, one.high]))
        axes.text(max(one.high, 1.0) * 1.03, at, text, va="center")
    axes.set_xscale("log")
    axes.set_xlim(0.35, 6.5)
    axes.set_xticks([0.5, 1, 2, 4], ["0.5x", "1x", "2x", "4x"])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(found)), [f"{one.figure} / {one.rival}" for one in found])
    axes.grid(axis="x")
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_title("Against the rival (1x): worse to the left, better to the right")
    return figure


def drafts_plot(rows: Rows) -> Figure:
    """Groups of bars: tokens per second against those without drafts."""
    found = drafts(rows)
    figure = Figure((WIDTH, 2.9), layout="constrained")
    axes = figure.subplots()
    names = [name.replace("`", "") for name in rows[0][3:-1]]
    for number, (name, colour) in enumerate(zip(names, (THIRD, OURS, RIVALS), strict=True)):
        bars = {at: one.speeds[number] for at, one in enumerate(found)}
        _bars(axes, {at: x for at, x in bars.items() if x is not None}, number, 3, name, colour)
    axes.axhline(1, color=INK, linewidth=1)
    axes.set_xticks(range(len(found)), [one.work for one in found])
    axes.set_xlabel("work, requests at a time")
    axes.set_yticks([0, 1, 2, 3, 4], ["0", "1x", "2x", "3x", "4x"])
    axes.grid(axis="y")
    axes.set_title("Tokens per second, against those without drafts (1x)")
    axes.legend(frameon=False, loc="upper center")
    return figure


def autoscaling_plot(rows: Rows) -> Figure:
    """Two plots beside each other: requests that miss a target, and what the rest costs."""
    found = autoscaling(rows)
    figure = Figure((WIDTH, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (name, colour) in enumerate(zip(rows[0][1:], (OURS, RIVALS), strict=True)):
        missed = {at: 100 - one.within[number] for at, one in enumerate(found)}
        hours = {at: one.hours[number] for at, one in enumerate(found)}
        _bars(left, missed, number, 2, name, colour)
        _bars(right, hours, number, 2, name, colour)
    for axes, title in ((left, "Requests that miss a target, %"), (right, "GPU-hours")):
        axes.set_xticks(range(len(found)), [_short(one.load) for one in found])
        axes.grid(axis="y")
        axes.set_title(title)
    right.legend(frameon=False)
    return figure


def _bars(
    axes: Axes, heights: dict[int, float], number: int, of: int, name: str, colour: str
) -> None:
    """One bar of each group of this number of bars."""
    width = 0.8 / of
    places = [at + (number - (of - 1) / 2) * width for at in heights]
    bars = axes.bar(places, list(heights.values()), width * 0.92, label=name, color=colour)
    axes.bar_label(bars, fmt="%.3g", fontsize=7)


def _times(value: float) -> str:
    return f"{value:.2f}x" if value < 2 else f"{value:.1f}x"


def _short(load: str) -> str:
    """The words of a load in lines of at most 12 characters, without a remark after a comma or
    the size of a burst."""
    lines = [""]
    for word in load.partition(" of ")[0].split():
        if len(lines[-1]) + len(word) < 12:
            lines[-1] = f"{lines[-1]} {word}".strip()
        else:
            lines.append(word)
    return "\n".join(lines)


def svg(figure: Figure, title: str) -> str:
    out = io.StringIO()
    nothing = dict.fromkeys(["Date", "Creator", "Format", "Type"])
    figure.savefig(out, format="svg", metadata=nothing)
    head, tag, body = out.getvalue().partition("<svg ")
    attributes, _, rest = body.partition(">")
    for name, colour in (("ink", INK), ("faint", FAINT), ("back", BACK)):
        rest = rest.replace(colour, f"var(--{name})")
    lines = [line.rstrip() for line in rest.splitlines()]
    return (
        f'{head}{tag}role="img" {attributes}>\n<title>{escape(title)}</title>\n{STYLE}'
        + "\n".join(line for line in lines if line)
        + "\n"
    )


PLOTS = {
    "ratios": (ratios_plot, "Baton's figures against those of its rivals"),
    "drafts": (drafts_plot, "Tokens per second with drafts, against those without"),
    "autoscaling": (autoscaling_plot, "Baton's planner and the HPA on four loads"),
}


def drawn() -> dict[str, str]:
    """Each plot as SVG, by its name."""
    rows = tables()
    with mpl.rc_context(LOOK):
        return {name: svg(plot(rows[name]), title) for name, (plot, title) in PLOTS.items()}


def main() -> None:
    for name, text in drawn().items():
        (PICTURES / f"{name}.svg").write_text(text)
    write_digest("figure_plots")


if __name__ == "__main__":
    main()

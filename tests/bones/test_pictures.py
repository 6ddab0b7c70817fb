"""The pictures in docs/pictures show what they are drawn from as it is now, are small, have a
description, and are in a document."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pyte
import pytest

from tests.support.pictures.digests import PICTURES, ROOT, SOURCES, digest_file, digest_of
from tests.support.pictures.figure_tables import Ratio, autoscaling, drafts, ratios, tables
from tests.support.pictures.top import screen_picture

# A text compresses; a PNG does not.
MOST_BYTES = {".png": 150_000, ".svg": 40_000}
IMAGE = re.compile(r"!\[[^]]+\]\(([^)\s]+\.(?:png|svg))\)")
FILES = sorted(path for path in PICTURES.iterdir() if path.suffix in MOST_BYTES)
SVG = [*(path for path in FILES if path.suffix == ".svg"), *sorted(ROOT.glob("docs/*.svg"))]
SPACE = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", SOURCES)
def test_a_picture_is_of_its_sources_as_they_are(name: str) -> None:
    command = f"run `make pictures`, or python -m tests.support.pictures.{name}"
    assert digest_file(name).read_text().strip() == digest_of(SOURCES[name]()), command


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_picture_is_small(path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES[path.suffix]


@pytest.mark.parametrize("path", SVG, ids=lambda path: path.name)
def test_a_drawing_has_a_title_for_screen_readers_and_a_background_of_its_own(path: Path) -> None:
    picture = ElementTree.parse(path).getroot()
    assert picture.get("role") == "img"
    assert (picture.findtext(f"{SPACE}title") or "").strip()
    assert 'class="back"' in path.read_text() or "var(--back)" in path.read_text()


def test_each_picture_is_in_a_document() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        (document.parent / target).resolve()
        for document in documents
        for target in IMAGE.findall(document.read_text())
    }
    assert {*FILES, *SVG} <= shown
    assert len(FILES) == 8


def test_a_ratio_above_one_is_better_than_the_rival_for_rates_and_for_costs() -> None:
    head = ["figure", "command", "ours", "rival", "ratio", "machine"]
    rows = [
        ["engine", "", "264 tokens/s", "vLLM", "1.09x", ""],
        ["router", "", "1.6 ms of CPU", "vllm-router", "2.5x, slower", ""],
        ["put", "", "2.9 to 5.0 GB/s", "LMCache", "1.01x to 1.51x", ""],
        ["flood", "", "245 ms", "alone: 192 ms", "1.28x", ""],
        ["hand-off", "", "89 %", "", "", ""],
    ]
    assert ratios([head, *rows]) == [
        Ratio("engine", "vLLM", 1.09, 1.09),
        Ratio("router", "vllm-router", 0.4, 0.4),
        Ratio("put", "LMCache", 1.01, 1.51),
    ]


def test_each_table_of_figures_has_numbers_for_its_plot() -> None:
    rows = tables()
    assert len(ratios(rows["ratios"])) > 5
    assert all(any(one.speeds) for one in drafts(rows["drafts"]))
    assert all(one.within[0] > 50 and one.hours[0] > 0 for one in autoscaling(rows["autoscaling"]))


@pytest.mark.long  # imports matplotlib, which looks for the machine's fonts the first time
def test_plots_of_the_tables_are_the_committed_ones_in_each_run() -> None:
    from tests.support.pictures.figure_plots import drawn

    for name, text in drawn().items():
        assert (PICTURES / f"{name}.svg").read_text() == text, name


def test_the_picture_of_a_screen_keeps_its_columns_headings_and_bar() -> None:
    screen = pyte.Screen(12, 3)
    pyte.Stream(screen).feed("a  <b>\r\n\x1b[1mNODE\x1b[0m\r\n\x1b[7mq quit\x1b[0m")
    picture = ElementTree.fromstring(screen_picture(screen, "a screen"))
    texts = {text.text: text for text in picture.iter(f"{SPACE}text")}
    assert {name: text.get("class") for name, text in texts.items()} == {
        "a  <b>": None,
        "NODE": "bold",
        "q quit": "on-bar",
    }
    assert texts["a  <b>"].get("textLength") == "48"

"""What tests have shown of each architecture: the record behind the table of models.

    python -m tests.support.project.model_record             runs the tests, writes the record
    python -m tests.support.project.model_record -k olmoe    runs some of them; the rest stays

A test that shows something of a model has the mark `shows` with columns of the table, and a
parameter `model` or `name`, which is a tiny checkpoint, or `cell`, which has a `model`:

    @pytest.mark.shows("chunked")
    @pytest.mark.parametrize("name", TINY_MODELS)
    def test_...(name):

The record names, for each architecture and column, the tests and their checkpoints. A checkpoint is
in it if a row of the test with this checkpoint has passed, and none has failed.
docs/_site/reference.py makes the table from it. tests/bones/test_model_record.py fails if the tests
have a column of an architecture that the record lacks, or the record names a row that is gone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "docs" / "reference" / "models.json"
COMMAND = "make models"
MARK = "shows"
QUANTIZED = " in "  # in the name of a checkpoint: MODEL in LAYOUT
# Column of the table -> what a test with it has shown.
COLUMNS: Mapping[str, str] = {
    "alone": "the greedy ids of transformers, one request at a time",
    "in batches": "the same, 16 requests at once",
    "cached": "the same, with the prompts' KV in the prefix cache",
    "chunked": "the same, with 7 tokens per step",
    "preempted": "the same, in a pool that is too small for all requests",
    "handed off": "the same, in a pool of prefill and decode nodes, KV through Redis",
    "failed over": "the same, when the decode node is killed in mid-answer",
    "bitwise": "a path of the matrix of bits gives each token the bits that it has alone",
}

# architecture -> column -> test -> checkpoints
Record = dict[str, dict[str, dict[str, list[str]]]]


@dataclass(frozen=True, order=True)
class Cell:
    """One test shows one column for one checkpoint of an architecture."""

    architecture: str
    column: str
    test: str
    checkpoint: str


@dataclass(eq=False)  # pytest puts plugins into a set
class Recorder:
    """A pytest plugin: the rows of each cell, and the outcomes of rows."""

    rows: dict[Cell, set[str]] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.add(session.items)

    def add(self, items: Iterable[pytest.Item]) -> None:
        for item in items:
            for cell in _cells(item):
                self.rows.setdefault(cell, set()).add(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)


def _cells(item: pytest.Item) -> Iterator[Cell]:
    for mark in item.iter_markers(MARK):
        assert isinstance(item, pytest.Function)
        checkpoint = _checkpoint(item.callspec.params)
        if QUANTIZED in checkpoint:
            continue  # the table is about architectures, not about their weights
        for column in mark.args:
            assert column in COLUMNS, f"{item.nodeid}: {column} is none of {', '.join(COLUMNS)}"
            test = item.nodeid.partition("[")[0]
            yield Cell(_architecture(checkpoint), column, test, checkpoint)


def _checkpoint(params: Mapping[str, Any]) -> str:
    for name in ("model", "name"):
        if name in params:
            return str(params[name])
    return str(params["cell"].model)


@cache
def _architecture(checkpoint: str) -> str:
    config = json.loads((make_tiny_model(checkpoint) / "config.json").read_text())
    return str(config["architectures"][0])


def run(*arguments: str) -> Recorder:
    """Run or collect the tests that show something."""
    recorder = Recorder()
    pytest.main(["-m", MARK, *map(str, _files()), *arguments], plugins=[recorder])
    return recorder


def claimed(collected: Sequence[pytest.Item] = ()) -> dict[Cell, set[str]]:
    """The cells of all rows of the tests. If `collected` has all of their files, nothing is
    collected again, which takes two seconds."""
    if not {*_files()} <= {item.path for item in collected}:
        return run("--collect-only", "-qq").rows
    recorder = Recorder()
    recorder.add(collected)
    return recorder.rows


def _files() -> list[Path]:
    """The files with tests that show something."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in files if f"pytest.mark.{MARK}(" in path.read_text()]


def read() -> set[Cell]:
    record: Record = json.loads(RECORD.read_text())["models"] if RECORD.is_file() else {}
    return {
        Cell(architecture, column, test, checkpoint)
        for architecture, columns in record.items()
        for column, tests in columns.items()
        for test, checkpoints in tests.items()
        for checkpoint in checkpoints
    }


def write(cells: Iterable[Cell]) -> None:
    record: Record = {}
    order = list(COLUMNS)
    for cell in sorted(cells, key=lambda cell: (cell.architecture, order.index(cell.column), cell)):
        columns = record.setdefault(cell.architecture, {})
        columns.setdefault(cell.column, {}).setdefault(cell.test, []).append(cell.checkpoint)
    whole = {"columns": COLUMNS, "models": record}
    RECORD.write_text(json.dumps(whole, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    cells, ran = claimed(), run(*arguments)
    before = read()
    shown = {
        cell
        for cell, rows in cells.items()
        if (rows & ran.passed or cell in before) and not rows & ran.failed
    }
    write(shown)
    for cell in sorted(cells.keys() - shown):
        sys.stdout.write(f"not shown: {cell.architecture}, {cell.column}: {cell.checkpoint}\n")
    return len(ran.failed) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

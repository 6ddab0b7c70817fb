"""The record of what tests have shown of each architecture fits the rows of the tests."""

from __future__ import annotations

import json

import pytest

from baton_engine.config.families import BUILT_IN
from tests.support.project.collected import COLLECTED
from tests.support.project.model_record import COLUMNS, COMMAND, RECORD, claimed, read


def test_the_record_of_models_fits_the_rows_of_the_tests(request: pytest.FixtureRequest) -> None:
    rows, record = claimed(request.config.stash[COLLECTED]).keys(), read()
    gone = record - rows
    assert not gone, f"no test has these rows; run: {COMMAND}"
    claims, shown = (
        {(cell.architecture, cell.column) for cell in cells} for cells in (rows, record)
    )
    assert not claims - shown, f"nobody has recorded that these tests pass; run: {COMMAND}"


def test_each_family_is_in_the_record() -> None:
    assert set(BUILT_IN) <= {cell.architecture for cell in read()}, f"run: {COMMAND}"


def test_the_record_explains_each_column() -> None:
    assert json.loads(RECORD.read_text())["columns"] == COLUMNS

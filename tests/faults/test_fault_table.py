"""The fault table on the simulated engine: a fault does not change the answer of any request.

Each row injects one fault at one moment of its target request, while a request of every other kind
runs. Every answer must be the undisturbed one: status, ids, text, log-probabilities, finish reason,
usage. Requests that the fault does not hit stay on their nodes, and no resources are held
afterwards. A selection of rows runs always, the whole table in `make test-long`.
"""

from __future__ import annotations

import pytest

from tests.support.faults.rows import KINDS, SHORT_ROWS, Row, all_rows, long_rows
from tests.support.faults.runs import run_row
from tests.support.pools.leaks import Levels
from tests.support.pools.processes import Cluster


@pytest.fixture(scope="module")
def levels() -> Levels:
    return Levels()


@pytest.mark.parametrize(
    "row",
    [*SHORT_ROWS, *(pytest.param(row, marks=pytest.mark.long) for row in long_rows())],
    ids=str,
)
def test_a_fault_changes_no_answer(
    row: Row, pool: Cluster, undisturbed: Cluster, levels: Levels
) -> None:
    run_row(pool, row, undisturbed)
    levels.check(pool)


def test_the_table_has_each_kind_of_request_and_the_selection_each_value_of_each_column() -> None:
    rows = all_rows()
    assert {row.kind for row in rows} == set(KINDS)
    for name in ("what", "when", "how", "kind"):
        short = {getattr(row, name) for row in SHORT_ROWS}
        assert short == {getattr(row, name) for row in rows}, name

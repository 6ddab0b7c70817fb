"""Whatever dies, each stream ends with the tokens it would have had: the table, on `sim`.

Each row hits one thing at one moment while seven requests of all kinds run; its target is the one
whose hand-off or stream is at that moment. Every answer must be the undisturbed one: status, ids,
text, log-probabilities, finish reason, usage. What the fault did not touch stays where it is, and
afterwards nobody holds anything. A selection runs always, the whole table in `make test-long`.
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
def test_a_fault_changes_no_answer(row: Row, pool: Cluster, calm: Cluster, levels: Levels) -> None:
    run_row(pool, row, calm)
    levels.check(pool)


def test_the_table_covers_each_kind_of_request_and_the_selection_each_word_of_it() -> None:
    rows = all_rows()
    assert {row.kind for row in rows} == set(KINDS)
    for name in ("what", "when", "how", "kind"):
        short = {getattr(row, name) for row in SHORT_ROWS}
        assert short == {getattr(row, name) for row in rows}, name

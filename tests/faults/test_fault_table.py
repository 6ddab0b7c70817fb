"""The fault table on the simulated engine: a fault does not change the answer of any request.

Each row injects one fault at one moment of its target request, while a request of every other kind
runs. Every answer must be the undisturbed one: status, ids, text, log-probabilities, finish reason,
usage. Requests that the fault does not hit stay on their nodes, and no resources are held
afterwards. A selection of rows runs always, the whole table in `make test-long`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.clients.streams import ask
from tests.support.faults.cases import PATH, SIZES, make_cases
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


def test_one_of_the_decode_nodes_drafts_tokens(pool: Cluster, undisturbed: Cluster) -> None:
    """So each row of the table with a decode node also moves requests from or to drafts."""
    cases = [
        case
        for number in range(16)
        for case in make_cases(
            undisturbed.url, "grammar", "parked", str(number), SIZES, ("grammar",)
        )
    ]
    with ThreadPoolExecutor(len(cases)) as threads:
        answers = list(threads.map(lambda case: ask(pool.url, PATH, case.body), cases))
    for case, answer in zip(cases, answers, strict=True):
        case.check(answer)

    def counted() -> bool:
        accepted = {
            node["id"]: node["load"]["accepted_drafts_total"] for node in pool.pool()["nodes"]
        }
        assert accepted["decode-0"] == 0
        return bool(accepted["decode-1"])

    pool.wait(counted, "report right drafts of decode-1")


def test_the_table_has_each_kind_of_request_and_the_selection_each_value_of_each_column() -> None:
    rows = all_rows()
    assert {row.kind for row in rows} == set(KINDS)
    for name in ("what", "when", "how", "kind"):
        short = {getattr(row, name) for row in SHORT_ROWS}
        assert short == {getattr(row, name) for row in rows}, name

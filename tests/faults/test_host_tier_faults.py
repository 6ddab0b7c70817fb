"""Rows of the fault table in a pool whose nodes keep what their small caches evict in host memory.

20 blocks hold the target of a row, whose prompt has 16, and little beside it; the prompts of the
six requests around it have 3 each. Together they do not fit into the cache of the one prefill node:
asked again, what is missing there comes from host memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.conftest import HASTY, SLOW_DECODE, SLOW_PREFILL, STALL
from tests.support.clients.streams import ask
from tests.support.faults.cases import PATH, SIZES, make_cases
from tests.support.faults.rows import Row
from tests.support.faults.runs import run_row
from tests.support.pools.leaks import metrics_of, settle
from tests.support.pools.processes import SIM, Cluster

ROWS = (
    Row("prefill", "half published", "kill", "seeded"),
    Row("decode", "mid-stream", "freeze", "greedy"),
)


@pytest.fixture
def small_pool() -> Iterator[Cluster]:
    cluster = Cluster(
        *(1, 2),
        flags=[*SIM, "--kv-blocks=20", "--max-model-len=320", "--host-kv-memory=1MiB"],
        prefill_flags=[*SLOW_PREFILL, HASTY],
        decode_flags=[*SLOW_DECODE, HASTY],
        router_flags=["--handoff=always", STALL],
    )
    with cluster:
        yield cluster


def test_a_fault_changes_no_answer_where_kv_goes_through_host_memory(
    small_pool: Cluster, calm: Cluster
) -> None:
    for row in ROWS:
        run_row(small_pool, row, calm, seed="host")
    cases = make_cases(calm.url, "greedy", "mid-stream", "host again", SIZES)
    for case in cases * 3:
        assert ask(small_pool.url, PATH, case.body).result == case.reference.result
    settle(small_pool)
    assert metrics_of(small_pool.url)["baton_prompt_tokens_host_total"] > 0

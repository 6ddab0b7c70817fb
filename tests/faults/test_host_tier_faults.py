"""Rows of the fault table in a pool whose nodes copy evicted blocks to host memory.

A cache of 20 blocks holds the prompt of a row's target, which has 16 blocks, and little more. The
prompts of the other requests have 3 blocks each. Together they exceed the cache of the only prefill
node, so that a repeated prompt gets its missing blocks from host memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.conftest import SHORT_DRAIN, SLOW_DECODE, SLOW_PREFILL, STALL
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
        prefill_flags=[*SLOW_PREFILL, SHORT_DRAIN],
        decode_flags=[*SLOW_DECODE, SHORT_DRAIN],
        router_flags=["--handoff=always", STALL],
    )
    with cluster:
        yield cluster


def test_a_fault_changes_no_answer_if_kv_comes_from_host_memory(
    small_pool: Cluster, undisturbed: Cluster
) -> None:
    for row in ROWS:
        run_row(small_pool, row, undisturbed, seed="host")
    cases = make_cases(undisturbed.url, "greedy", "mid-stream", "host again", SIZES)
    for case in cases * 3:
        assert ask(small_pool.url, PATH, case.body).result == case.reference.result
    settle(small_pool)
    assert metrics_of(small_pool.url)["baton_prompt_tokens_host_total"] > 0

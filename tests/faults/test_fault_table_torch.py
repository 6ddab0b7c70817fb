"""A few rows of the fault table on the torch engine, with a tiny model in bfloat16.

The nodes run with --batch-invariant on, so ids and log-probabilities must be the undisturbed ones.
So must the ids of a model that transformers' code computes, in float32.
"""

from __future__ import annotations

import pytest

from tests.faults.conftest import TORCH_MODEL
from tests.support.engines.quantized.quantized_models import EACH_KIND
from tests.support.engines.tiny_models import BRIDGE_MODELS, EXPERT_MODELS, FIRST_SPECIAL
from tests.support.faults.cases import Sizes
from tests.support.faults.rows import KINDS as ALL_REQUESTS
from tests.support.faults.rows import Kind, Row
from tests.support.faults.runs import run_row
from tests.support.kv_faults.kinds import KINDS
from tests.support.pools.processes import Cluster

# For a bridged model: the last digits of its log-probabilities may differ, and the tiny one repeats
# one token, in which no stop string can be found.
ONLY_IDS: tuple[Kind, ...] = tuple(
    kind for kind in ALL_REQUESTS if kind not in ("logprobs", "echo", "scores", "stop")
)
SIZES = Sizes(target=512, answer=48, first_id=0, end_id=FIRST_SPECIAL)
KILLED_DECODE = Row("decode", "mid-stream", "kill", "greedy")
SHORT: tuple[Row, ...] = (Row("prefill", "half published", "kill", "two"), KILLED_DECODE)
LONG: tuple[Row, ...] = (
    Row("decode", "mid-stream", "kill", "stop"),
    Row("decode", "mid-stream", "kill", "grammar"),
    Row("decode", "mid-stream", "kill", "logprobs"),
    Row("decode", "parked", "kill", "scores"),
    Row("decode", "mid-stream", "freeze", "greedy"),
    Row("decode", "mid-stream", "drain", "seeded"),
    Row("prefill", "job sent", "kill", "seeded"),
    Row("prefill", "half published", "freeze", "greedy"),
    Row("prefill", "first computed", "cut", "penalties"),
    Row("prefill", "first seen", "kill", "stop"),
    Row("decode", "parked", "kill", "greedy"),
    Row("decode", "first sent", "blip", "two"),
    Row("decode", "mid-stream", "kill", "penalties"),
    Row("decode", "mid-stream", "kill engine", "two"),
    Row("decode", "mid-stream", "hold", "seeded"),
    Row("decode", "one left", "kill", "seeded"),
    Row("prefill", "half published", "drain", "greedy"),
    Row("decode", "mid-stream", "end", "two"),
    Row("decode", "last lost", "kill", "greedy"),
    Row("decode", "last lost", "blip", "stop"),
    Row("all decode", "mid-stream", "kill", "greedy"),
    Row("both", "half published", "kill", "seeded"),
    Row("data", "half published", "freeze", "penalties"),
    Row("index", "job sent", "fill", "two"),
)
# The moments and faults that matter for KV, which run with each kind of it.
KV_ROWS: tuple[Row, ...] = (
    Row("prefill", "job sent", "kill", "greedy"),
    Row("prefill", "half published", "kill", "greedy"),
    Row("prefill", "half published", "drain", "greedy"),
    Row("decode", "parked", "kill", "greedy"),
    Row("decode", "half published", "kill", "greedy"),
    Row("decode", "mid-stream", "kill", "greedy"),
    Row("decode", "mid-stream", "drain", "seeded"),
    Row("decode", "one left", "kill", "greedy"),
    Row("decode", "last lost", "kill", "greedy"),
    Row("data", "half published", "kill", "greedy"),
)
# Where a sequence's numbers could change with the node: its prompt is computed again, its grammar
# and its other choices are continued.
QUANTIZED_ROWS: tuple[Row, ...] = (
    Row("prefill", "half published", "kill", "two"),
    Row("decode", "mid-stream", "kill", "greedy"),
    Row("decode", "mid-stream", "kill", "grammar"),
    Row("decode", "mid-stream", "drain", "seeded"),
)
# A row per kind of request whose next tokens depend on something else than KV, and one per fault.
DRAFTED_ROWS: tuple[Row, ...] = (
    Row("decode", "mid-stream", "kill", "greedy"),
    Row("decode", "mid-stream", "kill", "stop"),
    Row("decode", "mid-stream", "kill", "grammar"),
    Row("decode", "mid-stream", "kill", "logprobs"),
    Row("decode", "mid-stream", "kill", "penalties"),
    Row("decode", "mid-stream", "kill engine", "two"),
    Row("decode", "mid-stream", "drain", "seeded"),
    Row("decode", "one left", "kill", "greedy"),
    Row("decode", "last lost", "kill", "greedy"),
    Row("prefill", "half published", "kill", "two"),
)
BRIDGED: tuple[Row, ...] = (
    Row("decode", "mid-stream", "kill", "greedy"),
    Row("decode", "parked", "kill", "greedy"),
    Row("prefill", "half published", "kill", "greedy"),
)


@pytest.mark.parametrize(
    "row",
    [*SHORT, *(pytest.param(row, marks=pytest.mark.long) for row in LONG)],
    ids=str,
)
def test_a_fault_changes_no_answer_of_a_real_model(
    row: Row, torch_pool: Cluster, torch_undisturbed: Cluster
) -> None:
    run_row(torch_pool, row, torch_undisturbed, sizes=SIZES)


@pytest.mark.long
@pytest.mark.parametrize("torch_model", EXPERT_MODELS, indirect=True)
def test_a_killed_decode_node_changes_no_answer_of_a_model_with_experts(
    torch_pool: Cluster, torch_undisturbed: Cluster
) -> None:
    run_row(torch_pool, KILLED_DECODE, torch_undisturbed, sizes=SIZES)


@pytest.mark.long
@pytest.mark.parametrize(
    "torch_model",
    [each.model for each in KINDS.values() if each.model != TORCH_MODEL],
    indirect=True,
)
@pytest.mark.parametrize("row", KV_ROWS, ids=str)
def test_a_fault_changes_no_answer_with_each_kind_of_kv(
    row: Row, torch_model: str, torch_pool: Cluster, torch_undisturbed: Cluster
) -> None:
    kinds = ONLY_IDS if torch_model in BRIDGE_MODELS else ALL_REQUESTS
    run_row(torch_pool, row, torch_undisturbed, sizes=SIZES, kinds=kinds)


@pytest.mark.long
@pytest.mark.parametrize("store_codec", ["int8"], indirect=True)
@pytest.mark.parametrize("row", KV_ROWS, ids=str)
def test_a_fault_changes_no_answer_with_a_codec_of_the_store(
    row: Row, torch_pool: Cluster, torch_undisturbed: Cluster
) -> None:
    run_row(torch_pool, row, torch_undisturbed, sizes=SIZES)


@pytest.mark.long
@pytest.mark.parametrize("torch_model", EACH_KIND, indirect=True)
@pytest.mark.parametrize("row", QUANTIZED_ROWS, ids=str)
def test_a_fault_changes_no_answer_of_a_model_with_quantized_weights(
    row: Row, torch_pool: Cluster, torch_undisturbed: Cluster
) -> None:
    run_row(torch_pool, row, torch_undisturbed, sizes=SIZES)


@pytest.mark.long
@pytest.mark.parametrize(
    "drafting", [("decode-0", "decode-1"), ("decode-1",)], indirect=True, ids=["both", "one"]
)
@pytest.mark.parametrize("row", DRAFTED_ROWS, ids=str)
def test_a_fault_changes_no_answer_where_both_or_one_of_two_nodes_draft_tokens(
    row: Row, torch_pool: Cluster, torch_undisturbed: Cluster
) -> None:
    run_row(torch_pool, row, torch_undisturbed, sizes=SIZES)


@pytest.mark.long
@pytest.mark.parametrize("torch_model", ["cohere2"], indirect=True)
@pytest.mark.parametrize("row", BRIDGED, ids=str)
def test_a_fault_changes_no_answer_of_a_model_without_a_family(
    row: Row, torch_pool: Cluster, torch_undisturbed: Cluster
) -> None:
    run_row(torch_pool, row, torch_undisturbed, sizes=SIZES)

"""Gauges of nodes, samples for learning and the prior, from the nodes' reports."""

from __future__ import annotations

import msgspec
import pytest

from baton_operator.autoscaling import node_metrics
from baton_operator.autoscaling.node_metrics import Gauge
from baton_operator.autoscaling.planner.capability import NodeSample
from baton_protocol.ids import Epoch
from baton_protocol.store import Role, Speeds
from tests.support.nodes.fake_node import LAYOUT
from tests.support.planner.builders import node_report


def test_a_silent_node_keeps_its_last_gauges() -> None:
    first = node_metrics.add_reports({}, [node_report("a"), node_report("b")], 10.0)
    then = node_metrics.add_reports(first, [node_report("b", running=4)], 15.0)
    assert (then["a"].at_s, then["b"].at_s) == (10.0, 15.0)
    assert then["b"].report.load.running == 4


def heard_twice(role: Role, before: dict[str, int], after: dict[str, int]) -> dict[str, Gauge]:
    first = node_metrics.add_reports({}, [node_report("n", role, **before)], 10.0)
    return node_metrics.add_reports(first, [node_report("n", role, **after)], 15.0)


def test_the_busy_share_of_a_node_follows_from_its_counters_and_speeds() -> None:
    prompts = heard_twice("prefill", {}, {"computed_prompt_tokens_total": 2500})
    assert prompts["n"].busy == 0.5
    steps = heard_twice("decode", {}, {"engine_steps_total": 50})
    assert steps["n"].busy == pytest.approx(0.2)
    assert heard_twice("decode", {}, {"engine_steps_total": 5000})["n"].busy == 1.0
    assert heard_twice("decode", {}, {})["n"].busy == 0.0
    assert node_metrics.add_reports({}, [node_report("n")], 10.0)["n"].busy is None


def test_the_read_rate_of_the_store_comes_from_nodes_with_two_reports() -> None:
    twice = heard_twice("prefill", {"fetched_bytes_total": 500}, {"fetched_bytes_total": 2500})
    assert node_metrics.sum_store_reads(twice) == 400.0
    assert (
        node_metrics.sum_store_reads(node_metrics.add_reports(twice, [node_report("m")], 15.0))
        == 400.0
    )
    assert (
        node_metrics.sum_store_reads(node_metrics.add_reports({}, [node_report("m")], 15.0)) is None
    )


def test_reports_of_different_epochs_are_not_compared() -> None:
    first = node_metrics.add_reports({}, [node_report("n", engine_steps_total=900)], 10.0)
    restarted = msgspec.structs.replace(node_report("n"), epoch=Epoch("epoch-2"))
    then = node_metrics.add_reports(first, [restarted], 15.0)
    assert then["n"].busy is None
    assert node_metrics.samples_between(first, then) == []


def test_step_times_are_learnt_only_while_a_batch_runs() -> None:
    first = node_metrics.add_reports({}, [node_report("n", running=4, free_blocks=80)], 10.0)
    newest = node_report("n", running=6, free_blocks=60, engine_steps_total=100)
    [sample] = node_metrics.samples_between(first, node_metrics.add_reports(first, [newest], 15.0))
    assert (sample.batch, sample.step_s) == (5.0, 0.02)
    assert sample.kv_tokens == 30 * LAYOUT.block_size
    few = node_report("n", running=6, free_blocks=60, engine_steps_total=3)
    [sample] = node_metrics.samples_between(first, node_metrics.add_reports(first, [few], 15.0))
    assert (sample.batch, sample.step_s, sample.kv_tokens) == (None, None, None)


def test_a_step_with_drafts_counts_as_the_time_of_each_token_that_a_sequence_got() -> None:
    """40 steps of 5 sequences with 200 tokens of their own, and 100 drafts that were right."""
    first = node_metrics.add_reports({}, [node_report("n", running=5)], 10.0)
    newest = node_report(
        "n",
        running=5,
        engine_steps_total=40,
        generated_tokens_total=300,
        accepted_drafts_total=100,
    )
    [sample] = node_metrics.samples_between(first, node_metrics.add_reports(first, [newest], 15.0))
    assert sample.step_s == pytest.approx(0.02 / 1.5)


def test_prefill_speeds_are_learnt_only_if_prompts_were_computed() -> None:
    first = node_metrics.add_reports({}, [node_report("n", "prefill")], 10.0)
    idle = node_metrics.samples_between(
        first, node_metrics.add_reports(first, [node_report("n", "prefill")], 15.0)
    )
    assert idle == [NodeSample()]
    worked = node_report("n", "prefill", computed_prompt_tokens_total=900)
    [sample] = node_metrics.samples_between(first, node_metrics.add_reports(first, [worked], 15.0))
    assert sample == NodeSample(prefill_tokens_per_s=1000.0)


def test_the_prior_takes_each_speed_from_nodes_of_its_role() -> None:
    slow = Speeds(prefill_tokens_per_s=10.0, decode_step_ms=90.0)
    prefill = msgspec.structs.replace(node_report("p", "prefill"), speeds=slow)
    prior = node_metrics.prior_of(node_metrics.add_reports({}, [prefill, node_report("d")], 0.0))
    assert prior is not None
    assert (prior.prefill_tokens, prior.step_base_s) == (10.0, 0.02)
    assert prior.step_per_seq_s == 0.02 / node_metrics.DOUBLING_BATCH
    assert prior.kv_capacity == 100 * LAYOUT.block_size


def test_without_prefill_nodes_the_prior_takes_the_prefill_speed_of_decode_nodes() -> None:
    prior = node_metrics.prior_of(node_metrics.add_reports({}, [node_report("d")], 0.0))
    assert prior is not None
    assert prior.prefill_tokens == 1000.0


def test_nodes_without_measurements_give_no_prior() -> None:
    unmeasured = msgspec.structs.replace(node_report("d"), speeds=Speeds())
    assert node_metrics.prior_of(node_metrics.add_reports({}, [unmeasured], 0.0)) is None
    assert node_metrics.prior_of({}) is None


def test_decreasing_counters_and_too_many_free_blocks_count_as_zero() -> None:
    before = node_report(fetched_bytes_total=100, free_blocks=500, engine_steps_total=9)
    first = node_metrics.add_reports({}, [before], 10.0)
    second = node_metrics.add_reports(first, [node_report(free_blocks=500)], 20.0)
    assert (second["d"].busy, second["d"].fetched) == (0.0, 0.0)
    assert node_metrics.kv_tokens(before) == 0
    assert node_metrics.sum_store_reads(second) == 0.0

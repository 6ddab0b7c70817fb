"""What a node says about itself in numbers."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from baton_engine.api import StepResult
from baton_node.metrics import COUNTERS, GAUGES, SPEEDS, NodeMetrics
from baton_node.speeds import SpeedMeter
from baton_protocol.ids import NodeId
from baton_protocol.store import NodeLoad, Speeds
from tests.support.tables import values_of


async def test_metrics_carry_the_last_load_with_the_nodes_name() -> None:
    load = NodeLoad(published_bytes_total=10, fetched_bytes_total=20, reused_chunks_total=3)
    page = NodeMetrics(NodeId("p0"), lambda: (load, Speeds(decode_step_ms=1.5))).page().decode()
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.labels == {"node": "p0"}
    }
    assert values["baton_kv_published_bytes_total"] == 10
    assert values["baton_kv_fetched_bytes_total"] == 20
    assert values["baton_kv_chunks_reused_total"] == 3
    assert values["baton_decode_step_milliseconds"] == 1.5


async def test_every_figure_of_the_load_is_a_metric() -> None:
    page = NodeMetrics(NodeId("p0"), lambda: (NodeLoad(), Speeds())).page().decode()
    metered = {family.name for family in text_string_to_metric_families(page)}
    assert {name for name, _, _ in (*COUNTERS, *GAUGES, *SPEEDS)} <= metered
    fields = {field for _, field, _ in (*COUNTERS, *GAUGES, *SPEEDS)}
    assert fields == {*NodeLoad.__struct_fields__, *Speeds.__struct_fields__}


async def test_the_servers_tasks_are_counted() -> None:
    metrics = NodeMetrics(NodeId("p0"), lambda: (NodeLoad(), Speeds()))
    before = values_of(metrics.page())["baton_asyncio_tasks"]
    more = [asyncio.create_task(asyncio.sleep(60)) for _ in range(3)]
    assert values_of(metrics.page())["baton_asyncio_tasks"] == before + 3
    for task in more:
        task.cancel()


def test_speeds_follow_the_steps_and_small_prompts_do_not_count() -> None:
    meter = SpeedMeter(Speeds(prefill_tokens_per_s=1000.0, decode_step_ms=10.0))
    for _ in range(100):
        meter.observe(0.1, StepResult(num_tokens=200, num_prompt_tokens=200, num_seqs=1))
        meter.observe(0.02, StepResult(num_tokens=4, num_seqs=4))
        meter.observe(5.0, StepResult(num_tokens=3, num_prompt_tokens=2, num_seqs=2))
        meter.observe(5.0, StepResult())
    speeds = meter.speeds()
    assert 1990 < speeds.prefill_tokens_per_s < 2010
    assert 19.9 < speeds.decode_step_ms < 20.1


def test_transfers_that_were_not_measured_keep_what_was_known() -> None:
    meter = SpeedMeter(Speeds(put_bytes_per_s=5.0, get_bytes_per_s=6.0))
    meter.transfers(0.0, 9.0)
    assert (meter.speeds().put_bytes_per_s, meter.speeds().get_bytes_per_s) == (5.0, 9.0)

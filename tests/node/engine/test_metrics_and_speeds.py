"""What a node says about itself in numbers."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from baton_engine.interface import StepResult
from baton_node.engine.job import SpeedMeter
from baton_node.server.metrics import (
    COUNTERS,
    GAUGES,
    SPEEDS,
    STORE_COUNTERS,
    STORE_GAUGES,
    NodeMetrics,
)
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import Load
from baton_protocol.store import DataInstance, NodeLoad, Speeds
from tests.support.nodes.request_tables import metric_values

# A line of the table of nodes' metrics.
LINE = re.compile(r"^\| `(baton_\w+)` \| (`node`[^|]*) \|", re.MULTILINE)


def page(*instances: DataInstance, **load: int) -> bytes:
    """What a node says at this load."""
    speeds = Speeds(decode_step_ms=1.5, get_latency_ms=0.25)
    said = Load(Epoch("e"), "ready", speeds, NodeLoad(**load), instances=instances)
    return NodeMetrics(NodeId("p0"), lambda: said).page()


def samples(page: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Value by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


async def test_metrics_carry_the_last_load_with_the_nodes_name() -> None:
    load = {"published_bytes_total": 10, "queried_blocks_total": 30, "behind_skipped_total": 4}
    said = samples(page(**load))
    mine = frozenset({("node", "p0")})
    assert said["baton_kv_published_bytes_total", mine] == 10
    assert said["baton_kv_blocks_queried_total", mine] == 30
    assert said["baton_kv_behind_skipped_total", mine] == 4
    assert said["baton_decode_step_milliseconds", mine] == 1.5
    assert said["baton_kv_get_latency_milliseconds", mine] == 0.25


async def test_metrics_carry_each_data_server_by_its_number() -> None:
    well = DataInstance(used_bytes=5, limit_bytes=9, evicted_keys=2, get_bytes_per_s=7.0)
    said = samples(page(well, DataInstance(trouble="away", get_latency_ms=3.0)))
    first, second = (frozenset({("node", "p0"), ("instance", str(i))}) for i in range(2))
    assert said["baton_store_used_bytes", first] == 5
    assert said["baton_store_limit_bytes", first] == 9
    assert said["baton_store_evicted_keys_total", first] == 2
    assert said["baton_store_get_bytes_per_second", first] == 7
    assert said["baton_store_get_latency_milliseconds", second] == 3
    assert (said["baton_store_usable", first], said["baton_store_usable", second]) == (1, 0)


async def test_a_data_server_that_takes_no_chunks_is_not_usable() -> None:
    said = samples(page(DataInstance(put_trouble="full")))
    assert said["baton_store_usable", frozenset({("node", "p0"), ("instance", "0")})] == 0


async def test_every_figure_of_the_load_is_a_metric() -> None:
    metered = {family.name for family in text_string_to_metric_families(page().decode())}
    tables = {
        (NodeLoad, Speeds): (*COUNTERS, *GAUGES, *SPEEDS),
        (DataInstance,): (*STORE_COUNTERS, *STORE_GAUGES),
    }
    for records, table in tables.items():
        assert {name for name, _, _ in table} <= metered
        fields = {field for record in records for field in record.__struct_fields__}
        assert {field for _, field, _ in table} == fields - {"trouble", "put_trouble"}
    assert "baton_store_usable" in metered  # that is both troubles


async def test_the_documents_table_says_what_the_page_does() -> None:
    document = Path(__file__).parents[3] / "docs" / "api.md"
    told = dict(LINE.findall(document.read_text()))
    assert len(told) > 20
    said = samples(page(DataInstance()))
    on_page = {name: {key for key, _ in labels} for name, labels in said}
    for name, labels in told.items():
        assert set(re.findall(r"`(\w+)`", labels)) == on_page[name], name
    kv = {name for name in on_page if name.startswith(("baton_store_", "baton_kv_blocks_"))}
    assert kv - told.keys() == {"baton_kv_blocks_free", "baton_kv_blocks_cached"}


async def test_the_servers_tasks_are_counted() -> None:
    before = metric_values(page())["baton_asyncio_tasks"]
    more = [asyncio.create_task(asyncio.sleep(60)) for _ in range(3)]
    assert metric_values(page())["baton_asyncio_tasks"] == before + 3
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
    meter.transfers(0.0, 9.0, 0.0)
    assert (meter.speeds().put_bytes_per_s, meter.speeds().get_bytes_per_s) == (5.0, 9.0)
    meter.transfers(0.0, 0.0, 2.0)
    assert (meter.speeds().get_bytes_per_s, meter.speeds().get_latency_ms) == (9.0, 2.0)

"""A node's metrics page, and how it measures its speeds."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from baton_engine.interface import StepResult
from baton_node.engine.speed_meter import SpeedMeter
from baton_node.server.gpu_usage import GpuUsage
from baton_node.server.metrics import NodeMetrics
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import Load
from baton_protocol.metrics import metrics_of
from baton_protocol.store import DataInstance, NodeLoad, Speeds
from baton_protocol.vllm_metrics import CACHE_CONFIG, LOAD_ALIASES
from tests.support.nodes.request_tables import metric_values

# A row of the documented table of node metrics.
ROW = re.compile(r"^\| `(baton_\w+)` \| (?:counter|gauge) \| ([^|]*) \|", re.MULTILINE)


def page(*instances: DataInstance, **load: int) -> bytes:
    """Return the metrics page of a node with this load."""
    speeds = Speeds(decode_step_ms=1.5, get_latency_ms=0.25)
    report = Load(Epoch("e"), "ready", speeds, NodeLoad(**load), instances=instances)
    return NodeMetrics(NodeId("p0"), lambda: report, lambda: GpuUsage(0.25, 3, 8)).page()


def samples(page: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the page's values by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


async def test_metrics_have_the_figures_of_the_last_load_and_the_node_s_name() -> None:
    load = {"published_bytes_total": 10, "queried_blocks_total": 30, "behind_skipped_total": 4}
    values = samples(page(**load))
    labels = frozenset({("node", "p0")})
    assert values["baton_kv_published_bytes_total", labels] == 10
    assert values["baton_kv_blocks_queried_total", labels] == 30
    assert values["baton_kv_behind_skipped_total", labels] == 4
    assert values["baton_decode_step_milliseconds", labels] == 1.5
    assert values["baton_kv_get_latency_milliseconds", labels] == 0.25


async def test_the_load_has_vllms_names_and_labels_on_a_page_of_its_own() -> None:
    loads = NodeLoad(running=3, waiting=1, parked=2, total_blocks=8, free_blocks=2)
    report = Load(Epoch("e"), "ready", Speeds(), loads)
    metrics = NodeMetrics(NodeId("p0"), lambda: report, model=lambda: "m", block_size=16)
    values = samples(metrics.vllm_page())
    labels = frozenset({("engine", "p0"), ("model_name", "m")})
    expected = {"num_requests_running": 3, "num_requests_waiting": 3, "kv_cache_usage_perc": 0.75}
    assert {name: values[f"vllm:{name}", labels] for name in expected} == expected
    cache = labels | {("block_size", "16"), ("num_gpu_blocks", "8")}
    assert values[CACHE_CONFIG, cache] == 1
    assert {name for name, _ in values} == {*LOAD_ALIASES, CACHE_CONFIG}
    assert b"vllm" not in metrics.page()


async def test_counters_by_position_are_samples_of_one_metric() -> None:
    values = samples(page(accepted_at_1_total=9, accepted_at_5_total=4))
    found = {
        dict(labels)["position"]: value
        for (name, labels), value in values.items()
        if name == "baton_accepted_at_position_total"
    }
    assert found == {"1": 9, "2": 0, "3": 0, "4": 0, "5-8": 4, "9-": 0}


async def test_metrics_have_the_load_of_the_node_s_gpu() -> None:
    values, node = samples(page()), frozenset({("node", "p0")})
    names = ("baton_gpu_busy", "baton_gpu_memory_used_bytes", "baton_gpu_memory_bytes")
    assert [values[name, node] for name in names] == [0.25, 3, 8]


async def test_metrics_have_the_figures_of_each_data_server_by_its_number() -> None:
    healthy = DataInstance(used_bytes=5, limit_bytes=9, evicted_keys=2, get_bytes_per_s=7.0)
    values = samples(page(healthy, DataInstance(trouble="away", get_latency_ms=3.0)))
    first, second = (frozenset({("node", "p0"), ("instance", str(i))}) for i in range(2))
    assert values["baton_store_used_bytes", first] == 5
    assert values["baton_store_limit_bytes", first] == 9
    assert values["baton_store_evicted_keys_total", first] == 2
    assert values["baton_store_get_bytes_per_second", first] == 7
    assert values["baton_store_get_latency_milliseconds", second] == 3
    assert (values["baton_store_usable", first], values["baton_store_usable", second]) == (1, 0)


async def test_a_data_server_that_accepts_no_puts_is_not_usable() -> None:
    values = samples(page(DataInstance(put_trouble="full")))
    assert values["baton_store_usable", frozenset({("node", "p0"), ("instance", "0")})] == 0


async def test_every_figure_of_the_load_is_a_metric() -> None:
    metrics = {family.name for family in text_string_to_metric_families(page().decode())}
    for record in (NodeLoad, Speeds, DataInstance):
        declared = metrics_of(record)
        assert {metric.name.removesuffix("_total") for metric in declared.values()} <= metrics
        assert declared.keys() == {*record.__struct_fields__} - {"trouble", "put_trouble"}
        assert all(metric.help_text.endswith(".") for metric in declared.values())
    assert "baton_store_usable" in metrics  # made of `trouble` and `put_trouble`


async def test_the_documented_metrics_and_labels_are_those_of_the_page() -> None:
    document = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
    section = document.read_text().split("\n## Nodes\n")[1].split("\n## ")[0]
    documented = dict(ROW.findall(section))
    assert len(documented) > 20
    values = samples(page(DataInstance()))
    on_page = {name: {key for key, _ in labels} for name, labels in values}
    for name, labels in documented.items():
        assert set(re.findall(r"`(\w+)`", labels)) == on_page[name], name
    waits = {name for name in on_page if name.endswith(("_bucket", "_sum", "_count", "_created"))}
    assert on_page.keys() - waits == documented.keys()


async def test_the_number_of_asyncio_tasks_of_the_server_is_a_metric() -> None:
    before = metric_values(page())["baton_asyncio_tasks"]
    tasks = [asyncio.create_task(asyncio.sleep(60)) for _ in range(3)]
    assert metric_values(page())["baton_asyncio_tasks"] == before + 3
    for task in tasks:
        task.cancel()


def test_speeds_follow_the_steps_and_ignore_steps_with_small_prompts() -> None:
    meter = SpeedMeter(Speeds(prefill_tokens_per_s=1000.0, decode_step_ms=10.0))
    for _ in range(100):
        meter.observe(0.1, StepResult(num_tokens=200, num_prompt_tokens=200, num_seqs=1))
        meter.observe(0.02, StepResult(num_tokens=4, num_seqs=4))
        meter.observe(5.0, StepResult(num_tokens=3, num_prompt_tokens=2, num_seqs=2))
        meter.observe(5.0, StepResult())
    speeds = meter.speeds()
    assert 1990 < speeds.prefill_tokens_per_s < 2010
    assert 19.9 < speeds.decode_step_ms < 20.1


def test_a_transfer_speed_that_was_not_measured_keeps_its_last_value() -> None:
    meter = SpeedMeter(Speeds(put_bytes_per_s=5.0, get_bytes_per_s=6.0))
    meter.transfers(0.0, 9.0, 0.0)
    assert (meter.speeds().put_bytes_per_s, meter.speeds().get_bytes_per_s) == (5.0, 9.0)
    meter.transfers(0.0, 0.0, 2.0)
    assert (meter.speeds().get_bytes_per_s, meter.speeds().get_latency_ms) == (9.0, 2.0)

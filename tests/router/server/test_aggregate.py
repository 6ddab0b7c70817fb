"""Merging the pages of several workers into one."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton_router.server.aggregate import merge_metrics, merge_pools


def page(requests: int, node_load: int) -> bytes:
    registry = CollectorRegistry()
    answers = Counter("baton_router_requests_total", "Answers.", ("code",), registry=registry)
    answers.labels("200").inc(requests)
    Histogram("baton_router_queue_seconds", "Waits.", buckets=(1,), registry=registry).observe(2)
    Gauge("baton_asyncio_tasks", "Tasks.", registry=registry).set(requests)
    Gauge("baton_requests", "Node.", ("node",), registry=registry).labels("d0").set(node_load)
    return generate_latest(registry)


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_each_worker_s_own_metrics_have_a_worker_label() -> None:
    merged = samples(merge_metrics("1", page(3, 5), {"0": page(4, 5), "2": page(0, 5)}))
    for worker, requests in (("0", 4), ("1", 3), ("2", 0)):
        label = ("worker", worker)
        assert (
            merged["baton_router_requests_total", frozenset({("code", "200"), label})] == requests
        )
        assert merged["baton_asyncio_tasks", frozenset({label})] == requests
        assert merged["baton_router_queue_seconds_bucket", frozenset({("le", "+Inf"), label})] == 1


def test_node_metrics_appear_once_from_the_worker_that_answers() -> None:
    merged = samples(merge_metrics("1", page(3, 5), {"0": page(4, 7)}))
    of_nodes = {key: value for key, value in merged.items() if key[0] == "baton_requests"}
    assert of_nodes == {("baton_requests", frozenset({("node", "d0")})): 5}


def test_the_rows_of_a_metric_are_adjacent_under_one_header() -> None:
    lines = merge_metrics("0", page(1, 1), {"1": page(2, 2)}).decode().splitlines()
    heads = [line for line in lines if line.startswith("# TYPE baton_router_requests_total")]
    assert len(heads) == 1
    rows = [i for i, line in enumerate(lines) if line.startswith("baton_router_requests_total{")]
    assert rows == [rows[0], rows[0] + 1]


def test_label_values_with_spaces_or_braces_are_kept() -> None:
    page = b'# TYPE baton_router_x counter\nbaton_router_x{why="a {b} c"} 1\nbaton_router_x 2\n'
    merged = merge_metrics("0", page, {}).decode().splitlines()
    assert merged[1:] == [
        'baton_router_x{worker="0",why="a {b} c"} 1',
        'baton_router_x{worker="0"} 2',
    ]


def pool(running: int, booked: int, others: int) -> dict[str, Any]:
    node = {
        "id": "d0",
        "booked": {"requests": booked, "tokens": 10 * booked, "sequences": booked},
        "others": {"tokens": 10 * others, "sequences": others},
    }
    return {"pool": "p", "nodes": [node], "totals": {"running": 9, "requests_running": running}}


def test_the_merged_pool_sums_the_workers_requests_and_bookings() -> None:
    merged = merge_pools("1", pool(2, 2, 4), {"0": pool(3, 3, 3)})
    assert merged["totals"] == {"running": 9, "requests_running": 5}
    [node] = merged["nodes"]
    assert node["booked"] == {"requests": 5, "tokens": 50, "sequences": 5}
    assert node["others"] == {"tokens": 10, "sequences": 1}
    assert merged["workers"] == [
        {"worker": "0", "requests_running": 3},
        {"worker": "1", "requests_running": 2},
    ]


def test_a_sibling_s_unknown_node_does_not_change_the_merged_nodes() -> None:
    other = pool(1, 1, 0)
    other["nodes"][0]["id"] = "d1"
    merged = merge_pools("0", pool(2, 2, 4), {"1": other})
    assert merged["nodes"] == pool(2, 2, 4)["nodes"]

"""One page out of several workers' pages."""

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


def test_each_workers_own_figures_carry_its_name() -> None:
    found = samples(merge_metrics("1", page(3, 5), {"0": page(4, 5), "2": page(0, 5)}))
    for worker, requests in (("0", 4), ("1", 3), ("2", 0)):
        mine = ("worker", worker)
        assert found["baton_router_requests_total", frozenset({("code", "200"), mine})] == requests
        assert found["baton_asyncio_tasks", frozenset({mine})] == requests
        assert found["baton_router_queue_seconds_bucket", frozenset({("le", "+Inf"), mine})] == 1


def test_what_is_said_of_nodes_is_there_once_as_the_asked_worker_sees_it() -> None:
    found = samples(merge_metrics("1", page(3, 5), {"0": page(4, 7)}))
    of_nodes = {key: value for key, value in found.items() if key[0] == "baton_requests"}
    assert of_nodes == {("baton_requests", frozenset({("node", "d0")})): 5}


def test_a_family_stands_together_under_one_head() -> None:
    lines = merge_metrics("0", page(1, 1), {"1": page(2, 2)}).decode().splitlines()
    heads = [line for line in lines if line.startswith("# TYPE baton_router_requests_total")]
    assert len(heads) == 1
    mine = [i for i, line in enumerate(lines) if line.startswith("baton_router_requests_total{")]
    assert mine == [mine[0], mine[0] + 1]


def test_a_label_with_a_space_or_a_brace_stays_whole() -> None:
    odd = b'# TYPE baton_router_x counter\nbaton_router_x{why="a {b} c"} 1\nbaton_router_x 2\n'
    found = merge_metrics("0", odd, {}).decode().splitlines()
    assert found[1:] == [
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


def test_a_pool_sums_what_each_worker_does_itself() -> None:
    found = merge_pools("1", pool(2, 2, 4), {"0": pool(3, 3, 3)})
    assert found["totals"] == {"running": 9, "requests_running": 5}
    [node] = found["nodes"]
    assert node["booked"] == {"requests": 5, "tokens": 50, "sequences": 5}
    assert node["others"] == {"tokens": 10, "sequences": 1}
    assert found["workers"] == [
        {"worker": "0", "requests_running": 3},
        {"worker": "1", "requests_running": 2},
    ]


def test_a_sibling_that_knows_a_node_not_or_another_changes_nothing() -> None:
    other = pool(1, 1, 0)
    other["nodes"][0]["id"] = "d1"
    found = merge_pools("0", pool(2, 2, 4), {"1": other})
    assert found["nodes"] == pool(2, 2, 4)["nodes"]

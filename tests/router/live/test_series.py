"""Rates and quantiles from two looks at counters."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from baton_protocol.ids import Epoch, NodeId
from baton_protocol.store import LATENCY_BOUNDS_S, NodeLoad, RouterReport
from baton_router.live.series import (
    Look,
    NodeRates,
    Rates,
    count_nodes,
    quantile_ms,
    rates_between,
)
from baton_router.nodes.pool_view import PoolView
from tests.support.clock import Clock
from tests.support.nodes.fake_node import make_report

NODE = NodeId("decode-0")
BUCKETS = len(LATENCY_BOUNDS_S) + 1


def histogram(**counts: int) -> tuple[int, ...]:
    """Counts by bucket: `b3=5` are 5 values in bucket 3."""
    return tuple(counts.get(f"b{index}", 0) for index in range(BUCKETS))


def report(**figures: object) -> RouterReport:
    counts = {"ttft_counts": histogram(), "itl_counts": histogram()}
    return msgspec.convert(
        {"router": "r", "uptime_s": 1.0, **counts, **figures}, RouterReport, strict=False
    )


def test_rates_are_differences_per_second() -> None:
    before = Look(10.0, report(requests_total=5, output_tokens_total=100), errors=1)
    now = Look(
        12.0,
        report(
            requests_total=9,
            output_tokens_total=150,
            prompt_tokens_total=8,
            itl_counts=histogram(b0=4),
        ),
        errors=4,
    )
    assert rates_between(before, now) == Rates(
        requests=2.0,
        tokens=25.0,
        prompt_tokens=4.0,
        errors=1.5,
        itl_p50_ms=2.5,
        itl_p99_ms=4.95,
    )


@pytest.mark.parametrize("before", [None, Look(10.0, report())])
def test_nothing_is_known_without_a_time_between_two_looks(before: Look | None) -> None:
    assert rates_between(before, Look(10.0, report())) == Rates()


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        (histogram(), 0.5, None),
        (histogram(b0=10), 0.5, 2.5),  # evenly between 0 and 5 ms
        (histogram(b0=10), 1.0, 5.0),
        (histogram(b1=1, b3=1), 0.5, 10.0),
        (histogram(b1=99, b4=1), 0.99, 10.0),
        (histogram(b1=98, b4=2), 0.99, 35.0),
        (histogram(**{f"b{BUCKETS - 1}": 3}), 0.5, 1e3 * LATENCY_BOUNDS_S[-1]),
        ((), 0.5, None),
    ],
)
def test_a_quantile_lies_between_the_bounds_of_its_bucket(
    counts: Sequence[int], share: float, expected: float | None
) -> None:
    assert quantile_ms(counts, share) == expected


def test_rates_of_a_node_are_those_between_its_last_two_reports() -> None:
    clock = Clock()
    view = PoolView(clock, 100)
    load = NodeLoad(generated_tokens_total=10, fetched_bytes_total=100, published_bytes_total=0)
    node = view.hello(make_report(NODE, "decode", load=load))
    first = count_nodes(view.nodes.values(), {})
    assert first[NODE].rates is None

    clock.advance(2.0)
    node.loaded_at = clock()
    later = NodeLoad(generated_tokens_total=30, fetched_bytes_total=500, published_bytes_total=8)
    node.report = msgspec.structs.replace(node.report, load=later)
    second = count_nodes(view.nodes.values(), first)
    assert second[NODE].rates == NodeRates(10.0, 200.0, 4.0)
    # No report came in between: the rates stay.
    clock.advance(1.0)
    assert count_nodes(view.nodes.values(), second) == second
    # Another start of the node has counted from 0.
    view.hello(make_report(NODE, "decode", epoch=Epoch("epoch-2")))
    assert count_nodes(view.nodes.values(), second)[NODE].rates is None

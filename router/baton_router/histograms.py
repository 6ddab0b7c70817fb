"""A Prometheus histogram without labels that costs little to observe: the router does so per token.

In: seconds, from one thread. Out: the samples that prometheus_client's own would tell.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Timings(Collector):
    """`bounds` are upper ones, rising; what lies above all is counted too."""

    def __init__(
        self, name: str, what: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._what = what
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._what, buckets=buckets, sum_value=self._sum)

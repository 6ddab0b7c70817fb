"""A Prometheus histogram without labels that costs little to observe: the router does so per token.

In: seconds, from one thread. Out: the samples that prometheus_client's own would tell.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Timings(Collector):
    """`bounds` are upper ones, rising. `counts[i]` are those within bound i and not within the one
    before; the last entry is those beyond all."""

    def __init__(self, name: str, what: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._what = what
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self.counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._what, buckets=buckets, sum_value=self._sum)

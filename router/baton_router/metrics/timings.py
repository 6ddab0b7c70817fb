"""A Prometheus histogram that is cheap to observe."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Timings(Collector):
    """A Prometheus histogram without labels that is cheap to observe, since the router does so for
    each token.

    In: seconds, from one thread. Out: the same samples as prometheus_client's histogram.

    `bounds` are ascending upper bounds. `counts[i]` counts values above bound i - 1 and up to bound
    i; the last entry counts values above all bounds.
    """

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._what = help_text
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

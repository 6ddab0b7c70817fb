"""When requests are sent: gaps drawn from a gamma distribution.

In: a rate, a shape, a seed. Out: seconds since the start, one per request. At shape 1 the gaps are
exponential, that is, arrivals are a Poisson process.
"""

from __future__ import annotations

import math
import random

from baton_cli.errors import UsageError


def parse_rate(text: str) -> float:
    """Requests a second, or infinity; raise UsageError."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise UsageError(f"--request-rate {text}: give requests a second above 0, or inf")
    return rate


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """The first arrives at 0. The mean gap is 1 / rate whatever the burstiness: the gamma
    distribution's mean is shape * scale, its variance shape * scale^2."""
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.gammavariate(burstiness, 1 / (rate * burstiness)))
    return times

"""Draws arrival times, with gaps from a gamma distribution.

In: a rate, a shape (the burstiness), a seed. Out: one time per request, in seconds since the start.
With shape 1 the gaps are exponential: arrivals are a Poisson process.
"""

from __future__ import annotations

import math
import random

from baton_cli.errors import UsageError


def parse_rate(text: str) -> float:
    """Return --request-rate in requests per second, or infinity; raise UsageError."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise UsageError(f"--request-rate {text}: give requests a second above 0, or inf")
    return rate


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return `count` arrival times in seconds; the first is 0. The burstiness does not change the
    mean gap of 1 / rate: a gamma distribution has mean shape * scale and variance shape * scale^2.
    """
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.gammavariate(burstiness, 1 / (rate * burstiness)))
    return times

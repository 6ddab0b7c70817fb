"""Growth that is beyond doubt, extrapolated.

In: samples of a rate. Out: the predicted rate. A straight line is fitted by least squares through
the last minutes, and through half of them, since growth may just have begun; through fewer points
only if it is surer. A trend is a guess; the next decision corrects its error.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

OVER_S = 240.0  # seconds over which a trend is fitted
FEWEST = 6  # samples that make a trend
SURE = 4.0  # standard errors that a slope is above zero
SURE_EARLY = 5.0  # the same for half of the time
SEEN = 0.8  # share of the time that samples must cover
MOST_GROWTH = 2.0

Points = Sequence[tuple[float, float]]


def grown(now: float | None, points: Points, start_s: float, window_s: float) -> float | None:
    """The rate in `start_s`; `points` are (time, mean of the last `window_s`), the newest last. The
    mean is as of the window's middle."""
    if now is None or len(points) < FEWEST:
        return now
    slope = max(
        _sure_slope(points, OVER_S, window_s, SURE),
        _sure_slope(points, OVER_S / 2.0, window_s, SURE_EARLY),
    )
    return min(now + slope * (start_s + window_s / 2.0), now * MOST_GROWTH)


def _sure_slope(points: Points, over_s: float, window_s: float, sure: float) -> float:
    """The slope; 0 if it is not significant or the samples cover too little time, because a new
    operator sees a pool fill. Samples that are closer than their windows saw the same requests, so
    fewer of them count for the slope's error."""
    recent = [point for point in points if point[0] >= points[-1][0] - over_s]
    seen_s = recent[-1][0] - recent[0][0]
    if seen_s < SEEN * over_s:
        return 0.0
    slope, error = slope_of(recent)
    error *= sqrt(max(1.0, window_s * (len(recent) - 1) / seen_s))
    # After a jump the whole still has a slope; its newer half has none.
    still, _ = slope_of(recent[-max(FEWEST, len(recent) // 2) :])
    return slope if slope > sure * error and still >= slope / 2.0 else 0.0


def slope_of(points: Points) -> tuple[float, float]:
    """Slope and its standard error; (0, 0) where there are too few points or they are of one
    time."""
    count = len(points)
    if count < FEWEST:
        return 0.0, 0.0
    mean_t = sum(t for t, _ in points) / count
    mean_v = sum(v for _, v in points) / count
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    if spread <= 0.0:
        return 0.0, 0.0
    slope = sum((t - mean_t) * (v - mean_v) for t, v in points) / spread
    rest = sum((v - mean_v - slope * (t - mean_t)) ** 2 for t, v in points)
    return slope, sqrt(rest / (count - 2) / spread)

"""Loads for autoscalers: a day, a mix that shifts, a burst, and noise around a constant.

Arrivals are a Poisson process whose rate follows a curve. The lengths of prompts and answers are
log-normal. Some requests continue a conversation and find most of their prompt in a cache. Each
load is a function of one seed.

In: a seed, and whether to use the shorter form. Out: requests in order, and a pool's initial node
counts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from baton_protocol.store import Role
from benchmarks.support.autoscaling.pool_nodes import SimRequest

HOUR_S = 3600.0
PROMPT_TOKENS = (16, 16_000)  # minimum and maximum
OUTPUT_TOKENS = (4, 4_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The distribution of requests: mean lengths in tokens, and sigmas of their logarithms."""

    prompt: float
    output: float
    prompt_sigma: float = 0.6
    output_sigma: float = 0.6
    next_turns: float = 0.3  # share of requests that find `cached` of their prompt in a cache
    cached: float = 0.8


@dataclass(frozen=True, slots=True)
class Load:
    """A load over `length_s` seconds. `rate` maps a time to requests per second, never above
    `peak`; `share` maps a time to the second mix's share of requests."""

    name: str
    what: str
    length_s: float
    peak: float
    rate: Callable[[float], float]
    mixes: tuple[Mix, Mix]
    share: Callable[[float], float]
    initial: Mapping[Role, int]

    def requests(self, seed: int) -> tuple[SimRequest, ...]:
        return tuple(self._requests(random.Random(f"{self.name} {seed}")))

    def _requests(self, rng: random.Random) -> Iterator[SimRequest]:
        wobble = _Wobble(rng)
        now_s = rng.expovariate(self.peak)
        while now_s < self.length_s:
            if rng.random() * self.peak < self.rate(now_s) * wobble.at(now_s):
                second = rng.random() < self.share(now_s)
                yield _request(now_s, self.mixes[second], rng)
            now_s += rng.expovariate(self.peak)


class _Wobble:
    """Slow noise on the rate, which Poisson arrivals alone lack: some minutes are busier than
    others, with a standard deviation of a tenth."""

    STEP_S, MEMORY, WIDTH, MOST = 20.0, 0.9, 0.1, 1.3

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._until_s = 0.0
        self._value = 0.0

    def at(self, time_s: float) -> float:
        while self._until_s <= time_s:
            fresh = self.WIDTH * math.sqrt(1 - self.MEMORY**2)
            self._value = self.MEMORY * self._value + self._rng.gauss(0.0, fresh)
            self._until_s += self.STEP_S
        return min(self.MOST, 1.0 + self._value)


def _request(at_s: float, mix: Mix, rng: random.Random) -> SimRequest:
    prompt = _length(rng, mix.prompt, mix.prompt_sigma, PROMPT_TOKENS)
    cached = int(prompt * mix.cached) if rng.random() < mix.next_turns else 0
    output = _length(rng, mix.output, mix.output_sigma, OUTPUT_TOKENS)
    return SimRequest(at_s, prompt, prompt - cached, output)


def _length(rng: random.Random, mean: float, sigma: float, bounds: tuple[int, int]) -> int:
    """Draw a log-normal length with the given mean, limited to `bounds`."""
    drawn = rng.lognormvariate(math.log(mean) - sigma * sigma / 2.0, sigma)
    return min(bounds[1], max(bounds[0], round(drawn)))


CHAT = Mix(prompt=3000.0, output=700.0)
PROMPT_HEAVY = Mix(prompt=4000.0, output=120.0)
ANSWER_HEAVY = Mix(prompt=900.0, output=900.0)


def loads(*, quick: bool) -> tuple[Load, ...]:
    """All loads. The quick ones are shorter."""
    return (day(2.0 if quick else 4.0), shift(quick=quick), burst(quick=quick), steady(quick=quick))


def day(hours: float) -> Load:
    """A day compressed into `hours`: night, morning rise, lunch dip, evening peak."""
    length_s = hours * HOUR_S

    def rate(now_s: float) -> float:
        hour = 24.0 * now_s / length_s
        return 1.5 + 10.0 * _hill(hour, 10.5, 2.6) + 13.5 * _hill(hour, 19.0, 2.4)

    return _alike("day", f"24 hours in {hours:g}: 1.5 to 15 requests/s", length_s, 15.0, rate)


def shift(*, quick: bool) -> Load:
    """A constant rate. Within five minutes in the middle, prompts become short and answers long."""
    length_s = (0.75 if quick else 1.0) * HOUR_S

    def share(now_s: float) -> float:
        return min(1.0, max(0.0, (now_s - length_s / 2.0) / 300.0 + 0.5))

    return Load(
        "shift",
        "10 requests/s, prompt-heavy, in the middle answer-heavy",
        length_s,
        10.0 * _Wobble.MOST,
        lambda now_s: 10.0,
        (PROMPT_HEAVY, ANSWER_HEAVY),
        share,
        {"prefill": 6, "decode": 2},
    )


def burst(*, quick: bool) -> Load:
    """The rate rises tenfold within 30 s, and stays there for ten minutes."""
    before_s, high_s, after_s = (600.0, 600.0, 900.0) if quick else (1200.0, 600.0, 2400.0)

    def rate(now_s: float) -> float:
        up = min(1.0, max(0.0, (now_s - before_s) / 30.0))
        down = min(1.0, max(0.0, (now_s - before_s - high_s) / 30.0))
        return 1.4 + 12.6 * (up - down)

    length_s = before_s + high_s + after_s
    return _alike("burst", "1.4 requests/s, x10 for ten minutes", length_s, 14.0, rate)


def steady(*, quick: bool) -> Load:
    """A constant rate with noise."""
    length_s = (0.75 if quick else 1.0) * HOUR_S
    what = "7 requests/s, and noise"
    return _alike("steady", what, length_s, 7.0, lambda now_s: 7.0, {"prefill": 3, "decode": 4})


def _alike(
    name: str,
    what: str,
    length_s: float,
    peak: float,
    rate: Callable[[float], float],
    initial: Mapping[Role, int] | None = None,
) -> Load:
    """A load of chat requests only."""
    first = initial or {"prefill": 1, "decode": 1}
    most = peak * _Wobble.MOST
    return Load(name, what, length_s, most, rate, (CHAT, CHAT), lambda now_s: 0.0, first)


def _hill(hour: float, middle: float, width: float) -> float:
    """A bell curve with maximum 1 at `middle`, periodic over 24 hours."""
    away = min(abs(hour - middle), 24.0 - abs(hour - middle))
    return math.exp(-((away / width) ** 2))

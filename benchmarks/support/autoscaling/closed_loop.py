"""Runs an autoscaler on a simulated pool, and measures users' latencies and the cost.

A request attains its targets if its time to the first token and its mean time between tokens are
both within them; a request that never ends does not. GPU time counts until the load ends.
Unfinished requests are then still served, with the autoscaler active, and count for attainment.

In: a load, a seed, an autoscaler. Out: an `Outcome`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton_operator.autoscaling.planner.inputs import Capability
from baton_protocol.store import ROLES, Role
from benchmarks.support.autoscaling.load_profiles import HOUR_S, Load
from benchmarks.support.autoscaling.pool_model import Pool
from benchmarks.support.autoscaling.pool_nodes import Answer, SimRequest
from benchmarks.support.autoscaling.pool_observer import Observer, Sight
from benchmarks.support.autoscaling.reference_autoscalers import Counts, Scaler, Static
from benchmarks.support.figures import percentile

PATIENCE_S = HOUR_S  # limit for serving requests that are unfinished at the load's end
TTFT_WINDOW_S = 300.0
TTFT_LEAST = 20  # a window needs this many requests for a percentile


@dataclass(frozen=True, slots=True)
class Targets:
    ttft_s: float = 2.0
    itl_s: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a run. `both`, `ttft` and `itl` are the shares of requests that attain these
    targets; `worst_ttft_s` is the highest p99 among five-minute windows of arrivals."""

    requests: int
    both: float
    ttft: float
    itl: float
    gpu_hours: float
    by_role: dict[Role, float]
    actions: int  # changes of a role's count
    reversals: int  # of these, up after down or down after up
    worst_ttft_s: float
    most_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The inputs of a run, except the autoscaler."""

    load: Load
    seed: int
    requests: Sequence[SimRequest]
    truth: Capability
    targets: Targets
    sight: Sight

    def run(self, scaler: Scaler, initial: Counts | None = None) -> Outcome:
        begin = self.load.initial if initial is None else initial
        pool = Pool(self.truth, random.Random(f"starts {self.seed}"), self.requests, begin)
        observer = Observer(pool, random.Random(f"sight {self.seed}"), self.sight)
        history: list[Counts] = [dict(begin)]
        while not self._over(pool):
            next_s = len(history) * self.sight.tick_s
            pool.run_until(next_s - self.sight.delay_s)
            observer.gather()
            pool.run_until(next_s)
            wanted = scaler.decide(observer.situation())
            history.append(dict(wanted))
            pool.scale(wanted)
        return self._outcome(pool, history)

    def static(self, counts: Counts) -> Outcome:
        return self.run(Static(counts), counts)

    def _over(self, pool: Pool) -> bool:
        length_s = self.load.length_s
        if pool.now_s < length_s:
            return False
        return pool.live == 0 or pool.now_s > length_s + PATIENCE_S

    def _outcome(self, pool: Pool, history: Sequence[Counts]) -> Outcome:
        fast = [_within(one.ttft_s, self.targets.ttft_s) for one in pool.answers]
        fluent = [_within(one.itl_s, self.targets.itl_s) for one in pool.answers]
        length_s, total = self.load.length_s, max(1, len(pool.answers))
        by_role = {role: pool.gpu_s(role, length_s) / HOUR_S for role in ROLES}
        during = history[: int(length_s // self.sight.tick_s) + 1]
        changes = {role: _changes(one[role] for one in during) for role in ROLES}
        return Outcome(
            requests=len(pool.answers),
            both=sum(a and b for a, b in zip(fast, fluent, strict=True)) / total,
            ttft=sum(fast) / total,
            itl=sum(fluent) / total,
            gpu_hours=sum(by_role.values()),
            by_role=by_role,
            actions=sum(map(len, changes.values())),
            reversals=sum(map(_reversals, changes.values())),
            worst_ttft_s=_worst_ttft(pool.answers, pool.now_s),
            most_nodes=max(sum(one.values()) for one in during),
        )


def _within(time_s: float | None, target_s: float) -> bool:
    return time_s is not None and time_s <= target_s


def _changes(counts: Iterable[int]) -> list[int]:
    return [after - before for before, after in pairwise(counts) if after != before]


def _reversals(changes: Sequence[int]) -> int:
    return sum(a * b < 0 for a, b in pairwise(changes))


def _worst_ttft(answers: Sequence[Answer], now_s: float) -> float:
    """The highest p99 of TTFT among windows; a request without a first token counts as waiting
    until `now_s`."""
    windows: dict[int, list[float]] = {}
    for answer in answers:
        waited_s = now_s - answer.request.at_s if answer.ttft_s is None else answer.ttft_s
        windows.setdefault(int(answer.request.at_s // TTFT_WINDOW_S), []).append(waited_s)
    return max(
        (percentile(times, 0.99) for times in windows.values() if len(times) >= TTFT_LEAST),
        default=0.0,
    )

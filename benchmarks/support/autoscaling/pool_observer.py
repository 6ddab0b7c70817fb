"""What an autoscaler gets to see of a simulated pool: late, noisy, and sometimes nothing at all.

Metrics are gathered `delay_s` before each tick. A share `dropped` of the gatherings fails: then the
tick sees the last one that did not, as old as it is. The list of nodes is the cluster's and always
current; that a node is ready is seen with its first report. What one node can do is the start's
own measurement at first, 15 % too careful, and once nodes have made enough steps right to a few
percent.

In: the pool, between its events. Out: a `PoolObservation`.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from dataclasses import dataclass, replace

from baton_operator.autoscaling.planner.inputs import (
    Capability,
    Demand,
    ObservedNode,
    Phase,
    PoolObservation,
)
from baton_protocol.store import ROLES
from benchmarks.support.autoscaling.pool_model import Pool
from benchmarks.support.autoscaling.pool_nodes import DecodeNode, Node, PrefillNode
from benchmarks.support.figures import percentile

PERCENTILE = 0.95  # of the measured times
PRIOR_ERROR = 0.15
LEARNT_ERROR = 0.03
LEARNT_STEPS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How well the pool is seen."""

    tick_s: float = 15.0
    window_s: float = 60.0
    delay_s: float = 3.0
    noise: float = 0.02  # standard deviation of each measured rate, as a share of it
    dropped: float = 0.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters as of a moment: a window's rates are the difference of two."""

    at_s: float
    requests: int = 0
    prompt: int = 0
    uncached: int = 0
    output: float = 0.0
    started: int = 0
    finished: int = 0


class Observer:
    """Call `gather` before and `situation` at each tick."""

    def __init__(self, pool: Pool, rng: random.Random, sight: Sight) -> None:
        self._pool = pool
        self._rng = rng
        self._sight = sight
        self._totals: deque[Totals] = deque([Totals(0.0)])
        self._busy: dict[str, tuple[float, float]] = {}  # time, and seconds of work until then
        self._gauges: dict[str, ObservedNode] = {}
        self._demand: Demand | None = None
        self._gathered_s = 0.0
        self._error = {name: rng.gauss(0.0, LEARNT_ERROR) for name in ("prefill", "decode")}

    def gather(self) -> None:
        """As of now, unless it fails."""
        totals = self._count()
        self._totals.append(totals)
        while self._totals[1].at_s <= totals.at_s - self._sight.window_s:
            self._totals.popleft()
        if self._rng.random() < self._sight.dropped:
            return
        pool, self._gathered_s = self._pool, self._pool.now_s
        self._demand = self._measure(self._totals[0], totals)
        self._gauges = {
            node.name: self._gauge(node)
            for role in ROLES
            for node in pool.nodes(role)
            if node.phase is not Phase.STARTING
        }

    def situation(self) -> PoolObservation:
        """As of now."""
        pool = self._pool
        age_s = pool.now_s - self._gathered_s
        return PoolObservation(
            at_s=pool.now_s,
            nodes=tuple(self._view(node, age_s) for role in ROLES for node in pool.nodes(role)),
            current_replicas=dict(pool.desired),
            demand=None if self._demand is None else replace(self._demand, age_s=age_s),
            capability=self._capability(),
        )

    def _count(self) -> Totals:
        pool, last = self._pool, self._totals[-1]
        arrived = [answer.request for answer in pool.answers[last.requests :]]
        return Totals(
            at_s=pool.now_s,
            requests=len(pool.answers),
            prompt=last.prompt + sum(request.prompt for request in arrived),
            uncached=last.uncached + sum(request.uncached for request in arrived),
            output=pool.generated(),
            started=len(pool.started),
            finished=len(pool.finished),
        )

    def _measure(self, then: Totals, now: Totals) -> Demand:
        pool, window_s = self._pool, now.at_s - then.at_s
        ttfts = [one.ttft_s for one in pool.started[then.started : now.started]]
        itls = [one.itl_s for one in pool.finished[then.finished : now.finished]]
        return Demand(
            window_s=window_s,
            age_s=0.0,
            requests=self._noisy((now.requests - then.requests) / window_s),
            prompt_tokens=self._noisy((now.prompt - then.prompt) / window_s),
            uncached_prompt_tokens=self._noisy((now.uncached - then.uncached) / window_s),
            output_tokens=self._noisy((now.output - then.output) / window_s),
            live_requests=sum(len(node.batch) + len(node.waiting) for node in pool.decode),
            live_kv_tokens=round(sum(node.kv for node in pool.decode)),
            held=len(pool.held),
            idle_s=now.at_s - (pool.answers[-1].request.at_s if pool.answers else 0.0),
            ttft_s=_slowest(ttfts),
            itl_s=_slowest(itls),
        )

    def _noisy(self, rate: float) -> float:
        return max(0.0, rate * self._rng.gauss(1.0, self._sight.noise))

    def _gauge(self, node: Node) -> ObservedNode:
        now_s = self._pool.now_s
        view = ObservedNode(
            name=node.name, role=node.role, phase=node.phase, busy=self._share(node)
        )
        if isinstance(node, PrefillNode):
            return replace(
                view,
                queued_tokens=round(node.queue_s(now_s) * node.truth.prefill_tokens),
                running=min(1, node.known),
                waiting=max(0, node.known - 1),
            )
        return replace(
            view,
            running=len(node.batch),
            waiting=len(node.waiting),
            kv_tokens=round(node.kv),
            kv_capacity=node.truth.kv_capacity,
        )

    def _share(self, node: Node) -> float:
        """Of the time since the last look that the node's engine was at work."""
        now_s = self._pool.now_s
        work_s = node.worked_s if isinstance(node, DecodeNode) else node.busy_s(now_s)
        then_s, before_s = self._busy.get(node.name, (node.born_s, 0.0))
        self._busy[node.name] = (now_s, work_s)
        return min(1.0, (work_s - before_s) / max(now_s - then_s, 1e-9))

    def _view(self, node: Node, age_s: float) -> ObservedNode:
        now_s, known = self._pool.now_s, self._gauges.get(node.name)
        if known is None:
            since_s = now_s - node.born_s
            return ObservedNode(
                name=node.name, role=node.role, phase=Phase.STARTING, since_s=since_s
            )
        return replace(known, phase=node.phase, since_s=now_s - node.since_s, age_s=age_s)

    def _capability(self) -> Capability:
        truth, steps = self._pool.truth, int(self._pool.steps())
        if steps < LEARNT_STEPS:
            slower, faster, steps = 1.0 + PRIOR_ERROR, 1.0 - PRIOR_ERROR, 0
        else:
            slower, faster = 1.0 + self._error["decode"], 1.0 + self._error["prefill"]
        starts_s = self._pool.starts_s
        return replace(
            truth,
            prefill_tokens=truth.prefill_tokens * faster,
            step_base_s=truth.step_base_s * slower,
            step_per_seq_s=truth.step_per_seq_s * slower,
            step_per_kv_token_s=truth.step_per_kv_token_s * slower,
            start_s=statistics.fmean(starts_s) if starts_s else truth.start_s,
            samples=steps,
        )


def _slowest(times_s: list[float | None]) -> float | None:
    known = [time_s for time_s in times_s if time_s is not None]
    return percentile(known, PERCENTILE) if known else None

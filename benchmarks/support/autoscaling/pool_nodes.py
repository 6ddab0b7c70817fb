"""Nodes of a simulated pool: the durations of prompts and answers, in closed form.

A prefill node computes prompts one after another, at `prefill_tokens` uncached tokens per second.

A decode node generates in one batch. With b sequences that hold K tokens of KV a step takes
`base + b * per_seq + K * per_kv_token`, and gives each sequence one token, so K grows by b per
step. Between two changes of the batch, x steps therefore take

    t(x) = (base + b * per_seq + K * per_kv_token) * x  +  (b * per_kv_token / 2) * x^2

which is solved for x (the batch's progress) and for t (the end of the next sequence). The number of
steps is continuous, which is wrong by less than one step at either end of an answer. A request
joins the batch when the KV that it will have at its end fits beside that of all others. So nothing
is ever preempted, at the cost of about half an answer's length of capacity per sequence.

In: requests and times. Out: the ends of prompts and answers, and the gauges that a node reports.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from baton_operator.autoscaling.planner.inputs import Capability, Phase
from baton_protocol.store import Role

# Tolerance for rounding, in steps: a day has at most 1e7 steps, and a float has 16 digits.
WHOLE = 1e-6


class SimRequest(NamedTuple):
    """One request of a load. Lengths are in tokens; `uncached` tokens of the prompt must be
    computed."""

    at_s: float
    prompt: int
    uncached: int
    output: int


@dataclass(slots=True, eq=False)
class Answer:
    """The outcome of a request. `ends` counts its ends, so that tests can check for just one."""

    request: SimRequest
    first_s: float | None = None
    end_s: float | None = None
    ends: int = 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.request.at_s

    @property
    def itl_s(self) -> float | None:
        """The mean seconds per token after the first, including the wait for the batch."""
        if self.first_s is None or self.end_s is None:
            return None
        return (self.end_s - self.first_s) / (self.request.output - 1)


@dataclass(slots=True, eq=False)
class Life:
    """The base of both kinds of node."""

    name: str
    born_s: float
    truth: Capability
    phase: Phase = Phase.STARTING
    since_s: float = 0.0
    gone_s: float | None = None

    def enter(self, phase: Phase, now_s: float) -> None:
        self.phase, self.since_s = phase, now_s

    def gpu_s(self, until_s: float) -> float:
        """Seconds of GPU time from the node's creation until it is gone, or until `until_s`."""
        end = until_s if self.gone_s is None else min(self.gone_s, until_s)
        return max(0.0, end - self.born_s)


@dataclass(slots=True, eq=False)
class PrefillNode(Life):
    known: int = 0  # prompts that the node has and has not finished
    free_s: float = 0.0  # the time when the last of them is done
    work_s: float = 0.0  # total work that the node was ever given
    role: Role = "prefill"

    def take(self, uncached: int, now_s: float) -> float:
        """Take a prompt, and return the time when it is done."""
        work = uncached / self.truth.prefill_tokens
        self.known += 1
        self.work_s += work
        self.free_s = max(now_s, self.free_s) + work
        return self.free_s

    def queue_s(self, now_s: float) -> float:
        return max(0.0, self.free_s - now_s)

    def busy_s(self, now_s: float) -> float:
        """Seconds of computation so far."""
        return self.work_s - self.queue_s(now_s)

    @property
    def empty(self) -> bool:
        return self.known == 0


@dataclass(slots=True, eq=False)
class DecodeNode(Life):
    turn: int = 0  # counts changes of the batch: ends scheduled before the last one are void
    at_s: float = 0.0
    steps: float = 0.0
    tokens: float = 0.0
    kv: float = 0.0
    reserved: int = 0  # of the batch, at its end
    promised: int = 0  # the same, with those that wait
    worked_s: float = 0.0
    batch: list[tuple[float, int, Answer]] = field(default_factory=list)
    waiting: deque[Answer] = field(default_factory=deque)
    role: Role = "decode"

    @property
    def step_s(self) -> float:
        truth = self.truth
        return (
            truth.step_base_s
            + len(self.batch) * truth.step_per_seq_s
            + self.kv * truth.step_per_kv_token_s
        )

    def advance(self, now_s: float) -> None:
        """Advance the unchanged batch to `now_s`."""
        passed, self.at_s = now_s - self.at_s, now_s
        b = len(self.batch)
        if not b or passed <= 0.0:
            return
        step, bend = self.step_s, b * self.truth.step_per_kv_token_s
        # This form of the root stays exact if bend is 0 or tiny.
        steps = 2.0 * passed / (step + math.sqrt(step * step + 2.0 * bend * passed))
        self.steps += steps
        self.tokens += b * steps
        self.kv += b * steps
        self.worked_s += passed

    def next_end_s(self) -> float:
        """The time when the batch's next sequence ends. The batch must not be empty."""
        left = max(0.0, self.batch[0][0] - self.steps)
        bend = len(self.batch) * self.truth.step_per_kv_token_s
        return self.at_s + left * (self.step_s + bend * left / 2.0)

    def take(self, answer: Answer) -> None:
        self.promised += _kv_at_end(answer.request)
        self.waiting.append(answer)

    def admit(self) -> None:
        """Admit waiting requests in order until one does not fit. Call `advance` first."""
        capacity = self.truth.kv_capacity
        while self.waiting:
            need = _kv_at_end(self.waiting[0].request)
            if self.batch and capacity is not None and self.reserved + need > capacity:
                return
            answer = self.waiting.popleft()
            self.turn += 1
            self.reserved += need
            self.kv += answer.request.prompt + 1
            end = self.steps + answer.request.output - 1
            heapq.heappush(self.batch, (end, self.turn, answer))

    def ended(self) -> list[Answer]:
        """Remove and return the sequences that have all their tokens. Call `advance` first."""
        done = []
        while self.batch and self.batch[0][0] <= self.steps + WHOLE:
            answer = heapq.heappop(self.batch)[2]
            need = _kv_at_end(answer.request)
            self.reserved -= need
            self.promised -= need
            self.kv -= need
            done.append(answer)
        self.turn += 1
        if not self.batch:
            self.kv = 0.0  # remove rounding errors
        return done

    @property
    def empty(self) -> bool:
        return not self.batch and not self.waiting


Node = PrefillNode | DecodeNode


def _kv_at_end(request: SimRequest) -> int:
    return request.prompt + request.output

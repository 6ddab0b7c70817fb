"""A simulated pool for tests of the planner in a closed loop, on its own clock. It has nodes that
start and drain, a queue of prompt tokens, and decode batches by Little's law.

In: requests per second and decisions. Out: a planner's observations. Requests arrive as a Poisson
process with prompts and answers of exponential length, so each observed window is different.
`random` is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from baton_operator.autoscaling.planner.inputs import (
    Capability,
    Demand,
    ObservedNode,
    Phase,
    PoolObservation,
)
from baton_operator.autoscaling.planner.plan import Decision
from baton_protocol.store import ROLES, Role
from tests.support.planner.builders import ANSWER, NODE, PROMPT, step_s

TICK_S = 15.0
WINDOW_S = 30.0


@dataclass
class Plant:
    random: Random
    node: Capability = NODE
    drain_s: float = 40.0
    at_s: float = 0.0
    views: list[ObservedNode] = field(default_factory=list)
    desired: dict[Role, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    queued: float = 0.0
    held: float = 0.0
    idle_s: float = 0.0
    num_started: int = 0
    recent: list[tuple[float, float, float]] = field(default_factory=list)

    def begin(self, prefill: int, decode: int) -> Plant:
        """Start with ready nodes, and return this plant."""
        self.desired = {"prefill": prefill, "decode": decode}
        self._follow()
        self.views = [replace(node, phase=Phase.READY, since_s=3_600.0) for node in self.views]
        return self

    def observe(self, requests: float, answer: float = ANSWER) -> PoolObservation:
        """Simulate node tick of load, and return the observation after it."""
        self._age()
        count, prompts, answers = self._arrivals(requests, answer)
        ready = self._ready("prefill")
        computed = len(ready) * self.node.prefill_tokens * TICK_S
        self.idle_s = 0.0 if count else self.idle_s + TICK_S
        if not self._ready("decode"):
            self.held += count
        else:
            self.queued, self.held = self.queued + self.held * PROMPT, 0.0
        self.queued = max(0.0, self.queued + prompts - computed)
        self.recent = [*self.recent, (count, prompts, answers)][-round(WINDOW_S / TICK_S) :]
        return self._observation()

    def act(self, decision: Decision) -> None:
        self.desired = {"prefill": decision.prefill, "decode": decision.decode}
        self._follow()

    def _arrivals(self, requests: float, answer: float) -> tuple[float, float, float]:
        count = 0
        next_arrival_s = self.random.expovariate(requests) if requests else TICK_S
        prompts = answers = 0.0
        while next_arrival_s < TICK_S:
            count += 1
            prompts += self.random.expovariate(1.0 / PROMPT)
            answers += self.random.expovariate(1.0 / answer)
            next_arrival_s += self.random.expovariate(requests)
        return float(count), prompts, answers

    def _age(self) -> None:
        self.at_s += TICK_S
        aged = []
        for node in self.views:
            node = replace(node, since_s=node.since_s + TICK_S)
            if node.phase == Phase.STARTING and node.since_s >= self.node.start_s:
                node = replace(node, phase=Phase.READY, since_s=0.0)
            if node.phase != Phase.DRAINING or node.since_s < self.drain_s:
                aged.append(node)
        self.views = aged

    def _follow(self) -> None:
        """Start new nodes, or drain the youngest, to get the desired numbers."""
        for role in ROLES:
            alive = [
                node for node in self.views if node.role == role and node.phase != Phase.DRAINING
            ]
            for node in alive[self.desired[role] :]:
                at = self.views.index(node)
                self.views[at] = replace(node, phase=Phase.DRAINING, since_s=0.0)
            for _ in range(self.desired[role] - len(alive)):
                self.num_started += 1
                name = f"{role}-{self.num_started}"
                self.views.append(ObservedNode(name=name, role=role, phase=Phase.STARTING))

    def _ready(self, role: Role) -> list[ObservedNode]:
        return [node for node in self.views if node.role == role and node.phase == Phase.READY]

    def _observation(self) -> PoolObservation:
        seconds = TICK_S * len(self.recent)
        count, prompts, answers = (
            sum(column) / seconds for column in zip(*self.recent, strict=True)
        )
        prefill, decode = max(1, len(self._ready("prefill"))), max(1, len(self._ready("decode")))
        context = PROMPT + answers / count / 2.0 if count else 0.0
        itl_s = step_s(answers / decode, context)
        live = round(answers * itl_s)
        wait_s = self.queued / prefill / self.node.prefill_tokens
        demand = Demand(
            window_s=WINDOW_S,
            age_s=0.0,
            requests=count,
            prompt_tokens=prompts,
            uncached_prompt_tokens=prompts,
            output_tokens=answers,
            live_requests=live,
            live_kv_tokens=round(live * context),
            held=round(self.held),
            idle_s=self.idle_s,
            ttft_s=wait_s + 2.0 * PROMPT / self.node.prefill_tokens,
            itl_s=itl_s,
        )
        busy = min(1.0, prompts / prefill / self.node.prefill_tokens)
        views = tuple(
            replace(
                node,
                age_s=0.0,
                queued_tokens=round(self.queued / prefill) if node.role == "prefill" else 0,
                running=live // decode if node.role == "decode" else 0,
                waiting=0,
                kv_tokens=round(live * context / decode) if node.role == "decode" else 0,
                busy=busy if node.role == "prefill" else 0.5,
            )
            if node.phase == Phase.READY
            else node
            for node in self.views
        )
        return PoolObservation(
            at_s=self.at_s,
            nodes=views,
            current_replicas=dict(self.desired),
            demand=demand,
            capability=self.node,
        )

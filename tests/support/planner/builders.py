"""Makes consistent observations of a pool for planner tests: nodes, demand and gauges.

In: the numbers of nodes and requests. Out: a `PoolObservation` whose gauges follow from the load
model, so a test sets only the values that it is about.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton_operator.autoscaling.planner.inputs import (
    AutoscalingPolicy,
    Capability,
    Demand,
    ObservedNode,
    Phase,
    PoolObservation,
    ReplicaRange,
)
from baton_operator.autoscaling.planner.memory import PastRecommendation, PlannerMemory
from baton_operator.autoscaling.planner.plan import Decision, plan_replicas
from baton_protocol.store import NodeLoad, NodeReport, Role, Speeds
from tests.support.nodes.fake_node import make_report

# A node computes 10,000 prompt tokens/s. A decode step takes 10 ms, and 0.2 ms per request of 1,000
# tokens, so 200 requests have an ITL of 50 ms.
NODE = Capability(
    prefill_tokens=10_000.0,
    step_base_s=0.010,
    step_per_seq_s=0.0001,
    step_per_kv_token_s=1e-7,
    kv_capacity=400_000,
    start_s=60.0,
)
POLICY = AutoscalingPolicy(
    ranges={"prefill": ReplicaRange(max_replicas=20), "decode": ReplicaRange(max_replicas=20)}
)
SPEEDS = Speeds(prefill_tokens_per_s=1000.0, decode_step_ms=20.0)
PROMPT, ANSWER = 900.0, 200.0
CONTEXT = PROMPT + ANSWER / 2.0
NOW = 10_000.0


def bounded(prefill: tuple[int, int], decode: tuple[int, int], **changes: Any) -> AutoscalingPolicy:
    """POLICY with these minima and maxima of nodes."""
    bounds: dict[Role, ReplicaRange] = {
        "prefill": ReplicaRange(min_replicas=prefill[0], max_replicas=prefill[1]),
        "decode": ReplicaRange(min_replicas=decode[0], max_replicas=decode[1]),
    }
    return replace(POLICY, ranges=bounds, **changes)


def demand(requests: float, decode: int = 2, answer: float = ANSWER, **changes: Any) -> Demand:
    """The demand of `requests` requests per second, each with a prompt of PROMPT uncached tokens
    and an answer of `answer` tokens, spread over `decode` decode nodes."""
    output = requests * answer
    context = PROMPT + answer / 2.0
    live = round(output * step_s(output / max(1, decode), context))
    fields: dict[str, Any] = {
        "window_s": 30.0,
        "age_s": 1.0,
        "requests": requests,
        "prompt_tokens": requests * PROMPT,
        "uncached_prompt_tokens": requests * PROMPT,
        "output_tokens": output,
        "live_requests": live,
        "live_kv_tokens": round(live * context),
        "held": 0,
        "idle_s": 0.0 if requests else 1_000.0,
        "ttft_s": 0.2,
        "itl_s": 0.02,
    }
    return Demand(**(fields | changes))


def step_s(tokens_per_s: float, context: float) -> float:
    """The seconds of a decode step of a node that generates `tokens_per_s`, at 90 % of its capacity
    at most."""
    each = NODE.step_per_seq_s + context * NODE.step_per_kv_token_s
    return NODE.step_base_s / max(0.1, 1.0 - tokens_per_s * each)


def node(role: Role, number: int, phase: Phase = Phase.READY, **changes: Any) -> ObservedNode:
    fields: dict[str, Any] = {
        "since_s": 3_600.0,
        "age_s": 1.0 if phase == Phase.READY else None,
        "queued_tokens": 0,
        "running": 0,
        "waiting": 0,
        "kv_tokens": 0,
        "kv_capacity": NODE.kv_capacity,
        "busy": 0.0,
    }
    return ObservedNode(name=f"{role}-{number}", role=role, phase=phase, **(fields | changes))


def nodes(served: Demand, prefill: int, decode: int) -> tuple[ObservedNode, ...]:
    """Ready nodes that share the demand evenly."""
    busy = min(1.0, (served.uncached_prompt_tokens or 0.0) / NODE.prefill_tokens / max(1, prefill))
    running = (served.live_requests or 0) // max(1, decode)
    kv = (served.live_kv_tokens or 0) // max(1, decode)
    return (
        *(node("prefill", i, busy=busy) for i in range(prefill)),
        *(node("decode", i, running=running, kv_tokens=kv) for i in range(decode)),
    )


def observed_pool(
    prefill: int = 2, decode: int = 2, requests: float = 10.0, **changes: Any
) -> PoolObservation:
    """A pool with as many ready nodes as it should have."""
    given = changes.pop("demand", demand(requests, decode))
    fields: dict[str, Any] = {
        "at_s": NOW,
        "nodes": nodes(given or demand(requests, decode), prefill, decode),
        "current_replicas": {"prefill": prefill, "decode": decode},
        "demand": given,
        "capability": NODE,
    }
    return PoolObservation(**(fields | changes))


def memory_of_needs(prefill: int = 0, decode: int = 0, seconds: float = 3_600.0) -> PlannerMemory:
    """The memory of an operator that has observed the pool for `seconds`, and always needed these
    nodes."""
    needs = tuple(
        PastRecommendation(at_s=NOW - before, prefill=prefill, decode=decode)
        for before in range(600, 0, -15)
        if before <= seconds
    )
    return PlannerMemory(since_s=NOW - seconds, recommendations=needs)


def decide(
    observation: PoolObservation,
    policy: AutoscalingPolicy = POLICY,
    memory: PlannerMemory | None = None,
) -> Decision:
    """Return the planner's decision; without `memory`, that of an operator that has needed no nodes
    for an hour."""
    return plan_replicas(observation, policy, memory_of_needs() if memory is None else memory)[0]


def node_report(name: str = "d", role: Role = "decode", **load: Any) -> NodeReport:
    """The report of a node with SPEEDS and room for 100 blocks."""
    return make_report(name, role, speeds=SPEEDS, load=NodeLoad(total_blocks=100, **load))

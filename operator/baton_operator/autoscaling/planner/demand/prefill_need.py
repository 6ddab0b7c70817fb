"""How many prefill nodes the prompts need.

In: the outlook, a node's speed, the starting nodes. Out: a `Need`. A prompt that takes S seconds on
an idle node may wait `ttft - S`; `queueing` computes the number of nodes that achieves this for the
required share of prompts. Queued prompts count only if they would still wait once a new node
serves, because a queue that shrinks by itself needs no node.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_operator.autoscaling.planner.demand.forecast import Outlook
from baton_operator.autoscaling.planner.demand.queueing import servers_for
from baton_operator.autoscaling.planner.node_counts import RoleCounts
from baton_operator.autoscaling.planner.records import Capability, Policy

# Where a prompt alone takes longer than the target, the wait is kept to this share of the target.
PATIENCE = 0.25
# The rest of a queue may take this many start times to shrink.
WORK_OFF = 1.0 / 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Nodes of a role. `least` meets the targets with half of the headroom: fewer are too few.
    `good` keeps all of the headroom and is requested. Between the two nothing changes. `now` and
    `ahead` are the `least` for demand alone, now and after the start time."""

    now: int
    ahead: int
    least: int
    good: int
    reachable: bool
    text: str
    numbers: dict[str, float]


def prefill_need(
    outlook: Outlook, fleet: RoleCounts, capability: Capability, policy: Policy
) -> Need:
    """`outlook.prompt` must be known."""
    speed = capability.prefill_tokens
    now, ahead = outlook.prompt or 0.0, outlook.prompt_ahead or 0.0
    service_s = (outlook.prompt_mean or 0.0) / speed
    left = backlog(outlook, fleet, capability)
    rate = ahead + left / (WORK_OFF * max(capability.start_s, policy.ttft_s))
    wait_s = max(policy.ttft_s - service_s, PATIENCE * policy.ttft_s)

    def nodes(tokens: float, free: float) -> int:
        return servers_for(tokens / (speed * (1.0 - free)), service_s, wait_s, policy.percentile)

    good = nodes(rate, policy.headroom)
    reachable = service_s < policy.ttft_s
    return Need(
        now=nodes(now, policy.headroom / 2.0),
        ahead=nodes(ahead, policy.headroom / 2.0),
        least=nodes(rate, policy.headroom / 2.0),
        good=good,
        reachable=reachable,
        text=_text(outlook, left, capability, policy, good, reachable),
        numbers={
            "prefill_tokens_per_s": now,
            "prefill_tokens_per_s_ahead": ahead,
            "prefill_backlog_tokens": left,
            "prefill_node_tokens_per_s": speed,
            "prefill_prompt_s": service_s,
            "prefill_needed": good,
        },
    )


def backlog(outlook: Outlook, fleet: RoleCounts, capability: Capability) -> float:
    """Prompt tokens that would still be queued once a new node serves. Until then the ready nodes
    compute, and the starting ones as soon as they are up."""
    horizon = capability.start_s
    done_s = len(fleet.ready) * horizon
    for node in fleet.coming:
        done_s += min(node.since_s, horizon)
    return max(
        0.0, outlook.queued + (outlook.prompt or 0.0) * horizon - done_s * capability.prefill_tokens
    )


def _text(
    outlook: Outlook,
    left: float,
    capability: Capability,
    policy: Policy,
    good: int,
    reachable: bool,
) -> str:
    parts = [f"{outlook.prompt or 0.0:,.0f} uncached prompt tokens/s"]
    if (outlook.prompt_ahead or 0.0) > 1.01 * (outlook.prompt or 0.0):
        parts.append(f"{outlook.prompt_ahead:,.0f} predicted in {capability.start_s:.0f} s")
    if left > 0.0:
        parts.append(f"{left:,.0f} tokens would still be queued then")
    parts.append(f"a node computes {capability.prefill_tokens:,.0f} tokens/s")
    if not reachable:
        alone = (outlook.prompt_mean or 0.0) / capability.prefill_tokens
        parts.append(
            f"a single prompt takes {alone:.2f} s, which exceeds the TTFT target of "
            f"{policy.ttft_s:g} s with any number of nodes"
        )
    parts.append(f"{good} needed for TTFT {policy.ttft_s:g} s")
    return ", ".join(parts)

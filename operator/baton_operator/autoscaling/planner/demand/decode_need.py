"""How many decode nodes the answers need.

In: the outlook and what a decode step takes. Out: a `Need`.

A step over a batch of b requests with k tokens of KV each takes s = base + b c, c = per_seq + k
per_kv_token. By Little's law a node that gives r tokens/s has a batch b = r s, so

    b = r base / (1 - r c)        s = base / (1 - r c)

and the step meets the ITL target t while r <= (1 - base / t) / c. The need is the smallest n for
which each node's share of the output stays below this rate with headroom, the KV of its batch fits,
and its share of the live requests fits too. The live requests matter when nodes are full and
produce less than clients request. A request that waits for a prefill node counts if prefill nodes
can deliver it before the requests live now have ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from baton_operator.autoscaling.planner.demand.forecast import Outlook
from baton_operator.autoscaling.planner.demand.prefill_need import PATIENCE, Need
from baton_operator.autoscaling.planner.demand.queueing import MOST
from baton_operator.autoscaling.planner.node_counts import RoleCounts
from baton_operator.autoscaling.planner.records import Capability, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """A decode step of requests with the same context. `target_s` is the ITL target, or if it is
    out of reach slightly more than the step of a single request."""

    base_s: float
    each_s: float
    context: float
    capacity: float | None
    target_s: float

    @property
    def most_tokens_per_s(self) -> float:
        """Output tokens per second of a node that meets the target."""
        if self.each_s <= 0.0:
            return float("inf")
        return (1.0 - self.base_s / self.target_s) / self.each_s

    @property
    def most_live(self) -> float:
        """Requests in a batch that meets the target."""
        if self.each_s <= 0.0:
            return float("inf")
        return (self.target_s - self.base_s) / self.each_s


def step_of(outlook: Outlook, capability: Capability, policy: Policy) -> DecodeStep:
    context = outlook.context or 0.0
    each = capability.step_per_seq_s + context * capability.step_per_kv_token_s
    alone = capability.step_base_s + each
    return DecodeStep(
        base_s=capability.step_base_s,
        each_s=each,
        context=context,
        capacity=float(capability.kv_capacity) if capability.kv_capacity else None,
        target_s=policy.itl_s if alone < policy.itl_s else alone + PATIENCE * policy.itl_s,
    )


def decode_need(
    outlook: Outlook, prefill: RoleCounts, capability: Capability, policy: Policy
) -> Need:
    """`outlook.output` or `outlook.live` must be known."""
    step = step_of(outlook, capability, policy)
    now, ahead = outlook.output or 0.0, outlook.output_ahead or 0.0
    live = (outlook.live or 0.0) + _sent(outlook, prefill, capability, step)
    later = max(live, outlook.live_ahead or 0.0)
    good = _nodes(ahead, later, step, policy.headroom)
    least = _nodes(ahead, later, step, policy.headroom / 2.0)
    reachable = capability.step_base_s + step.each_s < policy.itl_s
    return Need(
        now=_nodes(now, live, step, policy.headroom / 2.0),
        ahead=least,
        least=least,
        good=good,
        reachable=reachable,
        text=_text(outlook, step, capability, policy, good, reachable),
        numbers={
            "decode_tokens_per_s": now,
            "decode_tokens_per_s_ahead": ahead,
            "decode_live_requests": live,
            "decode_context_tokens": step.context,
            "decode_step_base_s": step.base_s,
            "decode_needed": good,
        },
    )


def _nodes(tokens_per_s: float, live: float, step: DecodeStep, free: float) -> int:
    """The smallest number of nodes for the rate, for the live requests, and for their KV."""
    share = 1.0 - free
    n = max(
        1.0,
        tokens_per_s / (share * step.most_tokens_per_s),
        live / (share * step.most_live),
    )
    if step.capacity is not None:
        n = max(n, live * step.context / (share * step.capacity), _by_kv(tokens_per_s, step, share))
    return min(MOST, ceil(n - 1e-9)) if tokens_per_s > 0.0 or live > 0.0 else 0


def _sent(outlook: Outlook, prefill: RoleCounts, capability: Capability, step: DecodeStep) -> float:
    """Requests that wait for a prefill node when new nodes serve, and reach decode nodes while the
    requests live now still run."""
    if not outlook.prompt_mean:
        return 0.0
    speed = capability.prefill_tokens
    most_per_s = prefill.alive * speed / outlook.prompt_mean
    at_once = most_per_s * outlook.answer * step.target_s
    short = (outlook.prompt or 0.0) - len(prefill.ready) * speed
    waiting = (outlook.queued + max(0.0, short * capability.start_s)) / outlook.prompt_mean
    return min(waiting, max(0.0, at_once - (outlook.live or 0.0)))


def _by_kv(tokens_per_s: float, step: DecodeStep, share: float) -> float:
    """From b context <= share capacity, solved for r = tokens_per_s / n."""
    most_live = share * (step.capacity or 0.0) / step.context if step.context > 0.0 else 0.0
    if most_live <= 0.0:
        return 0.0
    return tokens_per_s * (step.base_s / most_live + step.each_s)


def _text(
    outlook: Outlook,
    step: DecodeStep,
    capability: Capability,
    policy: Policy,
    good: int,
    reachable: bool,
) -> str:
    parts = [f"{outlook.output or 0.0:,.0f} output tokens/s"]
    if (outlook.output_ahead or 0.0) > 1.01 * (outlook.output or 0.0):
        parts.append(f"{outlook.output_ahead:,.0f} predicted in {capability.start_s:.0f} s")
    if outlook.live:
        parts.append(
            f"{outlook.live:,.0f} live requests with {step.context:,.0f} tokens of KV each"
        )
    if step.each_s > 0.0:
        parts.append(f"a node holds {step.most_live:,.0f} at ITL {1e3 * step.target_s:.0f} ms")
    if not reachable:
        parts.append(
            f"a single request takes {1e3 * (step.base_s + step.each_s):.0f} ms per token, "
            f"which exceeds the ITL target of {1e3 * policy.itl_s:.0f} ms with any number of "
            "nodes"
        )
    parts.append(f"{good} needed")
    return ", ".join(parts)

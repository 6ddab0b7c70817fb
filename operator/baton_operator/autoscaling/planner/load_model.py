"""How many replicas of each role the load needs, from a model of what one node can do.

In: the forecast, a node's capability, the nodes. Out: `RequiredReplicas`.

Prefill: a prompt that takes S seconds on an idle node may wait `ttft - S`. The need is the smallest
number of nodes for which the required share of prompts waits no longer. The router gives a prompt
to the node where it waits least, which is the same as one queue for all nodes (least work left =
M/G/n; Harchol-Balter, Performance Modeling and Design, chapter 24). Prompt lengths vary about as
much as an exponential distribution, so M/M/n is used (ibid., chapter 14):

    P(wait > t) = C(n, a) exp(-(n - a) t / S)

with the offered load a = arrivals x S, and C by Erlang: C = B / (1 - (a / n)(1 - B)),
B(0) = 1, B(k) = a B(k-1) / (k + a B(k-1)). Queued prompts count only if they would still wait once
a new node serves, because a queue that shrinks by itself needs no node.

Decode: a step over a batch of b requests with k tokens of KV each takes s = base + b c, c = per_seq
+ k per_kv_token. By Little's law a node that gives r tokens/s has a batch b = r s, so

    b = r base / (1 - r c)        s = base / (1 - r c)

and the step meets the ITL target t while r <= (1 - base / t) / c. The need is the smallest n for
which each node's share of the output stays below this rate with headroom, the KV of its batch fits,
and its share of the live requests fits too. The live requests matter when nodes are full and
produce less than clients request. A request that waits for a prefill node counts if prefill nodes
can deliver it before the requests live now have ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp

from baton_operator.autoscaling.planner.forecast import Forecast
from baton_operator.autoscaling.planner.inputs import AutoscalingPolicy, Capability, RoleNodes

# Where one request alone misses its target, it is kept to this share of the target more.
PATIENCE = 0.25
# The rest of a prefill queue may take this many start times to shrink.
WORK_OFF = 1.0 / 3.0
# No pool has more nodes in a role; a search that reaches it means "at least this many".
MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredReplicas:
    """Replicas of a role. `least` meets the targets with half of the headroom: fewer are too few.
    `desired` keeps all of the headroom. Between the two nothing changes: this is the tolerance of a
    HorizontalPodAutoscaler. `now` and `ahead` are the `least` for demand alone, now and after the
    start time. `reachable`: one request alone meets the target."""

    now: int
    ahead: int
    least: int
    desired: int
    reachable: bool
    text: str
    numbers: dict[str, float]


def required_prefill(
    forecast: Forecast, nodes: RoleNodes, capability: Capability, policy: AutoscalingPolicy
) -> RequiredReplicas:
    """`forecast.prompt` must be inputs."""
    speed = capability.prefill_tokens
    now, ahead = forecast.prompt or 0.0, forecast.prompt_ahead or 0.0
    service_s = (forecast.prompt_mean or 0.0) / speed
    backlog = _backlog(forecast, nodes, capability)
    rate = ahead + backlog / (WORK_OFF * max(capability.start_s, policy.ttft_s))
    wait_s = max(policy.ttft_s - service_s, PATIENCE * policy.ttft_s)

    def replicas(tokens: float, free: float) -> int:
        return servers_for(tokens / (speed * (1.0 - free)), service_s, wait_s, policy.percentile)

    desired = replicas(rate, policy.headroom)
    reachable = service_s < policy.ttft_s
    return RequiredReplicas(
        now=replicas(now, policy.headroom / 2.0),
        ahead=replicas(ahead, policy.headroom / 2.0),
        least=replicas(rate, policy.headroom / 2.0),
        desired=desired,
        reachable=reachable,
        text=_prefill_text(forecast, backlog, capability, policy, desired, reachable),
        numbers={
            "prefill_tokens_per_s": now,
            "prefill_tokens_per_s_ahead": ahead,
            "prefill_backlog_tokens": backlog,
            "prefill_node_tokens_per_s": speed,
            "prefill_prompt_s": service_s,
            "prefill_needed": desired,
        },
    )


def _backlog(forecast: Forecast, nodes: RoleNodes, capability: Capability) -> float:
    """Prompt tokens that would still be queued once a new node serves. Until then the ready nodes
    compute, and the starting ones as soon as they are up."""
    horizon_s = capability.start_s
    computing_s = len(nodes.ready) * horizon_s
    for node in nodes.starting:
        computing_s += min(node.since_s, horizon_s)
    arriving = (forecast.prompt or 0.0) * horizon_s
    return max(0.0, forecast.queued + arriving - computing_s * capability.prefill_tokens)


def servers_for(load: float, service_s: float, wait_s: float, share: float) -> int:
    """The smallest n for which at least `share` of the prompts wait no longer than `wait_s`. `load`
    is the number of servers that would always be busy; 0 needs none."""
    if load <= 0.0:
        return 0
    blocked = 1.0
    for n in range(1, MOST):
        blocked = load * blocked / (n + load * blocked)
        if n <= load:
            continue
        waits = blocked / (1.0 - load / n * (1.0 - blocked))
        rate = (n - load) * wait_s / service_s if service_s > 0.0 else float("inf")
        if waits * exp(-rate) <= 1.0 - share:
            return n
    return MOST


def _prefill_text(
    forecast: Forecast,
    backlog: float,
    capability: Capability,
    policy: AutoscalingPolicy,
    desired: int,
    reachable: bool,
) -> str:
    parts = [f"{forecast.prompt or 0.0:,.0f} uncached prompt tokens/s"]
    if (forecast.prompt_ahead or 0.0) > 1.01 * (forecast.prompt or 0.0):
        parts.append(f"{forecast.prompt_ahead:,.0f} predicted in {capability.start_s:.0f} s")
    if backlog > 0.0:
        parts.append(f"{backlog:,.0f} tokens would still be queued then")
    parts.append(f"a node computes {capability.prefill_tokens:,.0f} tokens/s")
    if not reachable:
        alone_s = (forecast.prompt_mean or 0.0) / capability.prefill_tokens
        parts.append(
            f"a single prompt takes {alone_s:.2f} s, which exceeds the TTFT target of "
            f"{policy.ttft_s:g} s with any number of nodes"
        )
    parts.append(f"{desired} needed for TTFT {policy.ttft_s:g} s")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """A decode step of requests with the same context. `target_s` is the ITL target, or if it is
    out of reach slightly more than the step of a single request."""

    base_s: float
    per_request_s: float
    context: float
    capacity: float | None
    target_s: float

    @property
    def most_tokens_per_s(self) -> float:
        """Output tokens per second of a node that meets the target."""
        if self.per_request_s <= 0.0:
            return float("inf")
        return (1.0 - self.base_s / self.target_s) / self.per_request_s

    @property
    def most_live(self) -> float:
        """Requests in a batch that meets the target."""
        if self.per_request_s <= 0.0:
            return float("inf")
        return (self.target_s - self.base_s) / self.per_request_s


def required_decode(
    forecast: Forecast, prefill: RoleNodes, capability: Capability, policy: AutoscalingPolicy
) -> RequiredReplicas:
    """`forecast.output` or `forecast.live` must be inputs."""
    step = _decode_step(forecast, capability, policy)
    now, ahead = forecast.output or 0.0, forecast.output_ahead or 0.0
    live = (forecast.live or 0.0) + _coming_from_prefill(forecast, prefill, capability, step)
    live_ahead = max(live, forecast.live_ahead or 0.0)
    desired = _decode_replicas(ahead, live_ahead, step, policy.headroom)
    least = _decode_replicas(ahead, live_ahead, step, policy.headroom / 2.0)
    reachable = capability.step_base_s + step.per_request_s < policy.itl_s
    return RequiredReplicas(
        now=_decode_replicas(now, live, step, policy.headroom / 2.0),
        ahead=least,
        least=least,
        desired=desired,
        reachable=reachable,
        text=_decode_text(forecast, step, capability, policy, desired, reachable),
        numbers={
            "decode_tokens_per_s": now,
            "decode_tokens_per_s_ahead": ahead,
            "decode_live_requests": live,
            "decode_context_tokens": step.context,
            "decode_step_base_s": step.base_s,
            "decode_needed": desired,
        },
    )


def _decode_step(
    forecast: Forecast, capability: Capability, policy: AutoscalingPolicy
) -> DecodeStep:
    context = forecast.context or 0.0
    per_request_s = capability.step_per_seq_s + context * capability.step_per_kv_token_s
    alone_s = capability.step_base_s + per_request_s
    return DecodeStep(
        base_s=capability.step_base_s,
        per_request_s=per_request_s,
        context=context,
        capacity=float(capability.kv_capacity) if capability.kv_capacity else None,
        target_s=policy.itl_s if alone_s < policy.itl_s else alone_s + PATIENCE * policy.itl_s,
    )


def _decode_replicas(tokens_per_s: float, live: float, step: DecodeStep, free: float) -> int:
    """The smallest number of nodes for the rate, for the live requests, and for their KV."""
    share = 1.0 - free
    n = max(
        1.0,
        tokens_per_s / (share * step.most_tokens_per_s),
        live / (share * step.most_live),
    )
    if step.capacity is not None:
        n = max(
            n,
            live * step.context / (share * step.capacity),
            _replicas_for_kv(tokens_per_s, step, share),
        )
    return min(MOST, ceil(n - 1e-9)) if tokens_per_s > 0.0 or live > 0.0 else 0


def _replicas_for_kv(tokens_per_s: float, step: DecodeStep, share: float) -> float:
    """From b context <= share capacity, solved for r = tokens_per_s / n."""
    most_live = share * (step.capacity or 0.0) / step.context if step.context > 0.0 else 0.0
    if most_live <= 0.0:
        return 0.0
    return tokens_per_s * (step.base_s / most_live + step.per_request_s)


def _coming_from_prefill(
    forecast: Forecast, prefill: RoleNodes, capability: Capability, step: DecodeStep
) -> float:
    """Requests that wait for a prefill node when new nodes serve, and reach decode nodes while the
    requests live now still run."""
    if not forecast.prompt_mean:
        return 0.0
    speed = capability.prefill_tokens
    most_per_s = prefill.staying * speed / forecast.prompt_mean
    at_once = most_per_s * forecast.answer * step.target_s
    short = (forecast.prompt or 0.0) - len(prefill.ready) * speed
    waiting = (forecast.queued + max(0.0, short * capability.start_s)) / forecast.prompt_mean
    return min(waiting, max(0.0, at_once - (forecast.live or 0.0)))


def _decode_text(
    forecast: Forecast,
    step: DecodeStep,
    capability: Capability,
    policy: AutoscalingPolicy,
    desired: int,
    reachable: bool,
) -> str:
    parts = [f"{forecast.output or 0.0:,.0f} output tokens/s"]
    if (forecast.output_ahead or 0.0) > 1.01 * (forecast.output or 0.0):
        parts.append(f"{forecast.output_ahead:,.0f} predicted in {capability.start_s:.0f} s")
    if forecast.live:
        parts.append(
            f"{forecast.live:,.0f} live requests with {step.context:,.0f} tokens of KV each"
        )
    if step.per_request_s > 0.0:
        parts.append(f"a node holds {step.most_live:,.0f} at ITL {1e3 * step.target_s:.0f} ms")
    if not reachable:
        parts.append(
            f"a single request takes {1e3 * (step.base_s + step.per_request_s):.0f} ms per token, "
            f"which exceeds the ITL target of {1e3 * policy.itl_s:.0f} ms with any number of "
            "nodes"
        )
    parts.append(f"{desired} needed")
    return ", ".join(parts)

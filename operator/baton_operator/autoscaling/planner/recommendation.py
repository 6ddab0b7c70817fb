"""What each role's load recommends, before the owner's limits.

In: the known inputs, the role's nodes. Out: a `Recommendation`, which the later rules change; a
rule that changes the number becomes the reason. The model of `load_model` gives the number, and two
measurements correct it: a missed target adds a node although the model sees enough of them, and
reads from the store at their limit add no prefill nodes. Without known inputs a role keeps its
replicas. Unknown never means zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from baton_operator.autoscaling.planner.forecast import Forecast
from baton_operator.autoscaling.planner.inputs import (
    AutoscalingPolicy,
    Capability,
    Demand,
    PoolObservation,
    RoleNodes,
)
from baton_operator.autoscaling.planner.load_model import (
    RequiredReplicas,
    required_decode,
    required_prefill,
)
from baton_operator.autoscaling.planner.memory import TargetMiss
from baton_operator.autoscaling.planner.reasons import ScalingReason
from baton_protocol.store import Role

BUSY = 0.5  # a prefill node must compute this share of its time; otherwise more nodes cannot help
SHARED = 2.0  # requests in a decode node's batch; a single request gains nothing from more nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A role's replicas on their way through the rules. `load_text`: what the load needs. `limits`:
    what each rule did; the last one is the reason. `unknown`: the unknown input without which the
    role may not shrink."""

    role: Role
    current: int
    desired: int
    reason: ScalingReason
    load_text: str
    limits: tuple[str, ...] = ()
    unknown: tuple[ScalingReason, str] | None = None
    required: RequiredReplicas | None = None

    def change(self, desired: int, reason: ScalingReason, limit: str) -> Recommendation:
        """The same with another number; unchanged if the number is the same."""
        if desired == self.desired:
            return self
        return replace(self, desired=desired, reason=reason, limits=(*self.limits, limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendations:
    prefill: Recommendation
    decode: Recommendation

    @property
    def both(self) -> tuple[Recommendation, Recommendation]:
        return self.prefill, self.decode

    def apply(self, rule: Callable[[Recommendation], Recommendation]) -> Recommendations:
        """After a rule that looks at one role at a time."""
        return Recommendations(prefill=rule(self.prefill), decode=rule(self.decode))


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownInputs:
    """The inputs that are inputs. `unknown` says why there are none, for both roles."""

    demand: Demand | None = None
    capability: Capability | None = None
    forecast: Forecast | None = None
    unknown: tuple[ScalingReason, str] | None = None

    def load_of(self, role: Role) -> float:
        """The tokens per second that are the role's load."""
        if self.forecast is None:
            return 0.0
        rate = self.forecast.prompt if role == "prefill" else self.forecast.output
        return rate or 0.0


def why_unknown(
    observation: PoolObservation, policy: AutoscalingPolicy
) -> tuple[ScalingReason, str] | None:
    """Why the load cannot be judged; None if it can."""
    demand, capability = observation.demand, observation.capability
    if demand is None:
        return ScalingReason.DEMAND_UNKNOWN, "no router has reported its load"
    if demand.age_s > policy.stale_after_s:
        return ScalingReason.DEMAND_STALE, (
            f"the latest load report is {demand.age_s:.0f} s old, over the limit of "
            f"{policy.stale_after_s:g} s"
        )
    if capability is None or capability.prefill_tokens <= 0.0 or capability.step_base_s <= 0.0:
        return ScalingReason.CAPABILITY_UNKNOWN, "no node has measured its speed yet"
    return None


def recommend(
    nodes: RoleNodes, prefill: RoleNodes, inputs: KnownInputs, policy: AutoscalingPolicy
) -> Recommendation:
    """What the model recommends for the role of `nodes`."""
    if inputs.unknown is not None:
        return _keep(nodes, *inputs.unknown)
    assert inputs.capability is not None
    assert inputs.forecast is not None
    forecast = inputs.forecast
    if nodes.role == "prefill":
        if forecast.prompt is None:
            text = "the rate of uncached prompt tokens is unknown"
            return _keep(nodes, ScalingReason.DEMAND_UNKNOWN, text)
        required = required_prefill(forecast, nodes, inputs.capability, policy)
        is_complete = _knows_all_of_prefill(forecast)
    else:
        if forecast.output is None and forecast.live is None:
            text = "the rate of output tokens is unknown"
            return _keep(nodes, ScalingReason.DEMAND_UNKNOWN, text)
        required = required_decode(forecast, prefill, inputs.capability, policy)
        is_complete = _knows_all_of_decode(forecast)
    recommendation = _from_required(nodes, required)
    if not is_complete:
        return _do_not_shrink(
            recommendation, ScalingReason.DEMAND_UNKNOWN, "part of the load is unknown"
        )
    if nodes.silent:
        names = ", ".join(nodes.silent[:3])
        return _do_not_shrink(
            recommendation, ScalingReason.NODES_SILENT, f"no recent report from {names}"
        )
    return recommendation


def _knows_all_of_prefill(forecast: Forecast) -> bool:
    return forecast.prompt == 0.0 or forecast.prompt_mean is not None


def _knows_all_of_decode(forecast: Forecast) -> bool:
    if forecast.output is None or forecast.live is None:
        return False
    nothing_to_do = forecast.output == 0.0 and forecast.live == 0.0
    return nothing_to_do or forecast.context is not None


def _keep(nodes: RoleNodes, reason: ScalingReason, text: str) -> Recommendation:
    current = nodes.current_replicas
    return Recommendation(
        role=nodes.role, current=current, desired=current, reason=reason, load_text=text
    )


def _do_not_shrink(
    recommendation: Recommendation, reason: ScalingReason, text: str
) -> Recommendation:
    """The known inputs may raise the number but not lower it."""
    recommendation = replace(recommendation, unknown=(reason, text))
    if recommendation.desired > recommendation.current:
        return recommendation
    return replace(recommendation, desired=recommendation.current, reason=reason, limits=(text,))


def _from_required(nodes: RoleNodes, required: RequiredReplicas) -> Recommendation:
    current = nodes.current_replicas
    desired = current
    limits: tuple[str, ...] = ()
    if required.least > current:
        desired, reason = required.desired, _why_more(required, current)
    elif required.desired < current:
        desired, reason = required.desired, ScalingReason.DEMAND_FELL
    elif nodes.starting and required.desired > len(nodes.ready):
        reason = ScalingReason.CAPACITY_COMING
        oldest_s = max(node.since_s for node in nodes.starting)
        limits = (f"{len(nodes.starting)} starting, the oldest for {oldest_s:.0f} s",)
    else:
        reason = ScalingReason.STEADY
    return Recommendation(
        role=nodes.role,
        current=current,
        desired=desired,
        reason=reason,
        load_text=required.text,
        limits=limits,
        required=required,
    )


def _why_more(required: RequiredReplicas, current: int) -> ScalingReason:
    if not required.reachable:
        return ScalingReason.TARGET_UNREACHABLE
    if required.now > current:
        return ScalingReason.DEMAND_ROSE
    if required.ahead > current:
        return ScalingReason.TREND_ROSE
    return ScalingReason.BACKLOG_GREW


def add_for_missed_target(
    recommendation: Recommendation,
    inputs: KnownInputs,
    nodes: RoleNodes,
    decode: RoleNodes,
    policy: AutoscalingPolicy,
    at_s: float,
) -> tuple[Recommendation, TargetMiss | None]:
    """One more node if clients measure more than a target, and the miss to remember. A miss counts
    only after all nodes have served for the whole window in which it was measured, and only for a
    busy role: more nodes do not help requests that do not wait for a node."""
    required = recommendation.required
    if inputs.demand is None or required is None or not required.reachable:
        return recommendation, None
    text = _missed_target(nodes, inputs.demand, decode, policy)
    if text is None:
        return recommendation, None
    load = inputs.load_of(nodes.role) / len(nodes.ready)
    miss = TargetMiss(at_s=at_s, role=nodes.role, load=load)
    if recommendation.desired > recommendation.current:
        return recommendation, miss
    more = recommendation.current + 1
    return recommendation.change(more, ScalingReason.TARGET_MISSED, text), miss


def _missed_target(
    nodes: RoleNodes, demand: Demand, decode: RoleNodes, policy: AutoscalingPolicy
) -> str | None:
    settled = all(node.since_s >= demand.window_s for node in nodes.ready)
    if nodes.starting or not nodes.ready or not settled:
        return None
    ttft_missed = demand.ttft_s is not None and demand.ttft_s > policy.ttft_s
    ttft_text = f"TTFT {demand.ttft_s or 0.0:.2f} s exceeds {policy.ttft_s:g} s"
    if nodes.role == "prefill":
        if ttft_missed and not _requests_wait(decode) and _are_busy(nodes):
            return f"{ttft_text} and the nodes are busy"
        return None
    running = nodes.total(lambda node: node.running)
    shared = running is not None and running >= SHARED * len(nodes.ready)
    if shared and demand.itl_s is not None and demand.itl_s > policy.itl_s:
        return f"ITL {1e3 * demand.itl_s:.0f} ms exceeds {1e3 * policy.itl_s:.0f} ms"
    if ttft_missed and _requests_wait(nodes):
        return f"{ttft_text} and requests wait for KV"
    return None


def _are_busy(nodes: RoleNodes) -> bool:
    busy = nodes.total(lambda node: node.busy)
    return busy is not None and busy >= BUSY * len(nodes.ready)


def _requests_wait(decode: RoleNodes) -> bool:
    """Whether at least one request per node waits for room."""
    waiting = decode.total(lambda node: node.waiting)
    return waiting is not None and bool(decode.ready) and waiting >= len(decode.ready)


def hold_at_read_limit(
    recommendation: Recommendation, inputs: KnownInputs, policy: AutoscalingPolicy
) -> Recommendation:
    """Do not grow prefill while reads from the store are at their limit: more nodes would only wait
    for the same reads."""
    if inputs.demand is None or inputs.capability is None or recommendation.role != "prefill":
        return recommendation
    read, most = inputs.demand.store_read_bytes, inputs.capability.store_read_limit
    if read is None or not most or read < (1.0 - policy.headroom) * most:
        return recommendation
    limit = f"reads from the store are the bottleneck: {read / 1e9:.2f} of {most / 1e9:.2f} GB/s"
    replicas = min(recommendation.desired, recommendation.current)
    return recommendation.change(replicas, ScalingReason.STORE_LIMITED, limit)

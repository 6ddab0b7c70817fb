"""Makes snapshots of the pool.

In: the view of the nodes, running and ended calls, two looks at the counters, the planner's
decisions. Out: a Snapshot for one viewer. An admin, or everybody in a pool without keys, sees all.
A tenant sees its own calls, and of nodes only id, role and state. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from baton_protocol.ids import NodeId
from baton_router.live.records import (
    EndedCall,
    Flow,
    Latency,
    LiveNode,
    PlannerDecision,
    RunningCall,
    Snapshot,
    TenantCalls,
    Totals,
    Viewer,
)
from baton_router.live.series import NodeCounts, Rates
from baton_router.nodes.node_view import NodeView, state_of
from baton_router.requests.attempt import Attempt
from baton_router.requests.context import RequestContext
from baton_router.requests.state import RequestRecord

MOST_REQUESTS = 200
MOST_ENDED = 50
MOST_DECISIONS = 20


@dataclass(frozen=True, slots=True)
class Ending:
    """A call that ended with this status, at a time of the router's clock."""

    context: RequestContext
    status: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all snapshots of one moment are made of. `now` is a time of the router's clock, `at_ms`
    the same in Unix milliseconds. `running` are the calls with a tenant, the oldest first, and
    `by_tenant` those of each. `decisions` has the newest first."""

    at_ms: int
    now: float
    pool: str
    router: str
    model: str | None
    nodes: Sequence[NodeView]
    counts: Mapping[NodeId, NodeCounts]
    rates: Rates
    running: Sequence[RequestContext]
    by_tenant: Mapping[str, Sequence[RequestContext]]
    decisions: Sequence[PlannerDecision]


def may_see(viewer: Viewer, context: RequestContext) -> bool:
    """Whether the viewer may see the call. Nobody sees one without a valid key."""
    tenant = context.tenant
    return tenant is not None and (viewer.admin or tenant.name == viewer.tenant)


def calls_by_tenant(calls: Iterable[RequestContext]) -> dict[str, list[RequestContext]]:
    found: dict[str, list[RequestContext]] = {}
    for context in calls:
        found.setdefault(context.tenant_name, []).append(context)
    return found


def make_snapshot(scene: Scene, viewer: Viewer, ended: Sequence[Ending]) -> Snapshot:
    """`ended` are calls that the viewer may see."""
    calls = scene.running if viewer.admin else scene.by_tenant.get(viewer.tenant, ())
    nodes = sorted(scene.nodes, key=lambda node: node.report.node)
    tally = _tally(calls)
    rates = scene.rates if viewer.admin else Rates()
    return Snapshot(
        at_ms=scene.at_ms,
        pool=scene.pool,
        router=scene.router,
        model=scene.model,
        viewer=viewer,
        totals=Totals(
            running=tally.running.total(),
            waiting=tally.waiting.total(),
            requests_per_s=_rounded(rates.requests),
            tokens_per_s=_rounded(rates.tokens),
            prompt_tokens_per_s=_rounded(rates.prompt_tokens),
            errors_per_s=_rounded(rates.errors),
            ready_nodes=sum(node.ready for node in nodes),
            nodes=len(nodes),
        ),
        latency=_latency(rates, ended) if viewer.admin else Latency(),
        nodes=[_node(node, scene.counts) if viewer.admin else _outline(node) for node in nodes],
        flows=_flows(tally) if viewer.admin else [],
        requests=[_running_call(context, scene.now) for context in calls[:MOST_REQUESTS]],
        requests_left_out=max(0, len(calls) - MOST_REQUESTS),
        ended=[_ended_call(ending) for ending in ended],
        tenants=_tenants(tally) if viewer.admin else [],
        decisions=list(scene.decisions[:MOST_DECISIONS]) if viewer.admin else [],
    )


@dataclass(frozen=True, slots=True)
class _Tally:
    """Calls that run on a node and that wait for one, by tenant; requests that move from a prefill
    node to a decode node, by pair."""

    running: Counter[str]
    waiting: Counter[str]
    handoffs: Counter[tuple[str, str]]


def _tally(calls: Iterable[RequestContext]) -> _Tally:
    """One pass, as there may be thousands of calls: it takes about 1 us for each."""
    tally = _Tally(Counter(), Counter(), Counter())
    for context in calls:
        placed = False
        for request in context.in_flight:
            attempt = request.record.current
            if attempt is None:
                continue
            placed, prefill = True, attempt.placement.prefill
            if prefill is not None and _hands_off(attempt):
                tally.handoffs[prefill, attempt.placement.decode] += 1
        (tally.running if placed else tally.waiting)[context.tenant_name] += 1
    return tally


def _hands_off(attempt: Attempt) -> bool:
    """Whether the decode node of a split attempt has no token of its own yet."""
    given_up = attempt.prefill_given_up_at is not None
    return attempt.decoding_at is None and attempt.ended is None and not given_up


# --- nodes ------------------------------------------------------------------------------------


def _outline(node: NodeView) -> LiveNode:
    report = node.report
    return LiveNode(id=report.node, role=report.role, state=state_of(node), asleep=report.asleep)


def _node(node: NodeView, counts: Mapping[NodeId, NodeCounts]) -> LiveNode:
    report, load = node.report, node.report.load
    counted = counts.get(report.node)
    rates = counted.rates if counted is not None and node.connected else None
    return LiveNode(
        id=report.node,
        role=report.role,
        state=state_of(node),
        reason=report.reason or None,
        asleep=report.asleep,
        exact=report.exact,
        running=load.running,
        waiting=load.waiting + load.parked,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        total_blocks=load.total_blocks,
        tokens_per_s=_rounded(rates.tokens) if rates else None,
        kv_in_bytes_per_s=_rounded(rates.kv_in) if rates else None,
        kv_out_bytes_per_s=_rounded(rates.kv_out) if rates else None,
    )


def _flows(tally: _Tally) -> list[Flow]:
    return [Flow(*pair, requests) for pair, requests in sorted(tally.handoffs.items())]


# --- calls ------------------------------------------------------------------------------------


def _running_call(context: RequestContext, now: float) -> RunningCall:
    usage, shown = context.usage(), _shown(context)
    prefill, decode = _places(shown)
    return RunningCall(
        id=context.id,
        tenant=context.tenant_name,
        endpoint=context.endpoint,
        phase=shown.phase if shown is not None else "held",
        age_ms=_ms(now - context.started),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        prefill=prefill,
        decode=decode,
        attempts=context.attempts,
    )


def _ended_call(ending: Ending) -> EndedCall:
    context = ending.context
    usage, failure, ttft_s = context.usage(), context.failure, context.ttft_s
    prefill, decode = _places(_shown(context))
    return EndedCall(
        id=context.id,
        tenant=context.tenant_name,
        endpoint=context.endpoint,
        status=ending.status,
        error=failure.code if failure is not None else None,
        first_token_ms=None if ttft_s is None else _ms(ttft_s),
        total_ms=_ms(ending.at - context.started),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        attempts=context.attempts,
        prefill=prefill,
        decode=decode,
    )


def _shown(context: RequestContext) -> RequestRecord | None:
    """Of a call's requests the first that runs, or else the first one."""
    records = [request.record for request in context.in_flight]
    running = (record for record in records if record.phase != "over")
    return next(running, records[0] if records else None)


def _places(record: RequestRecord | None) -> tuple[str | None, str | None]:
    """Prefill and decode node of the current attempt; of a request that is over, of the last."""
    if record is None:
        return None, None
    attempt = record.current
    if attempt is None and record.phase == "over" and record.attempts:
        attempt = record.attempts[-1]
    if attempt is None:
        return None, None
    return attempt.placement.prefill, attempt.placement.decode


def _tenants(tally: _Tally) -> list[TenantCalls]:
    names = sorted(tally.running.keys() | tally.waiting.keys())
    return [TenantCalls(name, tally.running[name], tally.waiting[name]) for name in names]


# --- latencies --------------------------------------------------------------------------------


def _latency(rates: Rates, ended: Sequence[Ending]) -> Latency:
    errors = [error for ending in ended if (error := _prediction_error(ending.context)) is not None]
    usages = [ending.context.usage() for ending in ended]
    prompts = sum(usage.prompt_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    return Latency(
        ttft_p50_ms=rates.ttft_p50_ms,
        ttft_p99_ms=rates.ttft_p99_ms,
        itl_p50_ms=rates.itl_p50_ms,
        itl_p99_ms=rates.itl_p99_ms,
        prediction_error_p50_ms=round(median(errors), 3) if errors else None,
        cache_hit_rate=round(cached / prompts, 4) if prompts else None,
    )


def _prediction_error(context: RequestContext) -> float | None:
    """Milliseconds between predicted and measured time until the call's last attempt decoded. None
    if it did not, or not as predicted."""
    shown = _shown(context)
    attempt = shown.current if shown is not None else None
    if attempt is None or attempt.decoding_at is None or attempt.prefill_given_up_at is not None:
        return None
    return abs(1e3 * (attempt.decoding_at - attempt.placed_at) - attempt.expected_ms)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 2)

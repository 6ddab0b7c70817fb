"""The status of a pool, from what was observed of its children. Pure.

In: the pool or what is wrong with its spec, the children, the status before. Out: the status now,
equal to the one before where there is nothing new to say, so that nothing is written. What cannot
be observed keeps its last value.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime

import msgspec

from baton_operator.api.pool import Pool, SpecError
from baton_operator.api.status import AutoscalingStatus, Condition, PoolStatus, RoleStatus
from baton_operator.builders.child import ChildIdentity
from baton_operator.state.observed import Observed
from baton_operator.status import conditions as c
from baton_operator.status import messages
from baton_operator.status.conditions import Reason
from baton_operator.status.view import Finding, View, revision_now
from baton_operator.timestamps import is_fresh, stamp
from baton_protocol.store import ROLES

LONGEST_MESSAGE = 1000
# What the planner counts moves all the time, and each word of it costs a write: with the same
# counts and reason it is said anew this often.
NUMBERS_EVERY_S = 60.0
LONGEST_WORDS = 1000


def derive(
    pool: Pool | SpecError,
    revision: str,
    generation: int,
    observed: Observed,
    before: PoolStatus | None,
    now: datetime,
    now_s: float,
) -> PoolStatus:
    """`revision` is that of the pool's templates, "" without any; `generation` that of the spec
    which `pool` was read from. `now` has a time zone, `now_s` is the clock of `FirstSeen`."""
    valid, last = pool if isinstance(pool, Pool) else None, before or PoolStatus()
    revision = revision_now(valid, revision, observed, last)
    view = View(pool=valid, observed=observed, before=last, now=now, now_s=now_s, revision=revision)
    view = msgspec.structs.replace(view, model=messages.model_status(view))
    error = str(pool) if isinstance(pool, SpecError) else ""
    findings = _findings(view, error)
    return PoolStatus(
        observed_generation=generation,
        conditions=tuple(
            _condition(kind, findings[kind.name], generation, last, now)
            for kind in c.KINDS
            if kind.name in findings
        ),
        prefill=_role(view, "prefill"),
        decode=_role(view, "decode"),
        router=_role(view, "router"),
        model=view.model,
        autoscaling=_autoscaling(view),
        endpoint=_endpoint(valid) if valid else last.endpoint,
        url=_url(valid, observed.address) if valid else last.url,
        revision=revision,
        fingerprint=_fingerprint(view),
    )


def _findings(view: View, error: str) -> dict[str, Finding]:
    """By type; without those that do not apply."""
    found: dict[str, Finding | None] = {
        c.VALID.name: Finding(c.SPEC_INVALID, error) if error else Finding(c.SPEC_VALID),
        c.APPLIED.name: messages.applied(view),
    }
    if view.pool is not None or view.revision:
        found |= {
            c.STORE_READY.name: messages.store(view),
            c.MODEL_READY.name: messages.model(view),
            c.PREFILL_READY.name: messages.role(view, "prefill"),
            c.DECODE_READY.name: messages.role(view, "decode"),
            c.ROUTER_READY.name: messages.router(view),
            c.ROUTE_READY.name: messages.route(view),
            c.UPDATED.name: messages.updated(view),
            c.ROLLOUT_BLOCKED.name: messages.rollout_blocked(view),
            c.SCALED.name: messages.scaled(view),
            c.SERVING.name: messages.serving(view),
        }
    there = {name: finding for name, finding in found.items() if finding is not None}
    return there | {c.READY.name: _ready(there)}


def _ready(findings: dict[str, Finding]) -> Finding:
    """Not True with the worst part's reason: of equals the first, as later ones mostly follow from
    it."""
    named = [(part.name, findings[part.name]) for part in c.PARTS if part.name in findings]
    open_ = [(name, part) for name, part in named if part.reason.status != "True"]
    if not open_:
        rolling = c.UPDATED.name in findings and findings[c.UPDATED.name].reason.status != "True"
        return Finding(c.ALL_READY, "a roll-out is under way: see Updated" if rolling else "")
    name, worst = min(open_, key=lambda item: _rank(item[1].reason))
    fails = any(part.reason.status == "False" for _, part in open_)
    reason = msgspec.structs.replace(worst.reason, status="False" if fails else "Unknown")
    return Finding(reason, f"{name}: {worst.message or worst.reason.meaning}")


def _rank(reason: Reason) -> int:
    """What somebody must mend, what somebody wants so, what takes its time, what nobody knows."""
    return 2 * reason.waits + (reason.status == "Unknown")


def _condition(
    kind: c.ConditionKind, finding: Finding, generation: int, before: PoolStatus, now: datetime
) -> Condition:
    said = before.condition(kind.name)
    same = said is not None and said.status == finding.reason.status
    return Condition(
        type=kind.name,
        status=finding.reason.status,
        reason=finding.reason.name,
        message=finding.message[:LONGEST_MESSAGE],
        last_transition_time=said.last_transition_time if said and same else stamp(now),
        observed_generation=generation,
    )


def _role(view: View, component: str) -> RoleStatus:
    desired, ready = view.desired(component), view.ready(component)
    if component in ROLES:
        pods = view.pods(component)
        updated = sum(pod.ready and view.is_current(pod) for pod in pods)
    else:
        updated = min(ready, sum(item.updated for item in view.workloads(component)))
    ending = [pod for pod in view.observed.pods if pod.component == component and pod.ends]
    return RoleStatus(
        summary=f"{ready}/{desired}",
        desired=desired,
        ready=ready,
        updated=updated,
        draining=len(ending),
    )


def _fingerprint(view: View) -> str:
    """Of most nodes of the current revision; the last one known while it still holds."""
    held = view.before.fingerprint if view.revision == view.before.revision else ""
    said = Counter(report.fingerprint for report in view.reports())
    if not said or held in said:
        return held
    return min(said, key=lambda fingerprint: (-said[fingerprint], fingerprint))


def _endpoint(pool: Pool) -> str:
    """Where OpenAI's clients find the pool, hence with /v1: inside the cluster."""
    return _base("http", ChildIdentity(pool, "router").host, pool.spec.router.service.port)


def _url(pool: Pool, address: str) -> str:
    """From outside where there is a route, else the endpoint. What only a Gateway knows, TLS and
    another port, is not in it."""
    router = pool.spec.router
    if router.ingress is not None:
        return f"{'https' if router.ingress.tls_secret_name else 'http'}://{router.ingress.host}/v1"
    hostnames = router.http_route.hostnames if router.http_route is not None else ()
    named = [name for name in hostnames if not name.startswith("*")]
    if named:
        return f"http://{named[0]}/v1"
    return _base("http", address, router.service.port) if address else _endpoint(pool)


def _base(scheme: str, host: str, port: int) -> str:
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{port}/v1"


def _autoscaling(view: View) -> AutoscalingStatus | None:
    """While nothing is decided, as of a pool that is paused or invalid, what was said last."""
    said, planned = view.before.autoscaling, view.observed.planned
    spec = view.pool.spec.autoscaling if view.pool is not None else None
    if view.pool is not None and (spec is None or not spec.is_planned):
        return None
    if planned is None:
        return said
    now = AutoscalingStatus(
        mode=planned.mode,
        desired_prefill=planned.prefill,
        desired_decode=planned.decode,
        reason=planned.reason,
        message=planned.message[:LONGEST_WORDS],
        numbers=planned.numbers[:LONGEST_WORDS],
        since=stamp(view.now),
        time=stamp(view.now),
    )
    if said is None or _gist(said) != _gist(now):
        return now
    if is_fresh(said.time, view.now, NUMBERS_EVERY_S):
        return said
    return msgspec.structs.replace(now, since=said.since)


def _gist(status: AutoscalingStatus) -> tuple[str, int, int, str]:
    return status.mode, status.desired_prefill, status.desired_decode, status.reason

"""The status of a pool, from what was observed of its children. Pure.

In: the pool or the error in its spec, the children, the previous status. Out: the current status.
It equals the previous one if nothing has changed, and then nothing is written. What cannot be
observed keeps its last value.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.api.spec_reader import SpecError
from baton_operator.api.status import Condition, PoolStatus, RoleStatus
from baton_operator.api.times import stamp
from baton_operator.state.observed import Observed
from baton_operator.status import conditions as c
from baton_operator.status.autoscaling import autoscaling_status
from baton_operator.status.condition_kinds import ConditionKind, ConditionReason
from baton_operator.status.findings.applied import applied_finding
from baton_operator.status.findings.model import model_finding, model_status
from baton_operator.status.findings.pods import role_finding, router_finding
from baton_operator.status.findings.rollout import (
    rollout_blocked_finding,
    scaled_finding,
    updated_finding,
)
from baton_operator.status.findings.route import route_finding
from baton_operator.status.findings.serving import serving_finding
from baton_operator.status.findings.sole_operator import sole_operator_finding
from baton_operator.status.findings.spec_effective import spec_effective_finding
from baton_operator.status.findings.store import store_finding
from baton_operator.status.urls import endpoint_of, url_of
from baton_operator.status.view import Finding, View, revision_now
from baton_protocol.store import ROLES, Exact, exact_together

LONGEST_MESSAGE = 1000


def derive_status(
    pool: Pool | SpecError,
    revision: str,
    generation: int,
    observed: Observed,
    before: PoolStatus | None,
    now: datetime,
    now_s: float,
) -> PoolStatus:
    """`revision` is that of the pool's templates, "" without any; `generation` that of the spec
    from which `pool` was read. `now` has a time zone, `now_s` is the clock of `FirstSeen`."""
    valid, last = pool if isinstance(pool, Pool) else None, before or PoolStatus()
    revision = revision_now(valid, revision, observed, last)
    view = View(pool=valid, observed=observed, before=last, now=now, now_s=now_s, revision=revision)
    view = msgspec.structs.replace(view, model=model_status(view))
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
        autoscaling=autoscaling_status(view),
        operator=last.operator,
        endpoint=endpoint_of(valid) if valid else last.endpoint,
        url=url_of(valid, observed.address) if valid else last.url,
        revision=revision,
        fingerprint=_fingerprint(view),
        exact=_exact(view),
    )


def _findings(view: View, error: str) -> dict[str, Finding]:
    """Findings by condition type, without those that do not apply."""
    findings: dict[str, Finding | None] = {
        c.VALID.name: Finding(c.SPEC_INVALID, error) if error else Finding(c.SPEC_VALID),
        c.APPLIED.name: applied_finding(view),
        c.SOLE_OPERATOR.name: sole_operator_finding(view),
    }
    if view.pool is not None or view.revision:
        findings |= {
            c.STORE_READY.name: store_finding(view),
            c.MODEL_READY.name: model_finding(view),
            c.PREFILL_READY.name: role_finding(view, "prefill"),
            c.DECODE_READY.name: role_finding(view, "decode"),
            c.ROUTER_READY.name: router_finding(view),
            c.ROUTE_READY.name: route_finding(view),
            c.UPDATED.name: updated_finding(view),
            c.ROLLOUT_BLOCKED.name: rollout_blocked_finding(view),
            c.SCALED.name: scaled_finding(view),
            c.SERVING.name: serving_finding(view),
            c.SPEC_EFFECTIVE.name: spec_effective_finding(view),
        }
    present = {name: finding for name, finding in findings.items() if finding is not None}
    return present | {c.READY.name: _ready(present)}


def _ready(findings: dict[str, Finding]) -> Finding:
    """Not True with the worst part's reason. Of equal parts the first one counts, because later
    ones usually follow from it."""
    named = [(part.name, findings[part.name]) for part in c.PARTS if part.name in findings]
    open_ = [(name, part) for name, part in named if part.reason.status != "True"]
    if not open_:
        rolling = c.UPDATED.name in findings and findings[c.UPDATED.name].reason.status != "True"
        return Finding(c.ALL_READY, "a roll-out is in progress: see Updated" if rolling else "")
    name, worst = min(open_, key=lambda item: _rank(item[1].reason))
    fails = any(part.reason.status == "False" for _, part in open_)
    reason = msgspec.structs.replace(worst.reason, status="False" if fails else "Unknown")
    return Finding(reason, f"{name}: {worst.message or worst.reason.meaning}")


def _rank(reason: ConditionReason) -> int:
    """Sort key: problems to repair, states set on purpose, waits, unknown waits."""
    return 2 * reason.waits + (reason.status == "Unknown")


def _condition(
    kind: ConditionKind, finding: Finding, generation: int, before: PoolStatus, now: datetime
) -> Condition:
    last = before.condition(kind.name)
    same = last is not None and last.status == finding.reason.status
    return Condition(
        type=kind.name,
        status=finding.reason.status,
        reason=finding.reason.name,
        message=(finding.message or finding.reason.meaning)[:LONGEST_MESSAGE],
        last_transition_time=last.last_transition_time if last and same else stamp(now),
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
    """The fingerprint of most nodes of the current revision; the last one while any node has it."""
    last = view.before.fingerprint if view.revision == view.before.revision else ""
    counts = Counter(report.fingerprint for report in view.reports())
    if not counts or last in counts:
        return last
    return min(counts, key=lambda fingerprint: (-counts[fingerprint], fingerprint))


def _exact(view: View) -> Exact | None:
    """How exact the ready nodes are together. In a roll-out those of every revision count, because
    all of them serve. The last value holds while the index is not read."""
    nodes = view.observed.nodes
    if nodes is None:
        return view.before.exact
    ready = [report.exact for report in nodes if report.serves]
    return exact_together(ready) if ready else None

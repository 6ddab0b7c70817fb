"""The status of a pool, from what was observed of its children. Pure.

In: the pool or the error in its spec, the children, the previous status. Out: the current status.
It equals the previous one if nothing has changed, and then nothing is written. What cannot be
observed keeps its last value.

View holds the desired and the observed state. Each condition type has one function from a View to a
Finding, or to None if the condition does not apply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime

import msgspec
from msgspec import UNSET, UnsetType

from baton_operator.api.pool import Pool, SpecError
from baton_operator.api.status import (
    AutoscalingStatus,
    Condition,
    ModelStatus,
    PoolStatus,
    RoleStatus,
    is_fresh,
    stamp,
)
from baton_operator.builders.child import ChildIdentity
from baton_operator.builders.nodes import node_gpus
from baton_operator.names import STORE
from baton_operator.state.observed import Observed, ObservedPod, ObservedWorkload, Refusal
from baton_operator.status import conditions as c
from baton_operator.status.conditions import (
    MODEL_FETCH_FAILING,
    NOT_PREPARED,
    POD_PROBLEMS,
    START_OVERDUE,
    Reason,
)
from baton_operator.status.flag_fields import field_of
from baton_protocol.model_source import HubModel
from baton_protocol.store import ROLES, Exact, FetchReport, NodeReport, Role, exact_together

# Seconds after which a pod counts as NotPrepared if no event says why. Attaching a cloud volume
# takes less.
PREPARING_S = 60.0
_REASONS = {reason.name: reason for reason in POD_PROBLEMS}


class Finding(msgspec.Struct, frozen=True):
    """Reason and message of a condition."""

    reason: Reason
    message: str = ""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's desired and observed state, as its conditions need them.

    In: the pool (None while its spec is invalid), what was observed, the previous status. Out:
    numbers and pods. Without a valid spec the Deployments give the desired numbers.

    `now` is the time of day, `now_s` the clock of `FirstSeen`. `revision` is the current one of the
    nodes, "" before the first one was built.
    """

    pool: Pool | None
    observed: Observed
    before: PoolStatus
    now: datetime
    now_s: float
    revision: str
    model: ModelStatus = ModelStatus()

    def desired(self, *components: str) -> int:
        return sum(self._desired(component) for component in components)

    def _desired(self, component: str) -> int:
        if self.pool is None:
            return sum(workload.desired for workload in self.workloads(component))
        spec, managed = self.pool.spec, self.pool.spec.kv_store.owned
        wanted = {
            "prefill": spec.prefill.replicas,
            "decode": spec.decode.replicas,
            "router": spec.router.replicas,
            "kv-index": 1 if managed else 0,
            "kv-data": managed.data_instances if managed else 0,
        }
        return wanted[component]

    def workloads(self, *components: str) -> list[ObservedWorkload]:
        """Workloads of the current revision (if they have one), without surplus data servers."""
        return [
            workload
            for workload in self.observed.workloads
            if workload.component in components
            and workload.revision in ("", self.revision)
            and self._is_wanted(workload)
        ]

    def pods(self, *components: str) -> list[ObservedPod]:
        """Pods of every revision, the current one first; without ending pods, and without data
        servers that only nodes of an old revision use."""
        found = [
            pod
            for pod in self.observed.pods
            if pod.component in components and not pod.ends and self._is_wanted(pod)
        ]
        return sorted(found, key=lambda pod: (not self.is_current(pod), pod.name))

    def _is_wanted(self, item: ObservedWorkload | ObservedPod) -> bool:
        """Whether the spec wants this data server. A surplus one cannot replace another."""
        if self.pool is None or not item.instance:
            return True
        managed = self.pool.spec.kv_store.owned
        return managed is None or item.instance in managed.instances

    def is_current(self, pod: ObservedPod) -> bool:
        return pod.revision in ("", self.revision)

    def ready(self, *components: str) -> int:
        return sum(pod.ready for pod in self.pods(*components))

    def unready(self, *components: str) -> list[ObservedPod]:
        return [pod for pod in self.pods(*components) if not pod.ready]

    @property
    def may_sleep(self) -> bool:
        scaling = self.pool.spec.autoscaling if self.pool is not None else None
        return scaling is not None and scaling.sleeps

    @property
    def asleep(self) -> bool:
        return self.may_sleep and not self.desired("prefill", "decode")

    def suffices(self, *components: str) -> bool:
        """Whether each component has its desired number of ready pods, of any revision."""
        return all(self.ready(name) >= self.desired(name) for name in components)

    def reports(self) -> list[NodeReport]:
        """Reports of the current revision's nodes; empty if the index was not read."""
        nodes = self.observed.nodes or ()
        return [report for report in nodes if report.revision == self.revision]

    def last_condition(self, kind: str) -> Condition | None:
        return self.before.condition(kind)

    def trouble(self, pods: Iterable[ObservedPod], *components: str) -> Finding | None:
        """The worst problem that keeps one of these pods from being ready, or pods of these
        components from being created. A pod that fetches its model is never StartOverdue: the fetch
        has its own progress."""
        unready = list(pods)
        found = [
            Finding(_REASONS[workload.problem], f"{workload.name}: {workload.message}")
            for workload in self.workloads(*components)
            if workload.problem
        ]
        if any(pod.fetch == "running" for pod in unready):
            found = [each for each in found if each.reason is not START_OVERDUE]
        found += [problem for pod in unready if (problem := self._problem(pod))]
        return min(found, key=lambda item: POD_PROBLEMS.index(item.reason), default=None)

    def _problem(self, pod: ObservedPod) -> Finding | None:
        if pod.problem:
            field = field_of(pod.message, pod.component, self.pool) if self.pool else ""
            hint = f"; see {field}" if field else ""
            return Finding(_REASONS[pod.problem], f"{pod.name}: {pod.message}{hint}")
        if not pod.unprepared_since:
            return None
        if self.now_s - pod.seen.unprepared < PREPARING_S:
            return None
        return Finding(NOT_PREPARED, f"{pod.name}: its volumes, secrets or network are not ready")


def revision_now(pool: Pool | None, revision: str, observed: Observed, before: PoolStatus) -> str:
    """The pool's current revision. `revision` is that of the templates; it becomes current only if
    it is applied, so not while the pool is paused or its Secret is refused."""
    refused = any(refusal.child.kind == "Secret" for refusal in observed.refusals)
    return before.revision if pool is None or pool.spec.paused or refused else revision


OLD_NODES = "old nodes are left"
# A download's progress changes all the time, and each change costs a write of the status.
PROGRESS_EVERY_S = 5.0
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_REFUSED = {403: c.APPLY_FORBIDDEN, 404: c.KIND_MISSING}


def applied_finding(view: View) -> Finding:
    if view.pool is None:
        return Finding(c.NOTHING_APPLIED)
    if view.pool.spec.paused:
        return Finding(
            c.PAUSED, "spec.paused is true: the operator applies nothing until it is false"
        )
    if not view.observed.refusals:
        return Finding(c.AS_SPECIFIED)
    refusals = sorted(view.observed.refusals, key=lambda refusal: refusal.child)
    more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    reason = _REFUSED.get(refusals[0].code, c.APPLY_REFUSED)
    return Finding(reason, refusal_words(refusals[0]) + more)


def refusal_words(refusal: Refusal) -> str:
    """The refusal for people. A Secret's message is hidden: it may quote the Secret."""
    child = f"{refusal.child.kind} {refusal.child.name}"
    message = (
        "message hidden because it may contain secret data"
        if refusal.child.kind == "Secret" and not refusal.own_words
        else refusal.message
    )
    return f"{child}: {refusal.code}: {message}"


def store_finding(view: View) -> Finding:
    found = _managed_store(view) if _is_managed(view) else _external_store(view)
    return (_disagreement(view) or found) if found.reason.status == "True" else found


def _is_managed(view: View) -> bool:
    if view.pool is None:
        return bool(view.workloads(*STORE))
    return view.pool.spec.kv_store.owned is not None


def _managed_store(view: View) -> Finding:
    made = [workload.component for workload in view.workloads(*STORE)]
    wanted, ready = view.desired(*STORE), view.ready(*STORE)
    if {*made} == {*STORE} and len(made) >= wanted and view.suffices(*STORE):
        return Finding(c.STORE_ANSWERS, count_words(ready, wanted))
    trouble = view.trouble(view.unready(*STORE), *STORE)
    return _counted(trouble or Finding(c.STARTING), ready, wanted)


def _external_store(view: View) -> Finding:
    """Without an answer of the index, what is known from before holds."""
    problem, last = view.observed.store_problem, view.last_condition(c.STORE_READY.name)
    words, before = problem.words if problem else "", last.reason if last else ""
    if problem is not None and problem.role == "data":
        return Finding(c.EXTERNAL_FAILING if problem.sure else c.EXTERNAL_UNREACHABLE, words)
    if view.observed.nodes is not None:
        return Finding(c.EXTERNAL_ANSWERS)
    silent = before == c.EXTERNAL_ANSWERS.name and view.observed.silent
    if silent or before == c.EXTERNAL_SILENT.name:
        return Finding(c.EXTERNAL_SILENT, words)
    if before == c.EXTERNAL_ANSWERS.name:
        return Finding(c.EXTERNAL_ANSWERS)
    if view.ready("router"):
        return Finding(c.EXTERNAL_IN_USE, words)
    if problem is None:
        return Finding(c.EXTERNAL_UNASKED)
    return Finding(c.EXTERNAL_FAILING if problem.sure else c.EXTERNAL_UNREACHABLE, words)


def _disagreement(view: View) -> Finding | None:
    """A problem that only nodes know: they cannot use a store that is up, or their KV does not
    match. Their last report holds while the index is not read."""
    if view.observed.nodes is None:
        last = view.last_condition(c.STORE_READY.name)
        reasons = (c.NODES_CUT_OFF, c.FINGERPRINTS_DIFFER)
        reason = next((reason for reason in reasons if last and reason.name == last.reason), None)
        return Finding(reason, last.message) if last and reason else None
    reports = [report for report in view.reports() if report.state == "ready"]
    cut_off = sorted(report.node for report in reports if report.store == "down")
    if cut_off:
        names = ", ".join(cut_off[:3]) + (", ..." if len(cut_off) > 3 else "")
        return Finding(c.NODES_CUT_OFF, f"{len(cut_off)} of {len(reports)} nodes: {names}")
    prefill, decode = ({r.fingerprint for r in reports if r.role == role} for role in ROLES)
    if prefill and decode and not prefill & decode:
        kinds = f"prefill {', '.join(sorted(prefill))}; decode {', '.join(sorted(decode))}"
        return Finding(c.FINGERPRINTS_DIFFER, f"fingerprints: {kinds}")
    return None


def model_finding(view: View) -> Finding:
    """The model of the nodes that are needed. In a roll-out new ones are not while old ones
    serve."""
    pods = [pod for pod in view.pods(*ROLES) if view.is_current(pod)]
    if not _is_fetched(view, pods):
        return Finding(c.NOTHING_TO_FETCH)
    if view.suffices(*ROLES) and view.ready(*ROLES):
        return Finding(c.FETCHED)
    if view.asleep:
        return Finding(c.ASLEEP)
    failing = [pod for pod in pods if pod.problem == MODEL_FETCH_FAILING.name]
    if failing:
        return Finding(MODEL_FETCH_FAILING, f"{failing[0].name}: {failing[0].message}")
    if _fetching_pods(view):
        return Finding(c.FETCHING, view.model.progress)
    return Finding(c.FETCHED if any(pod.fetch == "done" for pod in pods) else c.FETCH_NOT_BEGUN)


def _is_fetched(view: View, pods: list[ObservedPod]) -> bool:
    if view.pool is not None:
        return isinstance(view.pool.spec.model.source, HubModel)
    last = view.last_condition(c.MODEL_READY.name)
    held = last is not None and last.reason != c.NOTHING_TO_FETCH.name
    return held or any(pod.fetch for pod in pods)


def _fetching_pods(view: View) -> list[ObservedPod]:
    """Pods of the current revision whose init container runs the fetch."""
    pods = view.pods(*ROLES)
    return [pod for pod in pods if pod.fetch == "running" and view.is_current(pod)]


def model_status(view: View) -> ModelStatus:
    progress, since = _progress(view)
    return ModelStatus(name=_name(view), progress=progress, progress_time=since)


def _name(view: View) -> str:
    """The spec's model name. While the spec is not applied, the nodes' name, else the last one."""
    if view.pool is not None and not view.pool.spec.paused:
        return view.pool.spec.model_name
    models = sorted({report.model for report in view.reports()})
    known = view.before.model.name
    return models[0] if models and known not in models else known


def _progress(view: View) -> tuple[str, str | UnsetType]:
    names = {pod.name for pod in _fetching_pods(view)}
    none: tuple[str, str | UnsetType] = ("", UNSET)
    # Older versions of the operator wrote "" for no time.
    last = view.before.model.progress, view.before.model.progress_time or UNSET
    if not names:
        return none
    if view.observed.fetches is None or is_fresh(last[1] or "", view.now, PROGRESS_EVERY_S):
        return last
    reports = [report for report in view.observed.fetches if report.node in names]
    if not reports:
        return none
    text = progress_words(min(reports, key=_share))
    return last if text == last[0] else (text, stamp(view.now))


def _share(report: FetchReport) -> float:
    """The fetched share; 0 while the total size is unknown."""
    return report.done_bytes / report.total_bytes if report.total_bytes else 0.0


def progress_words(report: FetchReport) -> str:
    """For example "3.1 of 16.4 GiB (19 %)". Never 100 % before the last byte."""
    size, unit = next((pair for pair in _UNITS if report.total_bytes >= pair[0]), _UNITS[-1])
    done = f"{report.done_bytes / size:.1f}"
    if not report.total_bytes and not report.done_bytes:
        return "the hub has not answered yet"
    if not report.total_bytes:
        return f"{report.done_bytes / _UNITS[1][0]:.1f} MiB so far"
    percent = report.done_bytes * 100 // report.total_bytes
    return f"{done} of {report.total_bytes / size:.1f} {unit} ({percent} %)"


def role_finding(view: View, name: Role) -> Finding:
    wanted, ready = view.desired(name), view.ready(name)
    if wanted == 0:
        return Finding(c.NONE_WANTED)
    if ready >= wanted:
        return Finding(c.NODES_READY, count_words(ready, wanted))
    trouble = view.trouble(view.unready(name), name)
    short = name in view.observed.roll.short
    otherwise = Finding(c.GPU_BUDGET_REACHED if short else c.STARTING)
    return _counted(trouble or otherwise, ready, wanted)


def router_finding(view: View) -> Finding:
    wanted, ready = view.desired("router"), view.ready("router")
    if wanted and ready >= wanted:
        return Finding(c.ROUTERS_READY, count_words(ready, wanted))
    alone = view.may_sleep or view.ready(*ROLES)
    waits = c.STARTING if alone else c.WAITING_FOR_NODES
    trouble = view.trouble(view.unready("router"), "router")
    if trouble is not None and trouble.reason is START_OVERDUE and not alone:
        trouble = None  # the router waits for nodes, and they are late
    return _counted(trouble or Finding(waits), ready, wanted)


def route_finding(view: View) -> Finding | None:
    """The state of the routes that the spec wants; others are ignored."""
    kinds: set[str] = {found.kind for found in view.observed.routes}
    if view.pool is not None:
        wanted = {
            "Ingress": view.pool.spec.router.ingress,
            "HTTPRoute": view.pool.spec.router.http_route,
        }
        kinds = {kind for kind, spec in wanted.items() if spec is not None}
    if not kinds:
        return None
    seen = [found for found in view.observed.routes if found.kind in kinds]
    for found in seen:
        if found.accepted is False:
            return Finding(c.ROUTE_REFUSED, f"{found.kind}: {found.message}")
    if {found.kind for found in seen} < kinds:
        return Finding(c.ROUTE_PENDING)
    if any(found.kind == "HTTPRoute" and found.accepted is None for found in seen):
        return Finding(c.ROUTE_PENDING)
    if any(found.accepted is None for found in seen):
        return Finding(c.ROUTE_UNCONFIRMED)
    return Finding(c.ROUTE_ACCEPTED)


def updated_finding(view: View) -> Finding:
    """Old nodes count until they are gone. Kubernetes itself rolls routers and Redis."""
    old, rolling = old_nodes(view), _rolling(view)
    if not old and not rolling:
        return Finding(c.ONE_REVISION)
    fresh = [pod for pod in view.pods(*ROLES) if view.is_current(pod)]
    parts = []
    if old:
        ready = sum(pod.ready for pod in fresh)
        parts.append(f"{old} {OLD_NODES}; {count_words(ready, view.desired(*ROLES))}")
    if rolling:
        parts.append("new pods for " + ", ".join(rolling))
    if view.model.progress:
        parts.append(f"model: {view.model.progress}")
    names = (*ROLES, "router", *STORE)
    unready = [pod for pod in view.unready(*names) if view.is_current(pod)]
    found = view.trouble(unready, *names) or Finding(c.ROLLING_OUT)
    return Finding(found.reason, "; ".join([*parts, *filter(None, [found.message])]))


def old_nodes(view: View) -> int:
    """The number of old pods, or of those that a Deployment would create again, if larger."""
    pods = [pod for pod in view.observed.pods if pod.component in ROLES]
    workloads = [item for item in view.observed.workloads if item.component in ROLES]
    return max(
        sum(not view.is_current(pod) for pod in pods),
        sum(item.desired for item in workloads if item.revision != view.revision),
    )


def rollout_blocked_finding(view: View) -> Finding:
    """The first obstacle. Obstacles that need a person come before those that pass."""
    left = old_nodes(view)
    if not left:
        return Finding(c.NOT_ROLLING)
    observed = view.observed
    if observed.roll.no_room:
        return Finding(c.GPU_BUDGET_TOO_SMALL, observed.roll.no_room)
    new = [pod for pod in view.pods(*ROLES) if view.is_current(pod)]
    trouble = view.trouble([pod for pod in new if not pod.ready], *ROLES)
    if trouble is not None:
        return Finding(c.NEW_NODES_FAILING, f"{trouble.reason.name}: {trouble.message}")
    held = [
        f"{departure.role}: {departure.message}"
        for departure in observed.departures
        if departure.held
    ]
    if held:
        return Finding(c.OLD_NODES_HELD, "; ".join(held))
    ready = count_words(sum(pod.ready for pod in new), view.desired(*ROLES))
    return Finding(c.ROLLING, f"{left} old nodes are left; {ready}")


def _rolling(view: View) -> list[str]:
    workloads = [item for item in view.workloads("router", *STORE) if item.pods]
    return sorted(item.name for item in workloads if not item.rolled)


def scaled_finding(view: View) -> Finding:
    """The marks are on the pods, so this also works for a paused pool."""
    held = [departure for departure in view.observed.departures if departure.held]
    others = [departure for departure in view.observed.departures if not departure.held]
    marked = [pod for pod in view.observed.pods if pod.drain_since and not pod.terminating]
    parts = [f"{departure.role}: {departure.message}" for departure in (*held, *others)]
    parts += [f"{pod.name} since {pod.drain_since}: {pod.drain_reason}" for pod in marked]
    if not parts:
        return Finding(c.NONE_TOO_MANY)
    return Finding(c.DRAIN_HELD if held else c.DRAINING, "; ".join(parts))


def serving_finding(view: View) -> Finding:
    """With an invalid spec the policy is unknown; then a ready router and node suffice."""
    spec = view.pool.spec if view.pool else None
    ready = {name: view.ready(name) for name in ROLES}
    if not any(ready.values()):
        return _without_nodes(view)
    if spec is not None and spec.missing_role_policy != "aggregate":
        effects = {"queue": "new requests wait", "fail": "new requests fail"}
        effect = effects[spec.missing_role_policy]
        if not ready["decode"]:
            return Finding(c.NO_DECODE_NODE, effect)
        if not ready["prefill"] and spec.handoff != "never":
            return Finding(c.NO_PREFILL_NODE, f"{effect} if their prompts need a hand-off")
    if not view.ready("router"):
        return Finding(c.NO_ROUTER)
    return Finding(c.ANSWERING)


def spec_effective_finding(view: View) -> Finding | None:
    """What is valid and yet not what its author expects. All hints are in the message. Those about
    the last valid spec hold while the spec is invalid, because that one is in force."""
    if view.pool is None:
        last = view.last_condition(c.SPEC_EFFECTIVE.name)
        reasons = {reason.name: reason for reason in c.SPEC_EFFECTIVE.reasons}
        known = reasons.get(last.reason) if last else None
        return Finding(known, last.message) if last and known else None
    found = [*_unused_gpus(view.pool), *_shared_hosts(view.observed)]
    if not found:
        return Finding(c.FULL_EFFECT)
    return Finding(found[0].reason, "; ".join(finding.message for finding in found))


def _unused_gpus(pool: Pool) -> Iterator[Finding]:
    used = 1 if pool.spec.engine.kind == "torch" else 0
    for role in ROLES:
        gpus = node_gpus(pool.spec.role(role))
        if gpus > used:
            words = (
                f"spec.{role}.resources.limits: a node has {gpus} GPUs and uses {used}; write "
                + (f"{used}, and more replicas" if used else "none: a simulated engine has no use")
            )
            yield Finding(c.GPUS_UNUSED, words)


def _shared_hosts(observed: Observed) -> Iterator[Finding]:
    for shared in observed.shared_hosts:
        words = f"{shared.field}: pool {shared.pool} routes {shared.host} too"
        yield Finding(c.HOST_SHARED, words)


def sole_operator_finding(view: View) -> Finding:
    operator = view.before.operator
    if operator is None or not operator.other:
        return Finding(c.ONE_OPERATOR, f"managed by {operator.name}" if operator else "")
    return Finding(c.OTHER_OPERATOR, held_words(operator.name, operator.other))


def held_words(holder: str, other: str) -> str:
    return (
        f"operator {holder} manages the pool; operator {other} serves its namespace too and leaves "
        "the pool alone"
    )


def _without_nodes(view: View) -> Finding:
    if not view.may_sleep:
        return Finding(c.NO_NODE)
    if not view.ready("router"):
        return Finding(c.NO_ROUTER)
    return Finding(c.ASLEEP if view.asleep else c.WAKING)


def count_words(ready: int, wanted: int) -> str:
    return f"{ready} of {wanted} ready"


def _counted(finding: Finding, ready: int, wanted: int) -> Finding:
    parts = [count_words(ready, wanted), finding.message]
    return Finding(finding.reason, "; ".join(part for part in parts if part))


LONGEST_MESSAGE = 1000
# The planner's inputs change all the time, and each change costs a write of the status: while
# counts and reason stay the same they are updated only this often.
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
        autoscaling=_autoscaling(view),
        operator=last.operator,
        endpoint=_endpoint(valid) if valid else last.endpoint,
        url=_url(valid, observed.address) if valid else last.url,
        revision=revision,
        fingerprint=_fingerprint(view),
        exact=_exact(view),
    )


def _findings(view: View, error: str) -> dict[str, Finding]:
    """Findings by condition type, without those that do not apply."""
    found: dict[str, Finding | None] = {
        c.VALID.name: Finding(c.SPEC_INVALID, error) if error else Finding(c.SPEC_VALID),
        c.APPLIED.name: applied_finding(view),
        c.SOLE_OPERATOR.name: sole_operator_finding(view),
    }
    if view.pool is not None or view.revision:
        found |= {
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
    present = {name: finding for name, finding in found.items() if finding is not None}
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


def _rank(reason: Reason) -> int:
    """Sort key: problems to repair, states set on purpose, waits, unknown waits."""
    return 2 * reason.waits + (reason.status == "Unknown")


def _condition(
    kind: c.ConditionKind, finding: Finding, generation: int, before: PoolStatus, now: datetime
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
    known = view.before.fingerprint if view.revision == view.before.revision else ""
    counts = Counter(report.fingerprint for report in view.reports())
    if not counts or known in counts:
        return known
    return min(counts, key=lambda fingerprint: (-counts[fingerprint], fingerprint))


def _exact(view: View) -> Exact | None:
    """How exact the ready nodes are together. In a roll-out those of every revision count, because
    all of them serve. The last value holds while the index is not read."""
    nodes = view.observed.nodes
    if nodes is None:
        return view.before.exact
    ready = [report.exact for report in nodes if report.state == "ready"]
    return exact_together(ready) if ready else None


def _endpoint(pool: Pool) -> str:
    """The URL for OpenAI clients inside the cluster, hence with /v1."""
    return _base("http", ChildIdentity(pool, "router").host, pool.spec.router.service.port)


def _url(pool: Pool, address: str) -> str:
    """The URL from outside if there is a route, else the endpoint. It does not include TLS and
    ports that only a Gateway knows."""
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
    """The planner's decision; without one (pool paused or invalid) the last one."""
    last, planned = view.before.autoscaling, view.observed.planned
    spec = view.pool.spec.autoscaling if view.pool is not None else None
    if view.pool is not None and (spec is None or not spec.is_planned):
        return None
    if planned is None:
        return last
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
    if last is None or _gist(last) != _gist(now):
        return now
    if is_fresh(last.time, view.now, NUMBERS_EVERY_S):
        return last
    return msgspec.structs.replace(now, since=last.since)


def _gist(status: AutoscalingStatus) -> tuple[str, int, int, str]:
    return status.mode, status.desired_prefill, status.desired_decode, status.reason

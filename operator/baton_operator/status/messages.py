"""What each condition is to say, from a `View`: one function per type, none that asks anybody.

In: a View. Out: a `Finding`, or None for a condition that does not apply; and the model's status,
of which a condition speaks too.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from baton_operator.api.status import ModelStatus
from baton_operator.names import STORE
from baton_operator.state.observed import ObservedPod, Refusal
from baton_operator.status import conditions as c
from baton_operator.status.conditions import MODEL_FETCH_FAILING, START_OVERDUE
from baton_operator.status.view import Finding, View
from baton_operator.timestamps import is_fresh, stamp
from baton_protocol.model_source import HubModel
from baton_protocol.store import ROLES, FetchReport, Role

OLD_NODES = "old nodes are left"
# A download moves all the time, and each word of it costs a write.
PROGRESS_EVERY_S = 5.0
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_REFUSED = {403: c.APPLY_FORBIDDEN, 404: c.KIND_MISSING}


def applied(view: View) -> Finding:
    if view.pool is None:
        return Finding(c.NOTHING_APPLIED)
    if view.pool.spec.paused:
        return Finding(c.PAUSED, "spec.paused is true: nothing is applied until it is false")
    if not view.observed.refusals:
        return Finding(c.AS_SPECIFIED)
    refusals = sorted(view.observed.refusals, key=lambda refusal: refusal.child)
    more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    reason = _REFUSED.get(refusals[0].code, c.APPLY_REFUSED)
    return Finding(reason, refusal_words(refusals[0]) + more)


def refusal_words(refusal: Refusal) -> str:
    """The API server quotes what it refuses, which is not for everybody in a Secret."""
    child = f"{refusal.child.kind} {refusal.child.name}"
    said = "its message is kept back" if refusal.child.kind == "Secret" else refusal.message
    return f"{child}: {refusal.code}: {said}"


def store(view: View) -> Finding:
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
    if view.observed.nodes is not None:
        return Finding(c.EXTERNAL_ANSWERS)
    said = view.said(c.STORE_READY.name)
    if said is not None and said.reason == c.EXTERNAL_SILENT.name:
        return Finding(c.EXTERNAL_SILENT)
    if said is not None and said.reason == c.EXTERNAL_ANSWERS.name:
        return Finding(c.EXTERNAL_SILENT if view.observed.silent else c.EXTERNAL_ANSWERS)
    return Finding(c.EXTERNAL_IN_USE if view.ready("router") else c.EXTERNAL_UNASKED)


def _disagreement(view: View) -> Finding | None:
    """What only the nodes know: that they cannot use a store which is up. Their last word holds
    while the index is not asked."""
    if view.observed.nodes is None:
        said = view.said(c.STORE_READY.name)
        words = (c.NODES_CUT_OFF, c.FINGERPRINTS_DIFFER)
        reason = next((word for word in words if said and word.name == said.reason), None)
        return Finding(reason, said.message) if said and reason else None
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


def model(view: View) -> Finding:
    """Of the nodes that are needed: a roll-out's are not while the old ones do the work."""
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
    said = view.said(c.MODEL_READY.name)
    held = said is not None and said.reason != c.NOTHING_TO_FETCH.name
    return held or any(pod.fetch for pod in pods)


def _fetching_pods(view: View) -> list[ObservedPod]:
    """Those of the current revision whose init container is at it."""
    pods = view.pods(*ROLES)
    return [pod for pod in pods if pod.fetch == "running" and view.is_current(pod)]


def model_status(view: View) -> ModelStatus:
    progress, since = _progress(view)
    return ModelStatus(name=_name(view), progress=progress, progress_time=since)


def _name(view: View) -> str:
    """What the spec says; while nothing is made from it what the nodes say, else what was said
    last."""
    if view.pool is not None and not view.pool.spec.paused:
        return view.pool.spec.model_name
    said = sorted({report.model for report in view.reports()})
    held = view.before.model.name
    return said[0] if said and held not in said else held


def _progress(view: View) -> tuple[str, str | UnsetType]:
    names = {pod.name for pod in _fetching_pods(view)}
    none: tuple[str, str | UnsetType] = ("", UNSET)
    # An operator of an older version wrote "" for no time.
    held = view.before.model.progress, view.before.model.progress_time or UNSET
    if not names:
        return none
    if view.observed.fetches is None or is_fresh(held[1] or "", view.now, PROGRESS_EVERY_S):
        return held
    reports = [report for report in view.observed.fetches if report.node in names]
    if not reports:
        return none
    words = progress_words(min(reports, key=_share))
    return held if words == held[0] else (words, stamp(view.now))


def _share(report: FetchReport) -> float:
    """0 while nobody knows how much it is."""
    return report.done_bytes / report.total_bytes if report.total_bytes else 0.0


def progress_words(report: FetchReport) -> str:
    """3.1 of 16.4 GiB (19 %). Never 100 % before the last byte."""
    size, unit = next((pair for pair in _UNITS if report.total_bytes >= pair[0]), _UNITS[-1])
    done = f"{report.done_bytes / size:.1f}"
    if not report.total_bytes:
        return f"{report.done_bytes / _UNITS[1][0]:.1f} MiB so far"
    percent = report.done_bytes * 100 // report.total_bytes
    return f"{done} of {report.total_bytes / size:.1f} {unit} ({percent} %)"


def role(view: View, name: Role) -> Finding:
    wanted, ready = view.desired(name), view.ready(name)
    if wanted == 0:
        return Finding(c.NONE_WANTED)
    if ready >= wanted:
        return Finding(c.NODES_READY, count_words(ready, wanted))
    trouble = view.trouble(view.unready(name), name)
    short = name in view.observed.roll.short
    otherwise = Finding(c.GPU_BUDGET_REACHED if short else c.STARTING)
    return _counted(trouble or otherwise, ready, wanted)


def router(view: View) -> Finding:
    wanted, ready = view.desired("router"), view.ready("router")
    if wanted and ready >= wanted:
        return Finding(c.ROUTERS_READY, count_words(ready, wanted))
    alone = view.may_sleep or view.ready(*ROLES)
    waits = c.STARTING if alone else c.WAITING_FOR_NODES
    trouble = view.trouble(view.unready("router"), "router")
    if trouble is not None and trouble.reason is START_OVERDUE and not alone:
        trouble = None  # the nodes are
    return _counted(trouble or Finding(waits), ready, wanted)


def route(view: View) -> Finding | None:
    """What was observed of a route that is wanted no more does not count."""
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


def updated(view: View) -> Finding:
    """Old nodes count to their end. Routers and Redis are rolled by Kubernetes itself."""
    old, rolling = old_nodes(view), _rolling(view)
    if not old and not rolling:
        return Finding(c.ONE_REVISION)
    fresh = [pod for pod in view.pods(*ROLES) if view.is_current(pod)]
    words = []
    if old:
        ready = sum(pod.ready for pod in fresh)
        words.append(f"{old} {OLD_NODES}; {count_words(ready, view.desired(*ROLES))}")
    if rolling:
        words.append("new pods for " + ", ".join(rolling))
    if view.model.progress:
        words.append(f"model: {view.model.progress}")
    names = (*ROLES, "router", *STORE)
    unready = [pod for pod in view.unready(*names) if view.is_current(pod)]
    found = view.trouble(unready, *names) or Finding(c.ROLLING_OUT)
    return Finding(found.reason, "; ".join([*words, *filter(None, [found.message])]))


def old_nodes(view: View) -> int:
    """Those there are, or those that a Deployment would make again."""
    pods = [pod for pod in view.observed.pods if pod.component in ROLES]
    workloads = [item for item in view.observed.workloads if item.component in ROLES]
    return max(
        sum(not view.is_current(pod) for pod in pods),
        sum(item.desired for item in workloads if item.revision != view.revision),
    )


def rollout_blocked(view: View) -> Finding:
    """The first that is in the way. Who has to mend it comes before what the operator waits for."""
    left = old_nodes(view)
    if not left:
        return Finding(c.NOT_ROLLING)
    seen = view.observed
    if seen.roll.no_room:
        return Finding(c.GPU_BUDGET_TOO_SMALL, seen.roll.no_room)
    new = [pod for pod in view.pods(*ROLES) if view.is_current(pod)]
    trouble = view.trouble([pod for pod in new if not pod.ready], *ROLES)
    if trouble is not None:
        return Finding(c.NEW_NODES_FAILING, f"{trouble.reason.name}: {trouble.message}")
    held = [f"{each.role}: {each.words}" for each in seen.departures if each.held]
    if held:
        return Finding(c.OLD_NODES_HELD, "; ".join(held))
    ready = count_words(sum(pod.ready for pod in new), view.desired(*ROLES))
    return Finding(c.ROLLING, f"{left} old nodes are left; {ready}")


def _rolling(view: View) -> list[str]:
    there = [item for item in view.workloads("router", *STORE) if item.pods]
    return sorted(item.name for item in there if not item.rolled)


def scaled(view: View) -> Finding:
    """Who is to go is at the pods, so it can be said also of a pool that is paused."""
    held = [each for each in view.observed.departures if each.held]
    others = [each for each in view.observed.departures if not each.held]
    marked = [pod for pod in view.observed.pods if pod.drain_since and not pod.terminating]
    words = [f"{each.role}: {each.words}" for each in (*held, *others)]
    words += [f"{pod.name} since {pod.drain_since}: {pod.drain_reason}" for pod in marked]
    if not words:
        return Finding(c.NONE_TOO_MANY)
    return Finding(c.DRAIN_HELD if held else c.DRAINING, "; ".join(words))


def serving(view: View) -> Finding:
    """With an invalid spec nobody knows the policy; a ready router says that somebody answers."""
    spec = view.pool.spec if view.pool else None
    ready = {name: view.ready(name) for name in ROLES}
    if not any(ready.values()):
        return _without_nodes(view)
    if spec is not None and spec.missing_role_policy != "aggregate":
        then = {"queue": "new requests wait", "fail": "new requests fail"}
        what = then[spec.missing_role_policy]
        if not ready["decode"]:
            return Finding(c.NO_DECODE_NODE, what)
        if not ready["prefill"] and spec.handoff != "never":
            return Finding(c.NO_PREFILL_NODE, f"{what} if their prompts are to be handed over")
    if not view.ready("router"):
        return Finding(c.NO_ROUTER)
    return Finding(c.ANSWERING)


def _without_nodes(view: View) -> Finding:
    if not view.may_sleep:
        return Finding(c.NO_NODE)
    if not view.ready("router"):
        return Finding(c.NO_ROUTER)
    return Finding(c.ASLEEP if view.asleep else c.WAKING)


def count_words(ready: int, wanted: int) -> str:
    return f"{ready} of {wanted} ready"


def _counted(finding: Finding, ready: int, wanted: int) -> Finding:
    words = [count_words(ready, wanted), finding.message]
    return Finding(finding.reason, "; ".join(word for word in words if word))

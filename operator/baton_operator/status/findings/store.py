"""Condition StoreReady: is the KV store up, and do the nodes use it?

A managed store is seen by its pods, an external one by the operator's own reads of its index. What
only nodes know (they cannot reach the store, or their KV does not match) comes from their reports.
"""

from __future__ import annotations

from baton_operator.names import STORE
from baton_operator.status import conditions as c
from baton_operator.status.view import Finding, View, add_counts, count_words
from baton_protocol.store import ROLES


def store_finding(view: View) -> Finding:
    finding = _managed_store(view) if _is_managed(view) else _external_store(view)
    return (_disagreement(view) or finding) if finding.reason.status == "True" else finding


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
    return add_counts(trouble or Finding(c.STARTING), ready, wanted)


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
    reports = [report for report in view.reports() if report.serves]
    cut_off = sorted(report.node for report in reports if report.store == "down")
    if cut_off:
        names = ", ".join(cut_off[:3]) + (", ..." if len(cut_off) > 3 else "")
        return Finding(c.NODES_CUT_OFF, f"{len(cut_off)} of {len(reports)} nodes: {names}")
    prefill, decode = ({r.fingerprint for r in reports if r.role == role} for role in ROLES)
    if prefill and decode and not prefill & decode:
        kinds = f"prefill {', '.join(sorted(prefill))}; decode {', '.join(sorted(decode))}"
        return Finding(c.FINGERPRINTS_DIFFER, f"fingerprints: {kinds}")
    return None

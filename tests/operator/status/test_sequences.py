"""For any sequence of observations the status stays valid, and events mark changes."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from baton_operator.api.pool import Pool
from baton_operator.api.spec_reader import SpecError
from baton_operator.api.status import PoolStatus
from baton_operator.builders.nodes import revision_of
from baton_operator.state.observed import (
    FirstSeen,
    Observed,
    ObservedPod,
    ObservedRoute,
    ObservedWorkload,
)
from baton_operator.status.conditions import KINDS, PARTS, POD_PROBLEMS
from baton_operator.status.derive import derive_status
from baton_operator.status.events import events_between
from baton_operator.status.findings.rollout import OLD_NODES
from baton_protocol.ids import Fingerprint
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner import observations as o
from tests.support.planner.observations import condition_of

RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
POOLS: list[Pool | SpecError] = [
    o.DEMO,
    o.HUB,
    sample_pool("external"),
    sample_pool("sim", missingRolePolicy="queue", decode={"replicas": 2}),
    sample_pool("sim", paused=True),
    sample_pool("sim", router={"httpRoute": {"parentRefs": [{"name": "public"}]}}),
    SpecError("spec.model: missing"),
]
REVISIONS = [*sorted({revision_of(pool).name for pool in POOLS if isinstance(pool, Pool)}), o.OLD]
COMPONENTS = ("prefill", "decode", "router", "kv-index", "kv-data")
# No pod reports NotPrepared itself: it is derived from `unprepared_since`.
WORKLOADS_PROBLEMS = ("PodsRefused", "StartOverdue")
OWN_PROBLEMS = [
    reason.name
    for reason in POD_PROBLEMS
    if reason.name not in (*WORKLOADS_PROBLEMS, "NotPrepared")
]


@st.composite
def pods(draw: st.DrawFn) -> ObservedPod:
    component = draw(st.sampled_from(COMPONENTS))
    revision = draw(st.sampled_from(REVISIONS)) if component in ("prefill", "decode") else ""
    ready = draw(st.booleans())
    problem = "" if ready else draw(st.sampled_from(["", *OWN_PROBLEMS]))
    return o.pod(
        component,
        draw(st.integers(0, 2)),
        revision,
        ready=ready,
        terminating=draw(st.booleans()),
        problem=problem,
        message=problem and "text",
        fetch=draw(st.sampled_from(["", "waiting", "running", "done"])),
        unprepared_since="" if ready or problem else draw(st.sampled_from(["", o.stamp(-90)])),
        seen=FirstSeen(unprepared=-90.0),
    )


@st.composite
def workloads(draw: st.DrawFn) -> ObservedWorkload:
    component = draw(st.sampled_from(COMPONENTS))
    revision = draw(st.sampled_from(REVISIONS)) if component in ("prefill", "decode") else ""
    problem = draw(st.sampled_from(["", *WORKLOADS_PROBLEMS]))
    return o.workload(
        f"demo-{component}{revision}",
        component,
        draw(st.integers(0, 2)),
        revision,
        current=draw(st.booleans()),
        problem=problem,
        message=problem and "text",
    )


REPORTS = st.builds(
    lambda role, number, **changes: o.report(o.DEMO, role, number, **changes),
    st.sampled_from(["prefill", "decode"]),
    st.integers(0, 2),
    revision=st.sampled_from(REVISIONS),
    fingerprint=st.sampled_from([Fingerprint("a"), Fingerprint("b")]),
    store=st.sampled_from(["up", "down", "none"]),
    model=st.sampled_from(["one", "two"]),
)
FETCHES = st.builds(
    lambda role, number, done: o.fetch(o.HUB, role, done, 9000, number),
    st.sampled_from(["prefill", "decode"]),
    st.integers(0, 2),
    st.integers(0, 9000),
)
ROUTES = st.builds(
    ObservedRoute,
    kind=st.sampled_from(["Ingress", "HTTPRoute"]),
    accepted=st.sampled_from([None, True, False]),
)


Item = TypeVar("Item")


def several(items: st.SearchStrategy[Item]) -> st.SearchStrategy[tuple[Item, ...]]:
    return st.lists(items, max_size=4).map(tuple)


OBSERVATIONS = st.builds(
    Observed,
    workloads=several(workloads()),
    pods=several(pods()),
    refusals=several(
        st.builds(
            o.refusal,
            st.sampled_from(["Secret", "Service"]),
            st.just("x"),
            st.sampled_from([403, 404, 409, 422]),
            st.text(max_size=9),
        )
    ),
    nodes=st.none() | several(REPORTS),
    fetches=st.none() | several(FETCHES),
    routes=several(ROUTES),
    address=st.sampled_from(["", "192.0.2.7"]),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(POOLS), OBSERVATIONS, st.integers(0, 20)), min_size=1, max_size=6
)


@settings(max_examples=150)
@given(STEPS)
def test_any_sequence_keeps_the_status_well_formed(
    steps: list[tuple[Pool | SpecError, Observed, int]],
) -> None:
    before: PoolStatus | None = None
    now = o.NOW
    for generation, (pool, seen, pause) in enumerate(steps):
        now += timedelta(seconds=pause)
        revision = revision_of(pool).name if isinstance(pool, Pool) else ""
        after = derive_status(pool, revision, generation, seen, before, now, 0.0)
        check_form(after)
        check_ready(after)
        check_times(before, after, o.stamp((now - o.NOW).total_seconds()))
        check_events(before, after)
        # The same observation does not change the status.
        assert derive_status(pool, revision, generation, seen, after, now, 0.0) == after
        before = after


def check_form(status: PoolStatus) -> None:
    kinds = {kind.name: kind for kind in KINDS}
    types = [condition.type for condition in status.conditions]
    assert types == [name for name in kinds if name in types]
    assert types[:3] == ["Ready", "Valid", "Applied"]
    for condition in status.conditions:
        assert RFC3339.fullmatch(condition.last_transition_time)
        own = [kinds[condition.type]]
        allowed = [*own, *PARTS] if condition.type == "Ready" else own
        reasons = [reason for kind in allowed for reason in kind.reasons]
        found = {reason.status for reason in reasons if reason.name == condition.reason}
        assert found, condition
        if condition.type != "Ready":
            assert found == {condition.status}, condition


def check_ready(status: PoolStatus) -> None:
    parts = {part.name for part in PARTS}
    statuses = {item.status for item in status.conditions if item.type in parts}
    ready = status.condition("Ready")
    assert ready is not None
    expected = "False" if "False" in statuses else "Unknown" if "Unknown" in statuses else "True"
    assert ready.status == expected


def check_times(before: PoolStatus | None, after: PoolStatus, now: str) -> None:
    for condition in after.conditions:
        was = before.condition(condition.type) if before is not None else None
        same = was is not None and was.status == condition.status
        assert condition.last_transition_time == (
            was.last_transition_time if was is not None and same else now
        )


def check_events(before: PoolStatus | None, after: PoolStatus) -> None:
    """Each event occurs at most once, and only if its condition has changed."""
    reasons = [event.reason for event in events_between(before, after)]
    assert len(reasons) == len(set(reasons))
    assert events_between(after, after) == ()

    def changed(kind: str) -> bool:
        was = before.condition(kind) if before is not None else None
        now = after.condition(kind)
        return (was.status if was else "") != (now.status if now else "")

    conditions = {
        "SpecInvalid": "Valid",
        "ApplyForbidden": "Applied",
        "KindMissing": "Applied",
        "ApplyRefused": "Applied",
        "ModelFetched": "ModelReady",
        "RolloutBlocked": "RolloutBlocked",
        "Ready": "Ready",
    }
    for reason in reasons:
        if reason in ("Created", "Updating"):
            assert before is None or before.revision != after.revision
        elif reason == "RolledOut":
            assert before is not None
            assert OLD_NODES in condition_of(before, "Updated").message
        elif reason == "NotReady":
            was = before.condition("Ready") if before is not None else None
            # While a pool stays not ready, the event reports another problem.
            assert changed("Ready") or (was and was.reason) != condition_of(after, "Ready").reason
        else:
            assert changed(conditions[reason]), reason

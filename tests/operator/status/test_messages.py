"""The reason and message of each condition for different observations."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from baton_operator.api.pool import Pool
from baton_operator.state.observed import FirstSeen, Observed, ObservedPod, ObservedRoute
from baton_protocol.ids import Fingerprint
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner import observations as o
from tests.support.planner.observations import DEMO, HUB, condition_of, observed, status_of, verdict

EXTERNAL = sample_pool("external")
QUEUE = sample_pool("sim", missingRolePolicy="queue")
FAIL = sample_pool("sim", missingRolePolicy="fail")
ALONE = sample_pool("sim", missingRolePolicy="queue", handoff="never")
NO_PREFILL = sample_pool("sim", prefill={"replicas": 0})
TWO_SERVERS = sample_pool("sim", kvStore={"managed": {"dataInstances": 2}})
INGRESS = sample_pool("sim", router={"ingress": {"host": "a.example"}})
ROUTE = sample_pool("sim", router={"httpRoute": {"parentRefs": [{"name": "public"}]}})
# By a node's clock that is an hour ahead; the operator measures durations with its own clock.
AHEAD = "2026-05-04T13:00:00Z"
LONG_AGO, JUST_NOW = FirstSeen(unprepared=-61.0), FirstSeen(unprepared=-30.0)
ROUTER, INDEX, DATA = o.shared_pods(DEMO)


def unready(pod: ObservedPod, problem: str = "", message: str = "", **changes: Any) -> ObservedPod:
    return msgspec.structs.replace(pod, ready=False, problem=problem, message=message, **changes)


def route(
    kind: Literal["Ingress", "HTTPRoute"], accepted: bool | None, message: str = ""
) -> dict[str, Any]:
    return {"routes": (ObservedRoute(kind=kind, accepted=accepted, message=message),)}


def decode(problem: str, message: str = "text", **changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"ready": False, "problem": problem, "message": message} | changes
    return {"decode": o.role_pods(DEMO, "decode", **facts)}


def workload(component: str, problem: str, message: str, pool: Pool = DEMO) -> dict[str, Any]:
    """Return the pool's workloads with this problem reported by the component's controller."""
    made = [
        msgspec.structs.replace(item, problem=problem, message=message)
        if item.component == component
        else item
        for item in o.workloads(pool)
    ]
    return {"workloads": tuple(made)}


def forbidden(component: str) -> dict[str, Any]:
    """Return the pool's workloads with a quota that forbids the component's pods."""
    return workload(component, "PodsRefused", "exceeded quota: gpus")


def overdue(component: str, pool: Pool = DEMO) -> dict[str, Any]:
    return workload(component, "StartOverdue", "not ready after 2400 s", pool)


Row = tuple[str, Pool, dict[str, Any], str, str, str, str]
ROWS: list[Row] = [
    ("refused", DEMO, {"refusals": (o.refusal("Service", "demo-router", 422, "bad port"),)},
     "Applied", "False", "ApplyRefused", "Service demo-router: 422: bad port"),
    ("forbidden", DEMO, {"refusals": (o.refusal("Service", "x", 403, "RBAC"),) * 3},
     "Applied", "False", "ApplyForbidden", "Service x: 403: RBAC (and 2 more)"),
    ("unknown kind", ROUTE, {"refusals": (o.refusal("HTTPRoute", "x", 404, "not found"),)},
     "Applied", "False", "KindMissing", "HTTPRoute x: 404"),
    ("no Redis yet", DEMO, {"others": (ROUTER, unready(INDEX), DATA)},
     "StoreReady", "False", "Starting", "1 of 2 ready"),
    ("one Redis crashes", DEMO, {"others": (ROUTER, INDEX, unready(DATA, "Crashing", "boom"))},
     "StoreReady", "False", "Crashing", "demo-kv-data-0: boom"),
    ("a surplus data server", DEMO,
     {"others": (ROUTER, INDEX, unready(DATA), o.data_pod(1))},
     "StoreReady", "False", "Starting", "1 of 2 ready"),
    ("two data servers", TWO_SERVERS, {}, "StoreReady", "True", "StoreAnswers", "3 of 3 ready"),
    ("one of two not created", TWO_SERVERS,
     {"workloads": o.workloads(TWO_SERVERS)[:-1]},
     "StoreReady", "False", "Starting", "3 of 3 ready"),
    ("nothing created yet", DEMO, {"workloads": (), "others": (ROUTER,)},
     "StoreReady", "False", "Starting", "0 of 2 ready"),
    ("external, silent", EXTERNAL, {"others": ()}, "StoreReady", "Unknown", "ExternalUnasked", ""),
    ("external, in use", EXTERNAL, {}, "StoreReady", "True", "ExternalInUse", ""),
    ("external, answers", EXTERNAL, {"nodes": ()}, "StoreReady", "True", "ExternalAnswers", ""),
    ("cut off", DEMO, {"nodes": o.reports(store="down")},
     "StoreReady", "False", "NodesCutOff", "2 of 2 nodes: demo-decode-"),
    ("cut off, but ending", DEMO, {"nodes": o.reports(store="down", state="draining")},
     "StoreReady", "True", "StoreAnswers", "2 of 2 ready"),
    ("two kinds of KV", DEMO,
     {"nodes": (o.report(DEMO, "prefill", fingerprint=Fingerprint("a")), o.report(DEMO, "decode"))},
     "StoreReady", "False", "FingerprintsDiffer", "prefill a; decode fff"),
    ("in the image", DEMO, {}, "ModelReady", "True", "NothingToFetch", ""),
    ("fetched", HUB, {}, "ModelReady", "True", "Fetched", ""),
    ("no pod yet", HUB, {"prefill": (), "decode": ()},
     "ModelReady", "Unknown", "FetchNotBegun", ""),
    ("fetching", HUB, {"decode": o.role_pods(HUB, "decode", ready=False, fetch="running")},
     "ModelReady", "False", "Fetching", ""),
    ("fetched, loading", HUB, {"decode": o.role_pods(HUB, "decode", ready=False, fetch="done")},
     "ModelReady", "True", "Fetched", ""),
    ("fetch fails", HUB,
     {"decode": o.role_pods(HUB, "decode", ready=False, problem="ModelFetchFailing",
                            message="401", fetch="waiting")},
     "ModelReady", "False", "ModelFetchFailing", ": 401"),
    ("loading", DEMO, decode(""), "DecodeReady", "False", "Starting", "0 of 1 ready"),
    ("no pod", DEMO, {"decode": ()}, "DecodeReady", "False", "Starting", "0 of 1 ready"),
    ("no GPU", DEMO, decode("Unschedulable", "1 Insufficient nvidia.com/gpu"),
     "DecodeReady", "False", "Unschedulable", "Insufficient nvidia.com/gpu"),
    ("quota", DEMO, {"decode": ()} | forbidden("decode"),
     "DecodeReady", "False", "PodsRefused", "exceeded quota: gpus"),
    ("quota of the other role", DEMO, {"decode": ()} | forbidden("prefill"),
     "DecodeReady", "False", "Starting", ""),
    ("starts for too long", DEMO, decode("", "") | overdue("decode"),
     "DecodeReady", "False", "StartOverdue", "not ready after 2400 s"),
    ("starts for too long, with a cause", DEMO, decode("Crashing", "boom") | overdue("decode"),
     "DecodeReady", "False", "Crashing", "boom"),
    ("late, but ready", DEMO, overdue("decode"), "DecodeReady", "True", "NodesReady", "1 of 1"),
    ("a long fetch", HUB,
     {"decode": o.role_pods(HUB, "decode", ready=False, fetch="running")} | overdue("decode", HUB),
     "DecodeReady", "False", "Starting", "0 of 1 ready"),
    ("no volume for a minute", DEMO, decode("", "", unprepared_since=AHEAD, seen=LONG_AGO),
     "DecodeReady", "False", "NotPrepared", "volumes"),
    ("no volume yet", DEMO, decode("", "", unprepared_since=AHEAD, seen=JUST_NOW),
     "DecodeReady", "False", "Starting", "0 of 1 ready"),
    ("ending pods do not count", DEMO, {"decode": o.role_pods(DEMO, "decode", terminating=True)},
     "DecodeReady", "False", "Starting", "0 of 1 ready"),
    ("an old node is enough", DEMO, {"decode": (o.pod("decode", 0, o.OLD),)},
     "DecodeReady", "True", "NodesReady", "1 of 1 ready"),
    ("none wanted", NO_PREFILL, {}, "PrefillReady", "True", "NoneWanted", ""),
    ("router crashes", DEMO, {"others": (unready(ROUTER, "Crashing", "boom"), INDEX, DATA)},
     "RouterReady", "False", "Crashing", "0 of 1 ready; demo-router-0: boom"),
    ("router starts", DEMO, {"others": (unready(ROUTER), INDEX, DATA)},
     "RouterReady", "False", "Starting", "0 of 1 ready"),
    ("router without nodes", DEMO,
     {"prefill": (), "decode": (), "others": (unready(ROUTER), INDEX, DATA)},
     "RouterReady", "False", "WaitingForNodes", "0 of 1 ready"),
    ("router without nodes for long", DEMO,
     {"prefill": (), "decode": (), "others": (unready(ROUTER), INDEX, DATA)} | overdue("router"),
     "RouterReady", "False", "WaitingForNodes", "0 of 1 ready"),
    ("router starts for too long", DEMO,
     {"others": (unready(ROUTER), INDEX, DATA)} | overdue("router"),
     "RouterReady", "False", "StartOverdue", "0 of 1 ready; demo-router: not ready after 2400 s"),
    ("Redis starts for too long", DEMO,
     {"others": (ROUTER, unready(INDEX), DATA)} | overdue("kv-index"),
     "StoreReady", "False", "StartOverdue", "1 of 2 ready; demo-kv-index: not ready after"),
    ("no ingress yet", INGRESS, {}, "RouteReady", "Unknown", "RoutePending", ""),
    ("ingress", INGRESS, route("Ingress", True), "RouteReady", "True", "RouteAccepted", ""),
    ("no address", INGRESS, route("Ingress", None), "RouteReady", "True", "RouteUnconfirmed", ""),
    ("route unanswered", ROUTE, route("HTTPRoute", None),
     "RouteReady", "Unknown", "RoutePending", ""),
    ("route", ROUTE, route("HTTPRoute", True), "RouteReady", "True", "RouteAccepted", ""),
    ("route refused", ROUTE, route("HTTPRoute", False, "NoMatchingParent: no"),
     "RouteReady", "False", "RouteRefused", "HTTPRoute: NoMatchingParent: no"),
    ("answers", DEMO, {}, "Serving", "True", "Answering", ""),
    ("no router", DEMO, {"others": (unready(ROUTER), INDEX, DATA)},
     "Serving", "False", "NoRouter", ""),
    ("no node", DEMO, {"prefill": (), "decode": ()}, "Serving", "False", "NoNode", ""),
    ("decode alone", DEMO, {"prefill": ()}, "Serving", "True", "Answering", ""),
    ("prefill alone", DEMO, {"decode": ()}, "Serving", "True", "Answering", ""),
    ("queue: no decode", QUEUE, {"decode": ()}, "Serving", "False", "NoDecodeNode", "wait"),
    ("fail: no prefill", FAIL, {"prefill": ()}, "Serving", "False", "NoPrefillNode", "fail if"),
    ("no hand-off: no prefill", ALONE, {"prefill": ()}, "Serving", "True", "Answering", ""),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_condition_describes_what_was_observed(row: Row) -> None:
    _, pool, changes, kind, truth, reason, message = row
    status = status_of(observed(pool, **changes), pool)
    assert verdict(status, kind) == (truth, reason)
    assert message in condition_of(status, kind).message


def test_the_message_about_a_refused_secret_is_hidden() -> None:
    seen = observed(refusals=(o.refusal("Secret", "demo-auth", 422, "value hunter2 is wrong"),))
    message = condition_of(status_of(seen), "Applied").message
    assert message == "Secret demo-auth: 422: message hidden because it may contain secret data"


def test_the_worst_of_several_problems_is_reported() -> None:
    pool = sample_pool("sim", decode={"replicas": 2})
    first, second = o.role_pods(pool, "decode")
    pods = unready(first, "Unschedulable", "no room"), unready(second, "OutOfMemory", "512Mi")
    status = status_of(observed(pool, decode=pods), pool)
    assert verdict(status, "DecodeReady") == ("False", "OutOfMemory")


@pytest.mark.parametrize("reason", ["NodesCutOff", "FingerprintsDiffer"])
def test_a_store_problem_that_nodes_report_stays_until_the_next_reports(reason: str) -> None:
    reports = {
        "NodesCutOff": o.reports(store="down"),
        "FingerprintsDiffer": (
            o.report(DEMO, "prefill", fingerprint=Fingerprint("a")),
            o.report(DEMO, "decode"),
        ),
    }
    bad = status_of(observed(nodes=reports[reason]))
    held = status_of(observed(), before=bad, after_s=60)
    assert held.conditions == bad.conditions
    assert verdict(held, "StoreReady") == ("False", reason)
    well = status_of(observed(nodes=o.reports()), before=held, after_s=120)
    assert verdict(well, "StoreReady") == ("True", "StoreAnswers")


def test_an_external_index_stays_ready_after_its_first_answer() -> None:
    answered = status_of(observed(EXTERNAL, nodes=()), EXTERNAL)
    later = status_of(observed(EXTERNAL, others=()), EXTERNAL, answered)
    assert verdict(later, "StoreReady") == ("True", "ExternalAnswers")


def test_old_nodes_are_a_roll_out_until_the_last_has_ended() -> None:
    ending = o.pod("decode", 0, o.OLD, terminating=True)
    seen = observed(decode=(*o.role_pods(DEMO, "decode"), ending))
    status = status_of(seen)
    assert verdict(status, "Updated") == ("False", "RollingOut")
    assert condition_of(status, "Updated").message == "1 old nodes are left; 2 of 2 ready"
    assert verdict(status, "Ready") == ("True", "AllReady")
    assert "roll-out" in condition_of(status, "Ready").message
    assert verdict(status_of(observed(), before=status), "Updated") == ("True", "OneRevision")


def test_a_stuck_roll_out_reports_its_cause_and_the_pool_stays_ready() -> None:
    crashing = o.role_pods(DEMO, "decode", ready=False, problem="Crashing", message="boom")
    status = status_of(observed(decode=(*crashing, o.pod("decode", 0, o.OLD))))
    assert verdict(status, "Updated") == ("False", "Crashing")
    assert condition_of(status, "Updated").message.endswith(": boom")
    assert verdict(status, "Ready") == ("True", "AllReady")


def test_an_old_deployment_with_replicas_is_a_roll_out() -> None:
    old = o.workload("demo-decode-old", "decode", 2, o.OLD)
    status = status_of(observed(workloads=(*o.workloads(DEMO), old)))
    assert verdict(status, "Updated") == ("False", "RollingOut")
    scaled = msgspec.structs.replace(old, desired=0)
    status = status_of(observed(workloads=(*o.workloads(DEMO), scaled)))
    assert verdict(status, "Updated") == ("True", "OneRevision")


@pytest.mark.parametrize("changes", [{"updated": 0}, {"pods": 2}, {"current": False}])
def test_new_pods_of_a_router_are_a_roll_out(changes: dict[str, Any]) -> None:
    made = [item for item in o.workloads(DEMO) if item.component != "router"]
    router = o.workload("demo-router", "router", **changes)
    status = status_of(observed(workloads=(*made, router)))
    assert verdict(status, "Updated") == ("False", "RollingOut")
    assert condition_of(status, "Updated").message == "new pods for demo-router"


def test_a_new_pool_is_no_roll_out() -> None:
    new = [msgspec.structs.replace(item, pods=0, updated=0, ready=0, current=False)
             for item in o.workloads(DEMO)]  # fmt: skip
    for workloads in ((), tuple(new)):
        status = status_of(Observed(workloads=workloads))
        assert verdict(status, "Updated") == ("True", "OneRevision")

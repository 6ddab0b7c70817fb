"""What is read from a pool's objects: pods, workloads, routes, addresses."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.state.readers import read_address, read_pod, read_route, read_workload
from tests.operator.state.bodies import fetcher
from tests.support.kubernetes import pod_bodies as b
from tests.support.kubernetes.pod_bodies import Body, container, pod, terminated, waiting

ACCEPTED: dict[str, Any] = {"Accepted": "True", "ResolvedRefs": "True"}
DENIED = {"reason": "NotAllowedByListeners", "message": "no listener allows namespace serving"}


def test_the_name_component_and_revision_of_a_pod_are_read() -> None:
    seen = read_pod(pod(container(b.RUNNING, ready=True), deletionTimestamp=b.THEN))
    assert (seen.name, seen.component) == ("demo-decode-1a2b3c4d5e-x7k2p", "decode")
    assert (seen.revision, seen.ready, seen.terminating) == ("1a2b3c4d5e", True, True)
    assert read_pod(pod(component="router", revision="")).revision == ""


@pytest.mark.parametrize(
    ("init", "fetch"),
    [
        ((), ""),
        ((container(b.RUNNING, name="other"),), ""),
        ((fetcher(waiting("PodInitializing")),), "waiting"),
        ((fetcher(b.RUNNING),), "running"),
        ((fetcher(terminated(1)),), "waiting"),
        ((fetcher(terminated(0, "Completed")),), "done"),
    ],
)
def test_the_progress_of_the_init_container_is_read(init: tuple[Body, ...], fetch: str) -> None:
    assert read_pod(pod(container(waiting("PodInitializing")), init=init)).fetch == fetch


@pytest.mark.parametrize(
    ("phase", "node", "stage"),
    [
        ("Pending", "", "unplaced"),
        ("Pending", "worker-1", "pending"),
        ("Running", "worker-1", "running"),
        ("Succeeded", "worker-1", "over"),
        ("Failed", "", "over"),
    ],
)
def test_the_stage_of_a_pod_is_read(phase: str, node: str, stage: str) -> None:
    body = pod(status={"phase": phase})
    body["spec"]["nodeName"] = node
    assert read_pod(body).stage == stage


def test_the_drain_mark_and_the_address_of_a_pod_are_read() -> None:
    annotations = {"baton.dev/drain-since": b.THEN, "baton.dev/drain-reason": "it is idle"}
    found = read_pod(pod(container(b.RUNNING, ready=True), annotations=annotations))
    assert (found.drain_since, found.drain_reason, found.ends) == (b.THEN, "it is idle", True)
    found = read_pod(pod(container(b.RUNNING, ready=True), status={"podIP": "10.0.0.7"}))
    assert (found.drain_since, found.address, found.ends) == ("", "10.0.0.7", False)


def test_the_time_of_a_pod_without_volumes_counts_from_its_scheduling() -> None:
    stuck = b.conditions(PodReadyToStartContainers="False", PodScheduled="True")
    assert read_pod(pod(container(b.CREATING), status={"conditions": stuck})).unprepared_since == (
        b.THEN
    )
    assert read_pod(pod(container(b.CREATING))).unprepared_since == ""


def test_the_replica_counts_of_a_workload_are_read() -> None:
    body = b.workload("d", "decode", replicas=3, readyReplicas=1, updatedReplicas=2)
    seen = read_workload(body)
    assert (seen.desired, seen.pods, seen.ready, seen.updated) == (2, 3, 1, 2)
    assert (seen.component, seen.revision, seen.current) == ("decode", "1a2b3c4d5e", True)
    assert (seen.problem, seen.message) == ("", "")


@pytest.mark.parametrize(
    ("args", "holds"), [(None, False), (["router", "--port=1"], False), (["--wake-wait=900"], True)]
)
def test_a_router_holds_requests_if_it_has_the_flag_wake_wait(
    args: list[str] | None, holds: bool
) -> None:
    body = b.workload("r", "router")
    body["spec"]["template"] = {"spec": {"containers": [{"name": "router", "args": args}]}}
    assert read_workload(body).holds is holds


def test_a_new_workload_has_no_pods_and_is_not_current() -> None:
    body = b.workload("d", "decode")
    del body["status"], body["spec"]["replicas"]
    seen = read_workload(body)
    assert (seen.desired, seen.pods, seen.ready, seen.current) == (1, 0, 0, False)


def test_a_workload_whose_pods_are_refused_has_a_problem() -> None:
    message = 'pods "d-x" is forbidden: exceeded quota: gpus, requested: nvidia.com/gpu=1'
    refused = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate"}
    body = b.workload("d", "decode", conditions=[refused | {"message": message}])
    seen = read_workload(body)
    assert (seen.problem, seen.message) == ("PodsRefused", message)


@pytest.mark.parametrize(
    ("status", "reason", "problem"),
    [
        ("False", "ProgressDeadlineExceeded", "StartOverdue"),
        ("True", "ReplicaSetUpdated", ""),
        ("True", "NewReplicaSetAvailable", ""),
        ("Unknown", "DeploymentPaused", ""),
    ],
)
def test_a_workload_whose_pods_are_not_ready_in_time_has_a_problem(
    status: str, reason: str, problem: str
) -> None:
    progress = {"type": "Progressing", "status": status, "reason": reason}
    body = b.workload("d", "decode", conditions=[progress | {"message": "text"}])
    body["spec"]["progressDeadlineSeconds"] = 2400
    seen = read_workload(body)
    assert seen.problem == problem
    assert seen.message == ("not ready after 2400 s" if problem else "")


@pytest.mark.parametrize(
    ("parents", "accepted", "message"),
    [
        ((), None, ""),
        ((b.parent("public", **ACCEPTED),), None, ""),
        ((b.parent("public", **ACCEPTED), b.parent("internal", **ACCEPTED)), True, ""),
        (
            (b.parent("public", **ACCEPTED), b.parent("internal", Accepted=DENIED)),
            False,
            "NotAllowedByListeners: no listener allows namespace serving",
        ),
        ((b.parent("public", 1, Accepted=DENIED),), None, ""),
    ],
    ids=["no answer", "one of two", "both", "one refuses", "of an older spec"],
)
def test_an_http_route_is_accepted_when_all_its_gateways_accept_it(
    parents: tuple[Body, ...], accepted: bool | None, message: str
) -> None:
    seen = read_route(b.http_route(*parents))
    assert (seen.kind, seen.accepted, seen.message) == ("HTTPRoute", accepted, message)


@pytest.mark.parametrize(
    ("status", "accepted"),
    [({}, None), ({"loadBalancer": {"ingress": [{"ip": "192.0.2.7"}]}}, True)],
)
def test_an_ingress_with_an_address_is_accepted(
    status: dict[str, Any], accepted: bool | None
) -> None:
    seen = read_route({"metadata": {}, "spec": {"rules": []}, "status": status})
    assert (seen.kind, seen.accepted) == ("Ingress", accepted)


@pytest.mark.parametrize(
    ("kind", "ingress", "address"),
    [
        ("LoadBalancer", [{"ip": "192.0.2.7"}], "192.0.2.7"),
        ("LoadBalancer", [{"hostname": "lb.example.net"}], "lb.example.net"),
        ("LoadBalancer", [], ""),
        ("ClusterIP", [{"ip": "192.0.2.7"}], ""),
    ],
)
def test_the_address_of_a_load_balancer_is_read(
    kind: str, ingress: list[Body], address: str
) -> None:
    service = {"spec": {"type": kind}, "status": {"loadBalancer": {"ingress": ingress}}}
    assert read_address(service) == address

"""A pool's conditions hold problems that only its pods' events name.

The test writes the events in place of a kubelet and an attach controller.
"""

from __future__ import annotations

import json

from tests.cluster.operators import SIM, Body, Operator, Pool, print_log, until

MISSING = 'MountVolume.SetUp failed for volume "api-keys" : secret "keys" not found'
NO_DISK = 'AttachVolume.Attach failed for volume "pvc-1" : disk is in another zone'


def stuck_pod(pool: Pool, component: str) -> Body:
    """Give a pod of this component the status of a scheduled pod without volumes or network."""
    until(lambda: pool.pods(component=component), f"a pod of {component}")
    body = pool.pods(component=component)[0]
    transition = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    statuses = {"PodScheduled": "True", "PodReadyToStartContainers": "False", "Ready": "False"}
    conditions = [
        {"type": name, "status": status, **transition} for name, status in statuses.items()
    ]
    pool.patch_pod_status(body["metadata"]["name"], {"conditions": conditions})
    return body


def warn(pool: Pool, pod: Body, reason: str, message: str) -> None:
    """Create a warning event of the pod with the core events API, as kubelets do."""
    metadata = pod["metadata"]
    involved = {key: metadata[key] for key in ("name", "namespace", "uid")}
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{reason.lower()}"},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", **involved},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "source": {"component": "kubelet"},
        "firstTimestamp": "2026-01-01T00:00:00Z",
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    pool.kubectl("create", "-f", "-", stdin=json.dumps(event))


def test_pod_events_are_in_the_conditions_and_events_of_a_pool_that_was_never_ready(
    operator: Operator, pool: Pool
) -> None:
    unscheduled = {"podTemplate": {"spec": {"schedulerName": "nobody"}}}
    spec = dict.fromkeys(("router", "prefill", "decode"), unscheduled)
    pool.apply({**SIM, **spec, "kvStore": {"managed": unscheduled}})
    router, decode = stuck_pod(pool, "router"), stuck_pod(pool, "decode")
    warn(pool, router, "FailedMount", MISSING)
    warn(pool, decode, "FailedAttachVolume", NO_DISK)
    until(
        lambda: pool.condition("RouterReady")["reason"] == "ConfigMissing", "the router's condition"
    )
    until(lambda: pool.condition("DecodeReady")["reason"] == "NotPrepared", "the node's condition")
    name, decode_name = router["metadata"]["name"], decode["metadata"]["name"]
    expected = f"0 of 1 ready; {name}: FailedMount: {MISSING}"
    assert pool.condition("RouterReady")["message"] == expected
    assert pool.condition("DecodeReady")["message"].endswith(f"FailedAttachVolume: {NO_DISK}")

    def described() -> str:
        return pool.kubectl("describe", "bpool", pool.name).partition("Events:")[2]

    # The event has the first problem, like condition Ready.
    until(
        lambda: f"NotPrepared: DecodeReady: 0 of 1 ready; {decode_name}: " in described(),
        "the event",
    )
    assert "Created" in described()
    print_log(operator)

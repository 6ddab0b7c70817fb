"""Events of a pool's pods say what its conditions cannot know otherwise.

The events are what a kubelet and an attach controller would write.
"""

from __future__ import annotations

import json

from tests.cluster.operators import SIM, Body, Operator, Pool, print_log, until

MISSING = 'MountVolume.SetUp failed for volume "api-keys" : secret "keys" not found'
NO_DISK = 'AttachVolume.Attach failed for volume "pvc-1" : disk is in another zone'


def stuck_pod(pool: Pool, component: str) -> Body:
    """A pod of that component, placed, of which a kubelet cannot make volumes or network."""
    until(lambda: pool.pods(component=component), f"a pod of {component}")
    body = pool.pods(component=component)[0]
    then = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    said = {"PodScheduled": "True", "PodReadyToStartContainers": "False", "Ready": "False"}
    conditions = [{"type": name, "status": truth, **then} for name, truth in said.items()]
    pool.patch_pod_status(body["metadata"]["name"], {"conditions": conditions})
    return body


def warn(pool: Pool, pod: Body, reason: str, message: str) -> None:
    """By the API that kubelets use."""
    metadata = pod["metadata"]
    about = {key: metadata[key] for key in ("name", "namespace", "uid")}
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{reason.lower()}"},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", **about},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "source": {"component": "kubelet"},
        "firstTimestamp": "2026-01-01T00:00:00Z",
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    pool.kubectl("create", "-f", "-", stdin=json.dumps(event))


def test_what_a_kubelet_says_is_in_the_conditions_and_events_of_a_pool_never_ready(
    operator: Operator, pool: Pool
) -> None:
    nobody = {"podTemplate": {"spec": {"schedulerName": "nobody"}}}
    spec = dict.fromkeys(("router", "prefill", "decode"), nobody)
    pool.apply({**SIM, **spec, "kvStore": {"managed": nobody}})
    router, decode = stuck_pod(pool, "router"), stuck_pod(pool, "decode")
    warn(pool, router, "FailedMount", MISSING)
    warn(pool, decode, "FailedAttachVolume", NO_DISK)
    until(lambda: pool.condition("RouterReady")["reason"] == "ConfigMissing", "the router's")
    until(lambda: pool.condition("DecodeReady")["reason"] == "NotPrepared", "the node's")
    name, decode_name = router["metadata"]["name"], decode["metadata"]["name"]
    told = f"0 of 1 ready; {name}: FailedMount: {MISSING}"
    assert pool.condition("RouterReady")["message"] == told
    assert pool.condition("DecodeReady")["message"].endswith(f"FailedAttachVolume: {NO_DISK}")

    def described() -> str:
        return pool.kubectl("describe", "bpool", pool.name).partition("Events:")[2]

    # Of the first problem, as Ready.
    until(lambda: f"NotPrepared: DecodeReady: 0 of 1 ready; {decode_name}: " in described(), "it")
    assert "Created" in described()
    print_log(operator)

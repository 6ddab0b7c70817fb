"""What a reason of a condition is, and those that a pod may give.

In: nothing. Out: constants, and how others are made. A reason has one status, so that a condition
cannot contradict itself.
"""

from __future__ import annotations

import msgspec

from baton_operator.api.status import Truth


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """`waits`: it passes by itself, as far as anybody can tell."""

    name: str
    status: Truth
    meaning: str
    remedy: str = "nothing"
    waits: bool = False


def true(name: str, meaning: str, remedy: str = "nothing") -> Reason:
    return Reason(name=name, status="True", meaning=meaning, remedy=remedy)


def wait(name: str, meaning: str, remedy: str, status: Truth = "False") -> Reason:
    return Reason(name=name, status=status, meaning=meaning, remedy=remedy, waits=True)


def false(name: str, meaning: str, remedy: str) -> Reason:
    return Reason(name=name, status="False", meaning=meaning, remedy=remedy)


def unknown(name: str, meaning: str, remedy: str) -> Reason:
    return Reason(name=name, status="Unknown", meaning=meaning, remedy=remedy)


# Of pods, worst first; the names are those of `pod_problems` and `observed`.
PODS_REFUSED = false(
    "PodsRefused",
    "Kubernetes lets no pod be made: a quota, a LimitRange, Pod Security or a webhook",
    "the message says which; raise the quota, or change podTemplate or the namespace's labels",
)
OUT_OF_MEMORY = false(
    "OutOfMemory",
    "a container was killed because it needed more memory than it may have",
    "raise `resources.limits.memory`, or give the engine less (`engine.extraArgs`)",
)
MODEL_FETCH_FAILING = false(
    "ModelFetchFailing",
    "the model cannot be fetched; Kubernetes tries again",
    "check `model.uri`, the token in `model.secretRef`, the way to the hub, the room on the volume",
)
CONFIG_INVALID = false(
    "ConfigInvalid",
    "a container says that its flags, variables or files are wrong, and ends",
    "the message is its last line; correct what it names: `extraArgs`, podTemplate, or a Secret",
)
CRASHING = false(
    "Crashing",
    "a container ended, and Kubernetes starts it again",
    "the message has its last words; `kubectl logs --previous` has the rest",
)
CONTAINER_REFUSED = false(
    "ContainerRefused",
    "the container runtime cannot make or start the container",
    "the message is the runtime's; mostly the image or podTemplate is wrong",
)
CONFIG_MISSING = false(
    "ConfigMissing",
    "a Secret or ConfigMap that a container or volume names, or a key of it, is not there",
    "create it in the pool's namespace",
)
IMAGE_PULL_FAILING = false(
    "ImagePullFailing",
    "an image cannot be pulled; Kubernetes tries again",
    "check the image's name, the way to its registry and the pull secrets",
)
VOLUME_MISSING = false(
    "VolumeMissing",
    "a PersistentVolumeClaim is not there, not bound, or on another node",
    "create the claim, or name another one in the pool",
)
NOT_PREPARED = false(
    "NotPrepared",
    "a node cannot make a pod's volumes, secrets or network",
    "the message is the kubelet's; where it has none, `kubectl describe pod` may say more",
)
UNSCHEDULABLE = false(
    "Unschedulable",
    "no node of the cluster has room for a pod; the message is the scheduler's",
    "add nodes (GPUs), or ask for less in `resources`",
)
NODE_LOST = false(
    "NodeLost",
    "a pod's node is silent; after 30 s the pod is made again elsewhere",
    "look after the node",
)
EVICTED = false(
    "Evicted",
    "a pod is over, since its node ran short of something or refused it; another one is made",
    "the message says what was short; ask for it in `resources.requests`",
)
START_OVERDUE = false(
    "StartOverdue",
    "no pod got ready in the time that a start may take (`progressDeadlineSeconds` of the"
    " Deployment), and nothing says why; Kubernetes goes on trying",
    "`kubectl describe pod` and the pod's log say what it waits for: mostly the pull of a large"
    " image, or a readiness probe that fails",
)
POD_PROBLEMS = (
    PODS_REFUSED,
    OUT_OF_MEMORY,
    MODEL_FETCH_FAILING,
    CONFIG_INVALID,
    CRASHING,
    CONTAINER_REFUSED,
    CONFIG_MISSING,
    IMAGE_PULL_FAILING,
    VOLUME_MISSING,
    NOT_PREPARED,
    UNSCHEDULABLE,
    NODE_LOST,
    EVICTED,
    START_OVERDUE,
)

"""Every type and reason of a pool's conditions, with its meaning and the remedy.

In: nothing. Out: constants; `derive` uses no others. A test compares docs/conditions.md with them.
"""

from __future__ import annotations

import msgspec

from baton_operator.api.status import READY as READY_TYPE
from baton_operator.api.status import Truth


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """`waits`: the state is expected to pass without an intervention."""

    name: str
    status: Truth
    meaning: str
    remedy: str = "nothing"
    waits: bool = False


def _true(name: str, meaning: str, remedy: str = "nothing") -> Reason:
    return Reason(name=name, status="True", meaning=meaning, remedy=remedy)


def _wait(name: str, meaning: str, remedy: str, status: Truth = "False") -> Reason:
    return Reason(name=name, status=status, meaning=meaning, remedy=remedy, waits=True)


def _false(name: str, meaning: str, remedy: str) -> Reason:
    return Reason(name=name, status="False", meaning=meaning, remedy=remedy)


def _unknown(name: str, meaning: str, remedy: str) -> Reason:
    return Reason(name=name, status="Unknown", meaning=meaning, remedy=remedy)


# Reasons of pods, worst first; the names are those of `observed`.
PODS_REFUSED = _false(
    "PodsRefused",
    "Kubernetes lets no pod be made: a quota, a LimitRange, Pod Security or a webhook",
    "the message says which; raise the quota, or change podTemplate or the namespace's labels",
)
OUT_OF_MEMORY = _false(
    "OutOfMemory",
    "a container was killed because it needed more memory than it may have",
    "raise `resources.limits.memory`, or give the engine less (`engine.extraArgs`)",
)
MODEL_FETCH_FAILING = _false(
    "ModelFetchFailing",
    "the model cannot be fetched; Kubernetes tries again",
    "check `model.uri`, the token in `model.secretRef`, the way to the hub, the room on the volume",
)
CONFIG_INVALID = _false(
    "ConfigInvalid",
    "a container says that its flags, variables or files are wrong, and ends",
    "the message is its last line; correct what it names: `extraArgs`, podTemplate, or a Secret",
)
CRASHING = _false(
    "Crashing",
    "a container ended, and Kubernetes starts it again",
    "the message has its last words; `kubectl logs --previous` has the rest",
)
CONTAINER_REFUSED = _false(
    "ContainerRefused",
    "the container runtime cannot make or start the container",
    "the message is the runtime's; mostly the image or podTemplate is wrong",
)
CONFIG_MISSING = _false(
    "ConfigMissing",
    "a Secret or ConfigMap that a container or volume names, or a key of it, is not there",
    "create it in the pool's namespace",
)
IMAGE_PULL_FAILING = _false(
    "ImagePullFailing",
    "an image cannot be pulled; Kubernetes tries again",
    "check the image's name, the way to its registry and the pull secrets",
)
VOLUME_MISSING = _false(
    "VolumeMissing",
    "a PersistentVolumeClaim is not there, not bound, or on another node",
    "create the claim, or name another one in the pool",
)
NOT_PREPARED = _false(
    "NotPrepared",
    "a node cannot make a pod's volumes, secrets or network",
    "the message is the kubelet's; where it has none, `kubectl describe pod` may say more",
)
UNSCHEDULABLE = _false(
    "Unschedulable",
    "no node of the cluster has room for a pod; the message is the scheduler's",
    "add nodes (GPUs), or ask for less in `resources`",
)
NODE_LOST = _false(
    "NodeLost",
    "a pod's node is silent; after 30 s the pod is made again elsewhere",
    "look after the node",
)
EVICTED = _false(
    "Evicted",
    "a pod is over, since its node ran short of something or refused it; another one is made",
    "the message says what was short; ask for it in `resources.requests`",
)
START_OVERDUE = _false(
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


class ConditionKind(msgspec.Struct, frozen=True, kw_only=True):
    """A condition type. `source`: the data from which it is derived."""

    name: str
    says: str
    source: str
    absent: str = "while no valid spec was ever seen"
    reasons: tuple[Reason, ...]


ALL_READY = _true("AllReady", "every condition that it sums up is True")
SPEC_VALID = _true("SpecValid", "the spec can be obeyed")
SPEC_INVALID = _false(
    "SpecInvalid",
    "the spec cannot be obeyed; what was made from the last good one stays as it is",
    "the message names the field, its value and what to write; edit the pool",
)
AS_SPECIFIED = _true("AsSpecified", "the API server has taken all that the pool consists of")
PAUSED = _unknown(
    "Paused",
    "`paused` is true: nothing is created, changed or deleted",
    "set `paused` to false when you are done",
)
NOTHING_APPLIED = _unknown(
    "NothingApplied", "nothing is made from an invalid spec", "see condition Valid"
)
APPLY_FORBIDDEN = _false(
    "ApplyForbidden",
    "the operator may not create or change an object (403)",
    "the message says why: the operator's RBAC (the chart makes it), a quota, or a policy",
)
KIND_MISSING = _false(
    "KindMissing",
    "the cluster does not know a kind of object (404)",
    "install what defines it; for HTTPRoute that is the Gateway API",
)
APPLY_REFUSED = _false(
    "ApplyRefused",
    "the API server, or an admission webhook, does not take an object",
    "the message is theirs; mostly podTemplate or annotations are wrong; with 5xx one fails itself",
)
STORE_ANSWERS = _true("StoreAnswers", "all Redis servers of the pool are ready")
EXTERNAL_ANSWERS = _true("ExternalAnswers", "the operator has asked the external index")
EXTERNAL_IN_USE = _true(
    "ExternalInUse", "the operator cannot ask the external index, but a router found nodes by it"
)
EXTERNAL_UNASKED = _wait(
    "ExternalUnasked",
    "nobody has reached the external index yet; the operator may have no way to it",
    "if it stays: check `kvStore.external`, and the routers' logs",
    "Unknown",
)
EXTERNAL_SILENT = _unknown(
    "ExternalSilent",
    "the external index has answered the operator, and no longer does: three times in a row so far",
    "check the index and the way to it; the routers' logs say whether they still reach it",
)
NODES_CUT_OFF = _false(
    "NodesCutOff",
    "nodes report that they cannot use the store; prompts are computed where they are answered",
    "look at the Redis servers: memory, network, and the login of an external store",
)
FINGERPRINTS_DIFFER = _false(
    "FingerprintsDiffer",
    "no prefill node makes KV that a decode node can use: nothing is handed over",
    "give both roles the same `dtype` and device: set `engine.dtype`",
)
NOTHING_TO_FETCH = _true(
    "NothingToFetch", "the model is in the image or on a volume, or there is none"
)
FETCHED = _true("Fetched", "the nodes that are needed have their model")
FETCHING = _wait(
    "Fetching", "a node fetches the model; the message says how far the slowest is", "wait"
)
FETCH_NOT_BEGUN = _wait(
    "FetchNotBegun", "no node has begun to fetch", "see PrefillReady and DecodeReady", "Unknown"
)
NODES_READY = _true("NodesReady", "as many nodes of the role are ready as the spec says")
NONE_WANTED = _true(
    "NoneWanted", "no node of the role is wanted: the spec says 0 replicas, or the pool sleeps"
)
ASLEEP = _true(
    "Asleep",
    "the pool has no nodes, since nobody asked for anything for `scaleToZeroAfterSeconds`; a"
    " request wakes it and is held meanwhile",
)
WAKING = _wait(
    "Waking",
    "nodes of a pool that may sleep are on their way, and requests are held until one is ready",
    "wait; if it stays: see PrefillReady and DecodeReady",
)
GPU_BUDGET_REACHED = _false(
    "GpuBudgetReached",
    "`gpuBudget` leaves no room for more nodes of the role",
    "raise `gpuBudget`, or want fewer nodes",
)
STARTING = _wait(
    "Starting", "pods are being made, start or load their model, and nothing is wrong", "wait"
)
ROUTERS_READY = _true("RoutersReady", "as many routers are ready as the spec says")
WAITING_FOR_NODES = _wait(
    "WaitingForNodes",
    "a router is ready only while a node is, and none is",
    "see PrefillReady and DecodeReady",
)
ROUTE_ACCEPTED = _true("RouteAccepted", "Gateways or an ingress controller have taken the route")
ROUTE_UNCONFIRMED = _true(
    "RouteUnconfirmed",
    "the Ingress is there and has no address yet; some ingress controllers never write one",
)
ROUTE_PENDING = _wait(
    "RoutePending",
    "the route is not there yet, or no Gateway has said anything about it",
    "if it stays: check `router.httpRoute.parentRefs`, and whether a controller serves the Gateway",
    "Unknown",
)
ROUTE_REFUSED = _false(
    "RouteRefused",
    "a Gateway does not take the HTTPRoute",
    "the message is the Gateway's; mostly its listener allows no routes of this namespace",
)
ONE_REVISION = _true("OneRevision", "all pods are made from what the spec says now")
ROLLING_OUT = _wait(
    "RollingOut", "pods made from an older spec are still there, and may serve", "wait"
)
NOT_ROLLING = _false("NotRolling", "no node of an older spec is left", "nothing")
ROLLING = _false(
    "Rolling",
    "old nodes give way to new ones as these get ready; the message says how far it is",
    "wait",
)
GPU_BUDGET_TOO_SMALL = _true(
    "GpuBudgetTooSmall",
    "`gpuBudget` leaves no room for one more node of each role, so the roll-out does not start, or"
    " does not go on; the old nodes serve",
    "raise `gpuBudget`, or want fewer nodes until it is over",
)
NEW_NODES_FAILING = _true(
    "NewNodesFailing",
    "new nodes do not get ready, so no more old ones go and these serve; the message says which"
    " and why",
    "mend what the message says, or set the spec back: then the new nodes go",
)
OLD_NODES_HELD = _true(
    "OldNodesHeld",
    "old nodes are to go and cannot be drained; they serve",
    "as for `DrainHeld` of condition Scaled",
)
NONE_TOO_MANY = _true("NoneTooMany", "no role has more nodes than the spec says")
DRAINING = _wait(
    "Draining",
    "nodes are too many: they take no new requests, end those they have or hand them on, and go;"
    " the message says which and why they",
    "wait",
)
DRAIN_HELD = _false(
    "DrainHeld",
    "nodes are too many and stay, since the operator cannot reach the index or a router to drain"
    " them, or may not mark their pods; none is stopped with requests on it",
    "the message says what is in the way: look after that, or after the NetworkPolicy before it",
)
ANSWERING = _true("Answering", "a router and the nodes that it needs are ready")
NO_ROUTER = _false("NoRouter", "no router is ready: clients get no connection", "see RouterReady")
NO_NODE = _false("NoNode", "no node is ready", "see PrefillReady and DecodeReady")
NO_PREFILL_NODE = _false(
    "NoPrefillNode",
    "no prefill node is ready, and `missingRolePolicy` lets no other do its work",
    "see PrefillReady, or set `missingRolePolicy: aggregate`",
)
NO_DECODE_NODE = _false(
    "NoDecodeNode",
    "no decode node is ready, and `missingRolePolicy` lets no other do its work",
    "see DecodeReady, or set `missingRolePolicy: aggregate`",
)

READY = ConditionKind(
    name=READY_TYPE,
    absent="never",
    says="the pool is as its spec says, and all of it works",
    source="all conditions but Updated, RolloutBlocked, Scaled and Serving: their first problem,"
    " else what they wait for",
    reasons=(ALL_READY,),
)
VALID = ConditionKind(
    name="Valid",
    absent="never",
    says="the spec can be obeyed",
    source="the spec",
    reasons=(SPEC_VALID, SPEC_INVALID),
)
APPLIED = ConditionKind(
    name="Applied",
    absent="never",
    says="the API server has taken what the spec asks for",
    source="the API server's answers to the operator",
    reasons=(AS_SPECIFIED, PAUSED, NOTHING_APPLIED, APPLY_FORBIDDEN, KIND_MISSING, APPLY_REFUSED),
)
STORE_READY = ConditionKind(
    name="StoreReady",
    says="the KV store is up and in use",
    source="the Redis pods of a managed store; the index itself, where the operator can ask it",
    reasons=(
        STORE_ANSWERS,
        EXTERNAL_ANSWERS,
        EXTERNAL_IN_USE,
        EXTERNAL_UNASKED,
        EXTERNAL_SILENT,
        NODES_CUT_OFF,
        FINGERPRINTS_DIFFER,
        STARTING,
        *POD_PROBLEMS,
    ),
)
MODEL_READY = ConditionKind(
    name="ModelReady",
    says="the nodes that are needed have their model",
    source="the nodes' init containers; how far they are is on the index",
    reasons=(NOTHING_TO_FETCH, FETCHED, FETCHING, FETCH_NOT_BEGUN, ASLEEP, MODEL_FETCH_FAILING),
)
PREFILL_READY = ConditionKind(
    name="PrefillReady",
    says="as many prefill nodes are ready as the spec says",
    source="the role's pods",
    reasons=(NODES_READY, NONE_WANTED, GPU_BUDGET_REACHED, STARTING, *POD_PROBLEMS),
)
DECODE_READY = ConditionKind(
    name="DecodeReady",
    says="as many decode nodes are ready as the spec says",
    source="the role's pods",
    reasons=(NODES_READY, NONE_WANTED, GPU_BUDGET_REACHED, STARTING, *POD_PROBLEMS),
)
ROUTER_READY = ConditionKind(
    name="RouterReady",
    says="as many routers are ready as the spec says",
    source="the routers' pods",
    reasons=(ROUTERS_READY, WAITING_FOR_NODES, STARTING, *POD_PROBLEMS),
)
ROUTE_READY = ConditionKind(
    name="RouteReady",
    says="nothing says that the way in from outside does not work",
    source="the status of Ingress and HTTPRoute",
    absent="while the pool has neither `router.ingress` nor `router.httpRoute`",
    reasons=(ROUTE_ACCEPTED, ROUTE_UNCONFIRMED, ROUTE_PENDING, ROUTE_REFUSED),
)
UPDATED = ConditionKind(
    name="Updated",
    says="no pod of an older spec is left",
    source="the revisions of the pods, and the router's and the store's workloads",
    reasons=(ONE_REVISION, ROLLING_OUT, *POD_PROBLEMS),
)
ROLLOUT_BLOCKED = ConditionKind(
    name="RolloutBlocked",
    says="a roll-out has stopped, and the nodes of the older spec serve on",
    source="the nodes' pods, `gpuBudget`, and what routers and index answer the operator",
    reasons=(NOT_ROLLING, ROLLING, GPU_BUDGET_TOO_SMALL, NEW_NODES_FAILING, OLD_NODES_HELD),
)
SCALED = ConditionKind(
    name="Scaled",
    says="no role has more nodes than the spec says",
    source="the marks of the nodes' pods, and what routers and index answer the operator",
    reasons=(NONE_TOO_MANY, DRAINING, DRAIN_HELD),
)
SERVING = ConditionKind(
    name="Serving",
    says="clients get answers",
    source="the pods of routers and nodes, and `missingRolePolicy`",
    reasons=(
        ANSWERING,
        ASLEEP,
        WAKING,
        NO_ROUTER,
        NO_NODE,
        NO_PREFILL_NODE,
        NO_DECODE_NODE,
    ),
)
# In the order in which they are written to the status.
KINDS = (
    READY,
    VALID,
    APPLIED,
    STORE_READY,
    MODEL_READY,
    PREFILL_READY,
    DECODE_READY,
    ROUTER_READY,
    ROUTE_READY,
    UPDATED,
    ROLLOUT_BLOCKED,
    SCALED,
    SERVING,
)
# The conditions that Ready summarises.
PARTS = (
    VALID,
    APPLIED,
    STORE_READY,
    MODEL_READY,
    PREFILL_READY,
    DECODE_READY,
    ROUTER_READY,
    ROUTE_READY,
)

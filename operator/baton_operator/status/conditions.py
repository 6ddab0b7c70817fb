"""Every type and reason of a pool's conditions, with its meaning and the remedy.

In: nothing. Out: constants; the findings use no others. A test compares docs/conditions.md with
them.
"""

from __future__ import annotations

from baton_operator.api.status import READY as READY_TYPE
from baton_operator.status.condition_kinds import (
    ConditionKind,
    false_reason,
    true_reason,
    unknown_reason,
    wait_reason,
)

# Reasons of pods, worst first; the names are those of `observed`.
PODS_REFUSED = false_reason(
    "PodsRefused",
    "Kubernetes refuses to create pods: because of a quota, a LimitRange, Pod Security "
    "or a webhook",
    "see the message; raise the quota, or change podTemplate or the namespace's labels",
)
OUT_OF_MEMORY = false_reason(
    "OutOfMemory",
    "a container was killed because it exceeded its memory limit",
    "raise `resources.limits.memory`, or reduce the engine's memory (`engine.extraArgs`)",
)
MODEL_FETCH_FAILING = false_reason(
    "ModelFetchFailing",
    "fetching the model fails; Kubernetes tries again",
    "check `model.uri`, the token in `model.secretRef`, the connection to the hub, and "
    "the free space on the volume",
)
CONFIG_INVALID = false_reason(
    "ConfigInvalid",
    "a container ended because its flags, variables or files are wrong",
    "the message is its last log line; correct what it names: `extraArgs`, "
    "podTemplate, or a Secret",
)
CRASHING = false_reason(
    "Crashing",
    "a container ended, and Kubernetes restarts it",
    "the message has its last log line; for more see `kubectl logs --previous`",
)
CONTAINER_REFUSED = false_reason(
    "ContainerRefused",
    "the container runtime cannot create or start the container",
    "the message is the runtime's; usually the image or podTemplate is wrong",
)
CONFIG_MISSING = false_reason(
    "ConfigMissing",
    "a Secret or ConfigMap that a container or volume needs, or a key of it, does not exist",
    "create it in the pool's namespace",
)
IMAGE_PULL_FAILING = false_reason(
    "ImagePullFailing",
    "an image cannot be pulled; Kubernetes tries again",
    "check the image's name, the connection to its registry and the pull secrets",
)
VOLUME_MISSING = false_reason(
    "VolumeMissing",
    "a PersistentVolumeClaim does not exist, is not bound, or is bound on another node",
    "create the claim, or name another one in the pool",
)
NOT_PREPARED = false_reason(
    "NotPrepared",
    "a cluster node cannot set up a pod's volumes, secrets or network",
    "the message is the kubelet's; if it is empty, see `kubectl describe pod`",
)
UNSCHEDULABLE = false_reason(
    "Unschedulable",
    "no cluster node has room for a pod; the message is the scheduler's",
    "add cluster nodes (GPUs), or request less in `resources`",
)
NODE_LOST = false_reason(
    "NodeLost",
    "a pod's cluster node does not report to Kubernetes; after 30 s Kubernetes creates "
    "the pod elsewhere",
    "check the cluster node",
)
EVICTED = false_reason(
    "Evicted",
    "a pod was evicted or refused because its cluster node ran short of a resource; "
    "Kubernetes creates another",
    "the message says what was short; request it in `resources.requests`",
)
START_OVERDUE = false_reason(
    "StartOverdue",
    "no pod became ready within the start deadline (`progressDeadlineSeconds` of the "
    "Deployment), for no known reason; Kubernetes keeps trying",
    "`kubectl describe pod` and the pod's log show what it waits for: usually the pull of a "
    "large image, or a failing readiness probe",
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
ALL_READY = true_reason("AllReady", "every condition that it summarizes is True")
SPEC_VALID = true_reason("SpecValid", "the spec is valid")
SPEC_INVALID = false_reason(
    "SpecInvalid",
    "the spec is invalid; objects made from the last valid spec stay as they are",
    "the message names the field, its value and what to write; edit the pool",
)
AS_SPECIFIED = true_reason("AsSpecified", "the API server has accepted all objects of the pool")
PAUSED = unknown_reason(
    "Paused",
    "`paused` is true: the operator creates, changes and deletes nothing",
    "set `paused` to false when you are done",
)
NOTHING_APPLIED = unknown_reason(
    "NothingApplied", "the operator applies nothing from an invalid spec", "see condition Valid"
)
APPLY_FORBIDDEN = false_reason(
    "ApplyForbidden",
    "the operator may not create or change an object (403)",
    "the message says why: the operator's RBAC (from the chart), a quota, or a policy",
)
KIND_MISSING = false_reason(
    "KindMissing",
    "the cluster does not know a kind of object (404)",
    "install its CustomResourceDefinition; for HTTPRoute install the Gateway API",
)
APPLY_REFUSED = false_reason(
    "ApplyRefused",
    "the API server or an admission webhook rejects an object",
    "the message is theirs; usually podTemplate or annotations are wrong; with a 5xx "
    "code the server or webhook itself fails",
)
STORE_ANSWERS = true_reason("StoreAnswers", "all Redis servers of the pool are ready")
EXTERNAL_ANSWERS = true_reason("ExternalAnswers", "the external index answers the operator")
EXTERNAL_IN_USE = true_reason(
    "ExternalInUse", "the operator cannot reach the external index, but a router uses it"
)
EXTERNAL_UNASKED = wait_reason(
    "ExternalUnasked",
    "neither the operator nor a router has tried to reach the external index yet",
    "wait",
    "Unknown",
)
EXTERNAL_FAILING = false_reason(
    "ExternalFailing",
    "a server of the external store cannot be used; the message names it and the cause",
    "correct `kvStore.external`, the Secret that it names, or the server",
)
EXTERNAL_UNREACHABLE = unknown_reason(
    "ExternalUnreachable",
    "a server of the external store does not answer the operator, and no pod of the pool uses it "
    "yet; the message names it and the cause",
    "check the address and the network path to it; if only the operator has no path, it passes "
    "once a router is ready",
)
EXTERNAL_SILENT = unknown_reason(
    "ExternalSilent",
    "the external index answered the operator before, but not the last three times or more",
    "check the index and the network path to it; the routers' logs say whether they still reach it",
)
NODES_CUT_OFF = false_reason(
    "NodesCutOff",
    "nodes report that they cannot use the store; decode nodes compute prompts themselves",
    "check the Redis servers: memory, network, and the login of an external store",
)
FINGERPRINTS_DIFFER = false_reason(
    "FingerprintsDiffer",
    "no prefill node produces KV that a decode node can use, so nothing is handed off",
    "give both roles the same `dtype` and device: set `engine.dtype`",
)
NOTHING_TO_FETCH = true_reason(
    "NothingToFetch", "the model is in the image or on a volume, or the engine needs none"
)
FETCHED = true_reason("Fetched", "the required nodes have their model")
FETCHING = wait_reason(
    "Fetching", "a node fetches the model; the message shows the progress of the slowest", "wait"
)
FETCH_NOT_BEGUN = wait_reason(
    "FetchNotBegun", "no node has started to fetch", "see PrefillReady and DecodeReady", "Unknown"
)
NODES_READY = true_reason("NodesReady", "the number of ready nodes of the role matches the spec")
NONE_WANTED = true_reason(
    "NoneWanted", "the role needs no nodes: the spec says 0 replicas, or the pool is scaled to zero"
)
ASLEEP = true_reason(
    "Asleep",
    "the pool has no nodes, because no request arrived for `scaleToZeroAfterSeconds`; routers "
    "hold the next request and it wakes the pool",
)
NODES_ASLEEP = true_reason(
    "NodesAsleep",
    "no request arrived for `sleepAfterSeconds`, so the engines of all nodes sleep; routers hold "
    "the next request and wake them",
)
WAKING = wait_reason(
    "Waking",
    "the pool scales up from zero, and routers hold requests until a node is ready",
    "wait; if this persists, see PrefillReady and DecodeReady",
)
GPU_BUDGET_REACHED = false_reason(
    "GpuBudgetReached",
    "`gpuBudget` leaves no room for more nodes of the role",
    "raise `gpuBudget`, or reduce the number of nodes",
)
STARTING = wait_reason(
    "Starting", "pods are created, start or load their model, without a known problem", "wait"
)
ROUTERS_READY = true_reason("RoutersReady", "the number of ready routers matches the spec")
WAITING_FOR_NODES = wait_reason(
    "WaitingForNodes",
    "a router is ready only while a node is, and no node is ready",
    "see PrefillReady and DecodeReady",
)
ROUTE_ACCEPTED = true_reason(
    "RouteAccepted", "Gateways or an ingress controller have accepted the route"
)
ROUTE_UNCONFIRMED = true_reason(
    "RouteUnconfirmed",
    "the Ingress has no address yet; some ingress controllers never write one",
)
ROUTE_PENDING = wait_reason(
    "RoutePending",
    "the route does not exist yet, or no Gateway has reported its status",
    "if this persists, check `router.httpRoute.parentRefs`, and whether a controller "
    "serves the Gateway",
    "Unknown",
)
ROUTE_REFUSED = false_reason(
    "RouteRefused",
    "a Gateway rejects the HTTPRoute",
    "the message is the Gateway's; usually its listener allows no routes from this namespace",
)
ONE_REVISION = true_reason("OneRevision", "all pods run the current spec")
ROLLING_OUT = wait_reason("RollingOut", "pods of an older spec still exist, and may serve", "wait")
NOT_ROLLING = false_reason("NotRolling", "no node of an older spec is left", "nothing")
ROLLING = false_reason(
    "Rolling",
    "new nodes replace old ones as they become ready; the message shows the progress",
    "wait",
)
GPU_BUDGET_TOO_SMALL = true_reason(
    "GpuBudgetTooSmall",
    "`gpuBudget` leaves no room for one more node of each role, so the roll-out cannot start "
    "or continue; the old nodes serve",
    "raise `gpuBudget`, or reduce the number of nodes until the roll-out ends",
)
NEW_NODES_FAILING = true_reason(
    "NewNodesFailing",
    "new nodes do not become ready, so the remaining old ones keep serving; the message names "
    "them and the reason",
    "fix what the message names, or restore the spec: then the new nodes are removed",
)
OLD_NODES_HELD = true_reason(
    "OldNodesHeld",
    "the operator cannot drain old nodes; they keep serving",
    "see `DrainHeld` of condition Scaled",
)
NONE_TOO_MANY = true_reason("NoneTooMany", "no role has more nodes than the spec says")
DRAINING = wait_reason(
    "Draining",
    "surplus nodes drain: they take no new requests, finish or hand over those they have, and "
    "end; the message names them and the reason",
    "wait",
)
DRAIN_HELD = false_reason(
    "DrainHeld",
    "surplus nodes stay, because the operator cannot reach the index or a router to drain "
    "them, or may not annotate their pods; it stops no node that has requests",
    "the message names the obstacle: fix it, or the NetworkPolicy that causes it",
)
ANSWERING = true_reason("Answering", "a router and the required nodes are ready")
NO_ROUTER = false_reason(
    "NoRouter", "no router is ready: clients cannot connect", "see RouterReady"
)
NO_NODE = false_reason("NoNode", "no node is ready", "see PrefillReady and DecodeReady")
NO_PREFILL_NODE = false_reason(
    "NoPrefillNode",
    "no prefill node is ready, and `missingRolePolicy` lets no other node do its work",
    "see PrefillReady, or set `missingRolePolicy: aggregate`",
)
NO_DECODE_NODE = false_reason(
    "NoDecodeNode",
    "no decode node is ready, and `missingRolePolicy` lets no other node do its work",
    "see DecodeReady, or set `missingRolePolicy: aggregate`",
)
ONE_OPERATOR = true_reason("OneOperator", "no other operator serves the pool's namespace")
OTHER_OPERATOR = false_reason(
    "OtherOperator",
    "two operators serve the pool's namespace; the message names the one that manages the pool and "
    "the one that leaves it alone",
    "uninstall one of them, or give each its own namespaces: `watchNamespaces`",
)
READY = ConditionKind(
    name=READY_TYPE,
    absent="never",
    meaning="the pool matches its spec, and all parts work",
    source="all conditions except Updated, RolloutBlocked, Scaled, Serving, SpecEffective and "
    "SoleOperator: their first problem, else what they wait for",
    reasons=(ALL_READY,),
)
VALID = ConditionKind(
    name="Valid",
    absent="never",
    meaning="the spec is valid",
    source="the spec",
    reasons=(SPEC_VALID, SPEC_INVALID),
)
APPLIED = ConditionKind(
    name="Applied",
    absent="never",
    meaning="the API server has accepted all objects that the spec requires",
    source="the API server's answers to the operator",
    reasons=(AS_SPECIFIED, PAUSED, NOTHING_APPLIED, APPLY_FORBIDDEN, KIND_MISSING, APPLY_REFUSED),
)
STORE_READY = ConditionKind(
    name="StoreReady",
    meaning="the KV store is up and in use",
    source="the Redis pods of a managed store; the index itself, if the operator can reach it",
    reasons=(
        STORE_ANSWERS,
        EXTERNAL_ANSWERS,
        EXTERNAL_IN_USE,
        EXTERNAL_UNASKED,
        EXTERNAL_FAILING,
        EXTERNAL_UNREACHABLE,
        EXTERNAL_SILENT,
        NODES_CUT_OFF,
        FINGERPRINTS_DIFFER,
        STARTING,
        *POD_PROBLEMS,
    ),
)
MODEL_READY = ConditionKind(
    name="ModelReady",
    meaning="the required nodes have their model",
    source="the nodes' init containers; their progress is in the index",
    reasons=(NOTHING_TO_FETCH, FETCHED, FETCHING, FETCH_NOT_BEGUN, ASLEEP, MODEL_FETCH_FAILING),
)
PREFILL_READY = ConditionKind(
    name="PrefillReady",
    meaning="the number of ready prefill nodes matches the spec",
    source="the role's pods",
    reasons=(NODES_READY, NONE_WANTED, GPU_BUDGET_REACHED, STARTING, *POD_PROBLEMS),
)
DECODE_READY = ConditionKind(
    name="DecodeReady",
    meaning="the number of ready decode nodes matches the spec",
    source="the role's pods",
    reasons=(NODES_READY, NONE_WANTED, GPU_BUDGET_REACHED, STARTING, *POD_PROBLEMS),
)
ROUTER_READY = ConditionKind(
    name="RouterReady",
    meaning="the number of ready routers matches the spec",
    source="the routers' pods",
    reasons=(ROUTERS_READY, WAITING_FOR_NODES, STARTING, *POD_PROBLEMS),
)
ROUTE_READY = ConditionKind(
    name="RouteReady",
    meaning="no known problem prevents access from outside",
    source="the status of Ingress and HTTPRoute",
    absent="if the pool has neither `router.ingress` nor `router.httpRoute`",
    reasons=(ROUTE_ACCEPTED, ROUTE_UNCONFIRMED, ROUTE_PENDING, ROUTE_REFUSED),
)
UPDATED = ConditionKind(
    name="Updated",
    meaning="no pod of an older spec is left",
    source="the revisions of the pods, and the router's and the store's workloads",
    reasons=(ONE_REVISION, ROLLING_OUT, *POD_PROBLEMS),
)
ROLLOUT_BLOCKED = ConditionKind(
    name="RolloutBlocked",
    meaning="a roll-out is blocked, and the nodes of the older spec keep serving",
    source="the nodes' pods, `gpuBudget`, and the answers of routers and index",
    reasons=(NOT_ROLLING, ROLLING, GPU_BUDGET_TOO_SMALL, NEW_NODES_FAILING, OLD_NODES_HELD),
)
SCALED = ConditionKind(
    name="Scaled",
    meaning="no role has more nodes than the spec says",
    source="the drain annotations of the nodes' pods, and the answers of routers and index",
    reasons=(NONE_TOO_MANY, DRAINING, DRAIN_HELD),
)
SERVING = ConditionKind(
    name="Serving",
    meaning="clients get answers",
    source="the pods of routers and nodes, and `missingRolePolicy`",
    reasons=(
        ANSWERING,
        ASLEEP,
        NODES_ASLEEP,
        WAKING,
        NO_ROUTER,
        NO_NODE,
        NO_PREFILL_NODE,
        NO_DECODE_NODE,
    ),
)
FULL_EFFECT = true_reason("FullEffect", "nothing in the spec is known to be wasted or in conflict")
GPUS_UNUSED = false_reason(
    "GpusUnused",
    "a role's nodes have GPUs in their limits that they do not use",
    "write 1 GPU in the role's limits and raise its `replicas`: a node uses one",
)
HOST_SHARED = false_reason(
    "HostShared",
    "another pool routes the same host name, so only one of them gets its requests, or both get "
    "parts of them",
    "give each pool its own host name",
)
SPEC_EFFECTIVE = ConditionKind(
    name="SpecEffective",
    meaning="the pool uses all that its spec asks for",
    source="the spec, and the specs of the other pools",
    reasons=(FULL_EFFECT, GPUS_UNUSED, HOST_SHARED),
)
SOLE_OPERATOR = ConditionKind(
    name="SoleOperator",
    meaning="only one operator serves the pool's namespace",
    source="`status.operator`, where each operator leaves a mark every minute",
    absent="never",
    reasons=(ONE_OPERATOR, OTHER_OPERATOR),
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
    SPEC_EFFECTIVE,
    SOLE_OPERATOR,
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

"""What the pods of nodes, router and Redis have in common.

In: containers, built by their own modules, and the user's podTemplate. Out: pod templates that pass
Pod Security's profile `restricted`, probes, command lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton_operator.api.fields import Resources
from baton_operator.api.pool import Pool
from baton_operator.builders.child import ChildIdentity, Manifest, merged
from baton_operator.names import CREDENTIALS_ANNOTATION

STOP_S = 15  # after DRAIN_S: leave the registry, end the engine, close links; normally 2 s
# A lost cluster node's pods are replaced after this; Kubernetes would take 5 minutes.
UNREACHABLE_S = 30
# A router or a Redis server listens after seconds. On a machine that is short of CPU it may take
# minutes, and a liveness probe that ends it earlier hides what it is about to say of its flags.
START_S = 300
START_PERIOD_S = 2
# Until a cluster node has room for a pod and has pulled its images: what Kubernetes' own default of
# progressDeadlineSeconds leaves for all of a start.
PLACE_S = 600
LONGEST_DEADLINE_S = (1 << 31) - 1
USER = 65532  # "nonroot" of distroless images; no image needs to know it


class Mounts(msgspec.Struct, frozen=True):
    """Volumes, and where one container sees them."""

    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()

    def __add__(self, other: Mounts) -> Mounts:
        return Mounts(self.volumes + other.volumes, self.mounts + other.mounts)


def _from_pod(variable: str, field: str) -> Manifest:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": field}}}


# What a command line gets for $(POD_NAME). Not BATON_...: one that no flag reads is an error.
POD_NAME = _from_pod("POD_NAME", "metadata.name")
POD_IP = _from_pod("POD_IP", "status.podIP")

# The root is read-only.
SCRATCH: Manifest = {"name": "tmp", "mountPath": "/tmp"}

# A resource of pods: what they write to /tmp, to other emptyDirs, and into their logs, of which a
# kubelet keeps 50 MiB per container unless it is told otherwise. Who is over a limit is evicted, so
# limits leave room; nothing is reserved by them.
EPHEMERAL = "ephemeral-storage"
# Of routers and Redis servers, which write nothing but logs and sockets.
LITTLE_STORAGE = "64Mi"
MOST_LITTLE_STORAGE = "1Gi"


def pod_template(
    child: ChildIdentity,
    containers: Sequence[Manifest],
    override: Manifest,
    *,
    grace_s: int,
    scratch: str,
    volumes: Sequence[Manifest] = (),
    init: Sequence[Manifest] = (),
    own_secrets: Sequence[str] = (),
    **spec: Any,
) -> Manifest:
    """No token for the API, no variables about the namespace's services, no root. `scratch` is how
    much may lie in /tmp. `own_secrets` are those of the pool's that not every pod is made with."""
    secrets = child.pool.installation.pull_secrets
    built = {
        "metadata": {
            "labels": child.labels(),
            # Pods keep the variables that they started with: with other secrets, other pods.
            "annotations": {CREDENTIALS_ANNOTATION: child.pool.credentials.digest(*own_secrets)},
        },
        "spec": {
            **({"imagePullSecrets": [{"name": name} for name in secrets]} if secrets else {}),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                # A claim with a large model is not walked through at each start.
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "terminationGracePeriodSeconds": grace_s,
            "tolerations": [_toleration("not-ready"), _toleration("unreachable")],
            **spec,
            **({"initContainers": list(init)} if init else {}),
            "containers": list(containers),
            "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": scratch}}, *volumes],
        },
    }
    return merged(built, override)


def container(pool: Pool, name: str, image: str, **fields: Any) -> Manifest:
    """One container with what all have. Fields that are empty are left out."""
    fields["volumeMounts"] = [SCRATCH, *fields.get("volumeMounts", ())]
    policy = pool.installation.pull_policy
    return {
        "name": name,
        "image": image,
        **({"imagePullPolicy": policy} if policy else {}),
        **{key: value for key, value in fields.items() if value},
        # What it logged last is shown with the pod, and from there in the pool's conditions.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def http_container(
    pool: Pool, name: str, image: str, words: list[str], port: int, **fields: Any
) -> Manifest:
    """A `baton` process. It answers /health as soon as it listens, long before a model is loaded;
    /ready says whether it would serve, and only keeps clients away."""
    return container(
        pool,
        name,
        image,
        command=["baton"],
        args=words,
        ports=[{"name": "http", "protocol": "TCP", "containerPort": port}],
        livenessProbe=http_get("/health") | {"periodSeconds": 10, "timeoutSeconds": 5},
        readinessProbe=http_get("/ready") | {"periodSeconds": 2, "timeoutSeconds": 2},
        **fields,
    )


def http_get(path: str) -> Manifest:
    """What a probe asks of a `baton` process."""
    return {"httpGet": {"path": path, "port": "http"}}


def startup_probe(check: Manifest, seconds: int = START_S) -> Manifest:
    """The other probes begin once `check` has succeeded. The container is restarted where it has
    not after so many seconds."""
    return check | {
        "periodSeconds": START_PERIOD_S,
        "timeoutSeconds": START_PERIOD_S,
        "failureThreshold": -(-seconds // START_PERIOD_S),
    }


def variables(*more: Manifest) -> list[Manifest]:
    """A container's `env`: unlike BATON_..., which flags read, HOME is for libraries."""
    return [{"name": "HOME", "value": "/tmp"}, *more]


def flags(values: Mapping[str, str | int | None]) -> list[str]:
    """Each as one word; None leaves the flag out. Kubernetes puts variables in for $(NAME) in
    arguments, and $$ is how it spells a dollar."""
    given = {name: str(value) for name, value in values.items() if value is not None}
    return literal([f"--{name}={value}" for name, value in given.items()])


def literal(words: Sequence[str]) -> list[str]:
    """Words that Kubernetes shall pass on as they are."""
    return [word.replace("$", "$$") for word in words]


def resources(wanted: Resources, default: Resources) -> Manifest:
    """The user's, and the default of each resource that they name in neither list: as with a
    LimitRange, a request of ours is never above a limit of theirs. Quantities as text: a number
    would come back from the API as one."""
    named = {*wanted.requests, *wanted.limits}
    lists = {
        "requests": (default.requests, wanted.requests),
        "limits": (default.limits, wanted.limits),
    }
    found = {
        name: {
            **{resource: str(amount) for resource, amount in ours.items() if resource not in named},
            **{resource: str(amount) for resource, amount in theirs.items()},
        }
        for name, (ours, theirs) in lists.items()
    }
    return {name: amounts for name, amounts in found.items() if amounts}


def scratch_size(wanted: Resources, default: str) -> str:
    """Of /tmp: the user's limit of ephemeral storage, so that one field raises both."""
    return str(wanted.limits.get(EPHEMERAL, default))


def apart(labels: Mapping[str, str], *same: str) -> Manifest:
    """An affinity: rather on another cluster node than pods with these labels, and with the pod's
    own values of the labels `same` (Kubernetes 1.30 leaves `same` out)."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": dict(labels)},
        **({"matchLabelKeys": list(same)} if same else {}),
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def deadline_s(template: Manifest, before_s: int = 0) -> int:
    """A Deployment's progressDeadlineSeconds: until a pod is placed, what it does before its
    containers start (`before_s`), and as long as their startup probes give them, also those of a
    podTemplate."""
    probes = [one.get("startupProbe") or {} for one in template["spec"].get("containers") or ()]
    starts = [_number(probe, "initialDelaySeconds", 0) + _tries_s(probe) for probe in probes]
    return min(PLACE_S + before_s + max(starts, default=0), LONGEST_DEADLINE_S)


def _tries_s(probe: Manifest) -> int:
    """With Kubernetes' own defaults."""
    if not probe:
        return 0
    return _number(probe, "failureThreshold", 3) * _number(probe, "periodSeconds", 10)


def _number(probe: Manifest, field: str, default: int) -> int:
    """Anything else than a number is for the API server to refuse."""
    value = probe.get(field)
    return value if isinstance(value, int) else default


def _toleration(condition: str) -> Manifest:
    return {
        "key": f"node.kubernetes.io/{condition}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": UNREACHABLE_S,
    }

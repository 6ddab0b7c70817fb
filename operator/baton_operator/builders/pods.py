"""What the pods of nodes, routers and Redis share.

In: containers, built by their own modules, and the user's podTemplate. Out: pod templates that pass
the Pod Security level "restricted", probes, command lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.api.resources import Resources
from baton_operator.builders.child import ChildIdentity, Manifest
from baton_operator.builders.overrides import merge_template
from baton_operator.names import CREDENTIALS_ANNOTATION

STOP_S = 15  # seconds after DRAIN_S: deregister, stop the engine, close links; normally 2 s
# Pods of a lost cluster node are replaced after this many seconds; Kubernetes' default is 5
# minutes.
UNREACHABLE_S = 30
# A router or Redis server listens within seconds. On an overloaded machine it may take minutes, and
# an earlier kill by the liveness probe would hide its error message about wrong flags.
START_S = 300
START_PERIOD_S = 2
# Seconds until a pod is scheduled and its images are pulled: Kubernetes' default
# progressDeadlineSeconds for a whole start.
PLACE_S = 600
LONGEST_DEADLINE_S = (1 << 31) - 1
USER = 65532  # "nonroot" of distroless images; images need no entry for it
# For $(POD_NAME) in command lines. Not BATON_...: `baton` rejects such a variable without a flag.
POD_NAME: Manifest = {
    "name": "POD_NAME",
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
}
POD_IP: Manifest = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
# The root file system is read-only.
SCRATCH: Manifest = {"name": "tmp", "mountPath": "/tmp"}
# Covers /tmp, other emptyDirs, and logs, of which a kubelet keeps 50 MiB per container by default.
# A pod above its limit is evicted, so limits are generous; they reserve nothing.
EPHEMERAL = "ephemeral-storage"
# For routers and Redis servers, which write only logs and sockets.
LITTLE_STORAGE = "64Mi"
MOST_LITTLE_STORAGE = "1Gi"


class Mounts(msgspec.Struct, frozen=True):
    """Volumes, and their mounts in one container."""

    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()

    def __add__(self, other: Mounts) -> Mounts:
        return Mounts(self.volumes + other.volumes, self.mounts + other.mounts)


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
    """A pod template without API token, service variables and root. `scratch` is the size of /tmp.
    `own_secrets` are secrets of the pool that not every pod uses."""
    secrets = child.pool.installation.pull_secrets
    built = {
        "metadata": {
            "labels": child.labels(),
            # Pods read secrets at their start, so changed secrets must replace the pods.
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
                # Otherwise the kubelet would walk a claim with a large model at each start.
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
    return merge_template(built, override)


def container(pool: Pool, name: str, image: str, **fields: Any) -> Manifest:
    """A container with the common fields. Empty fields are left out."""
    fields["volumeMounts"] = [SCRATCH, *fields.get("volumeMounts", ())]
    policy = pool.installation.pull_policy
    return {
        "name": name,
        "image": image,
        **({"imagePullPolicy": policy} if policy else {}),
        **{key: value for key, value in fields.items() if value},
        # The end of its log appears in the pod's status, and in the pool's conditions.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def http_container(
    pool: Pool, name: str, image: str, args: list[str], port: int, **fields: Any
) -> Manifest:
    """The container of a `baton` process. /health succeeds as soon as it listens, long before a
    model is loaded; /ready says whether it can serve, and only keeps clients away."""
    return container(
        pool,
        name,
        image,
        command=["baton"],
        args=args,
        ports=[{"name": "http", "protocol": "TCP", "containerPort": port}],
        livenessProbe=http_get("/health") | {"periodSeconds": 10, "timeoutSeconds": 5},
        readinessProbe=http_get("/ready") | {"periodSeconds": 2, "timeoutSeconds": 2},
        **fields,
    )


def http_get(path: str) -> Manifest:
    """An HTTP probe of a `baton` process."""
    return {"httpGet": {"path": path, "port": "http"}}


def startup_probe(check: Manifest, seconds: int = START_S) -> Manifest:
    """The other probes start once `check` has succeeded. The container is restarted if that takes
    more than `seconds`."""
    return check | {
        "periodSeconds": START_PERIOD_S,
        "timeoutSeconds": START_PERIOD_S,
        "failureThreshold": -(-seconds // START_PERIOD_S),
    }


def variables(*more: Manifest) -> list[Manifest]:
    """A container's `env`. HOME is for libraries; flags read BATON_... variables."""
    return [{"name": "HOME", "value": "/tmp"}, *more]


def flags(values: Mapping[str, str | int | None]) -> list[str]:
    """One argument per flag; None leaves the flag out. A $ is doubled, because Kubernetes expands
    $(NAME) in arguments."""
    given = {name: str(value) for name, value in values.items() if value is not None}
    return literal([f"--{name}={value}" for name, value in given.items()])


def literal(args: Sequence[str]) -> list[str]:
    """Arguments escaped so that Kubernetes passes them on unchanged."""
    return [arg.replace("$", "$$") for arg in args]


def resources(wanted: Resources, default: Resources) -> Manifest:
    """The user's resources, plus the defaults of those that are in neither of the user's lists, so
    a default request never exceeds a user's limit. Quantities are strings, as the API returns
    them."""
    named = {*wanted.requests, *wanted.limits}
    lists = {
        "requests": (default.requests, wanted.requests),
        "limits": (default.limits, wanted.limits),
    }
    lists_by_name = {
        name: {
            **{resource: str(amount) for resource, amount in ours.items() if resource not in named},
            **{resource: str(amount) for resource, amount in theirs.items()},
        }
        for name, (ours, theirs) in lists.items()
    }
    return {name: amounts for name, amounts in lists_by_name.items() if amounts}


def scratch_size(wanted: Resources, default: str) -> str:
    """The size of /tmp: the user's limit of ephemeral storage, so that one field raises both."""
    return str(wanted.limits.get(EPHEMERAL, default))


def apart(labels: Mapping[str, str], *same: str) -> Manifest:
    """Pod anti-affinity (preferred) to pods with these labels, and with the pod's own values of the
    labels `same`, on the same cluster node. Kubernetes 1.30 ignores `same`."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": dict(labels)},
        **({"matchLabelKeys": list(same)} if same else {}),
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def deadline_s(template: Manifest, before_s: int = 0) -> int:
    """A Deployment's progressDeadlineSeconds: the time for scheduling, for what happens before its
    containers start (`before_s`), and for their startup probes, including those of a
    podTemplate."""
    probes = [
        container.get("startupProbe") or {}
        for container in template["spec"].get("containers") or ()
    ]
    starts = [_number(probe, "initialDelaySeconds", 0) + _tries_s(probe) for probe in probes]
    return min(PLACE_S + before_s + max(starts, default=0), LONGEST_DEADLINE_S)


def _tries_s(probe: Manifest) -> int:
    """With Kubernetes' defaults for missing fields."""
    if not probe:
        return 0
    return _number(probe, "failureThreshold", 3) * _number(probe, "periodSeconds", 10)


def _number(probe: Manifest, field: str, default: int) -> int:
    """The API server rejects a value that is not a number."""
    value = probe.get(field)
    return value if isinstance(value, int) else default


def _toleration(condition: str) -> Manifest:
    return {
        "key": f"node.kubernetes.io/{condition}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": UNREACHABLE_S,
    }

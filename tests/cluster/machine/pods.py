"""Manifests of pods for the tests of the cluster itself.

In: a command. Out: a pod or a deployment as restricted as Baton's own: not root, a read-only root
file system, no capability.
"""

from __future__ import annotations

from typing import Any

from tests.cluster.machine.images import SIM_IMAGE

Manifest = dict[str, Any]


def pod_spec(*command: str, image: str = SIM_IMAGE, **container: Any) -> Manifest:
    return {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "containers": [
            {
                "name": "main",
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": list(command),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                **container,
            }
        ],
    }


def pod(name: str, spec: Manifest, **more: Any) -> Manifest:
    """A pod that ends when its command ends."""
    spec = {"restartPolicy": "Never", **spec, **more}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def deployment(name: str, spec: Manifest, replicas: int) -> Manifest:
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }

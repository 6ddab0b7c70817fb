"""The cluster's DNS: CoreDNS as a process beside the control plane, on the address of `core`.

It resolves only the cluster's own names and refuses all others at once, because the cluster cannot
reach other networks.
"""

from __future__ import annotations

import json
from pathlib import Path

_COREFILE = """\
cluster.local:53 {{
    bind {address}
    errors
    kubernetes cluster.local {{
        kubeconfig {kubeconfig} test
        ttl 1
    }}
}}
"""

_READS = [
    {"apiGroups": [""], "resources": ["services", "namespaces", "pods"]},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]},
]


def write_corefile(path: Path, address: str, kubeconfig: Path) -> Path:
    path.write_text(_COREFILE.format(address=address, kubeconfig=kubeconfig))
    return path


def rights() -> str:
    """Manifests that grant CoreDNS the reads that it needs."""
    group = "rbac.authorization.k8s.io"
    metadata = {"name": "test:dns"}
    role = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRole",
        "metadata": metadata,
        "rules": [{**what, "verbs": ["list", "watch"]} for what in _READS],
    }
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": metadata,
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "test:dns"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "system:dns"}],
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [role, binding]})

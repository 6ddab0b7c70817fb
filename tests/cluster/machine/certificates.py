"""Certificates of a cluster's components, and kubeconfigs that use them.

In: the certificates' holders. Out: NAME.crt and NAME.key in a folder, signed by ca.crt (the one of
front-proxy by its own authority, as the aggregation layer requires), and sa.key and sa.pub.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Holder:
    """The subject of a certificate. `name` is AUTHORITY/FILE, by the names of their files."""

    name: str
    common_name: str
    organisation: str = ""
    addresses: tuple[str, ...] = ()

    def line(self) -> str:
        parts = (self.name, self.common_name, self.organisation, ",".join(self.addresses))
        return "|".join(parts) + "\n"


def control_plane_holders(address: str, first_service_address: str) -> list[Holder]:
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    names += ["kubernetes.default.svc.cluster.local", "localhost"]
    addresses = ("127.0.0.1", address, first_service_address)
    components = ("kube-controller-manager", "kube-scheduler", "kube-proxy", "dns")
    return [
        Holder("ca/apiserver", "kube-apiserver", "", (*names, *addresses)),
        Holder("ca/apiserver-kubelet-client", "kube-apiserver-kubelet-client", "system:masters"),
        Holder("ca/admin", "admin", "system:masters"),
        *(Holder(f"ca/{name}", f"system:{name}") for name in components),
        Holder("front-proxy-ca/front-proxy-client", "front-proxy-client"),
    ]


def node_holder(name: str, address: str) -> Holder:
    return Holder(f"ca/{name}", f"system:node:{name}", "system:nodes", (name, address))


def write_certificates(programs: Path, folder: Path, holders: Iterable[Holder]) -> None:
    folder.mkdir(parents=True)
    lines = "".join(holder.line() for holder in holders)
    subprocess.run([programs / "certs", folder], input=lines, text=True, check=True)


def write_kubeconfig(path: Path, server: str, certificates: Path, name: str) -> Path:
    """Write a kubeconfig in JSON, which is YAML too. It refers to the certificates' files."""
    authority, certificate, key = (
        str(certificates / file) for file in ("ca.crt", f"{name}.crt", f"{name}.key")
    )
    cluster = {"server": server, "certificate-authority": authority}
    user = {"client-certificate": certificate, "client-key": key}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
        "current-context": "test",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path

"""Names, labels and owner of whatever a pool owns.

In: a pool and what the child is in it. Out: the metadata of its manifest and of its pods. Selectors
use labels of our own domain, which no other tool sets; app.kubernetes.io's are for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from baton_operator.pool import API_VERSION, KIND, Pool

Manifest = dict[str, Any]
Component = Literal["auth", "prefill", "decode", "router", "kv-index", "kv-data"]
POOL_LABEL = "baton.dev/pool"
COMPONENT_LABEL = "baton.dev/component"
REVISION_LABEL = "baton.dev/revision"


class Child(msgspec.Struct, frozen=True):
    pool: Pool
    component: Component
    revision: str = ""

    @property
    def name(self) -> str:
        name = f"{self.pool.name}-{self.component}"
        return f"{name}-{self.revision}" if self.revision else name

    @property
    def host(self) -> str:
        """Its Service's name, for any namespace and any cluster domain."""
        return f"{self.name}.{self.pool.namespace}.svc"

    def selector(self) -> dict[str, str]:
        """Never to be changed: Kubernetes refuses another selector for an existing object."""
        chosen = {POOL_LABEL: self.pool.name, COMPONENT_LABEL: self.component}
        return chosen | ({REVISION_LABEL: self.revision} if self.revision else {})

    def labels(self) -> dict[str, str]:
        return self.selector() | {
            "app.kubernetes.io/name": "baton",
            "app.kubernetes.io/instance": self.pool.name,
            "app.kubernetes.io/component": self.component,
            "app.kubernetes.io/managed-by": "baton-operator",
        }

    def metadata(self, annotations: Mapping[str, str] | None = None) -> Manifest:
        """The owner reference is what deletes a child: no finalizers."""
        owner = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.pool.name,
            "uid": self.pool.uid,
            "controller": True,
        }
        return {
            "name": self.name,
            "namespace": self.pool.namespace,
            "labels": self.labels(),
            **({"annotations": dict(annotations)} if annotations else {}),
            "ownerReferences": [owner],
        }

    def workload(self, kind: str, template: Manifest, **spec: Any) -> Manifest:
        """A Deployment or StatefulSet of pods made from `template`."""
        selector = {"matchLabels": self.selector()}
        return {
            "apiVersion": "apps/v1",
            "kind": kind,
            "metadata": self.metadata(),
            "spec": {**spec, "selector": selector, "template": template},
        }

    def service(
        self, port_name: str, port: int, annotations: Mapping[str, str] | None = None, **spec: Any
    ) -> Manifest:
        """A Service on the pods' port of that name. Ports are owned by number and protocol, so
        the protocol is said."""
        ports = [{"name": port_name, "protocol": "TCP", "port": port, "targetPort": port_name}]
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self.metadata(annotations),
            "spec": {**spec, "selector": self.selector(), "ports": ports},
        }

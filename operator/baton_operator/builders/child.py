"""Names, labels and owner of a pool's objects.

In: a pool and the child's component. Out: the metadata of its manifest and of its pods. Selectors
use labels of our own domain, which no other tool sets; the app.kubernetes.io labels are for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.names import (
    API_VERSION,
    COMPONENT_LABEL,
    INSTANCE_LABEL,
    POOL_KIND,
    POOL_LABEL,
    REVISION_LABEL,
    Component,
    child_name,
)
from baton_protocol.store import Role

Manifest = dict[str, Any]


class NodeRevision(msgspec.Struct, frozen=True):
    """The current revision of a pool's nodes. `name`: hex digits for names and labels. `gpus`: GPUs
    per node of each role, including those of its podTemplate."""

    name: str
    gpus: dict[Role, int]


class ChildIdentity(msgspec.Struct, frozen=True):
    """Identifies a child. Nodes have a revision. Data servers of the store, which are not
    interchangeable, have an instance."""

    pool: Pool
    component: Component
    revision: str = ""
    instance: str = ""

    @property
    def name(self) -> str:
        parts = (child_name(self.pool.name, self.component), self.revision, self.instance)
        return "-".join(part for part in parts if part)

    @property
    def host(self) -> str:
        """The name of its Service, valid in any namespace and with any cluster domain."""
        return f"{self.name}.{self.pool.namespace}.svc"

    def selector(self) -> dict[str, str]:
        """Must never change: Kubernetes refuses a new selector for an existing Deployment."""
        chosen = {
            POOL_LABEL: self.pool.name,
            COMPONENT_LABEL: self.component,
            REVISION_LABEL: self.revision,
            INSTANCE_LABEL: self.instance,
        }
        return {label: value for label, value in chosen.items() if value}

    def labels(self) -> dict[str, str]:
        return self.selector() | {
            "app.kubernetes.io/name": "baton",
            "app.kubernetes.io/instance": self.pool.name,
            "app.kubernetes.io/component": self.component,
            "app.kubernetes.io/managed-by": "baton-operator",
        }

    def metadata(self, annotations: Mapping[str, str] | None = None) -> Manifest:
        """The owner reference lets Kubernetes delete the child with its pool, without
        finalizers."""
        owner = {
            "apiVersion": API_VERSION,
            "kind": POOL_KIND,
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

    def deployment(self, template: Manifest, *, deadline_s: int, **spec: Any) -> Manifest:
        """A Deployment of pods from `template`. It counts as failing if none of its pods became
        ready for `deadline_s`."""
        selector = {"matchLabels": self.selector()}
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": self.metadata(),
            "spec": {
                **spec,
                "progressDeadlineSeconds": deadline_s,
                "selector": selector,
                "template": template,
            },
        }

    def service(
        self, port_name: str, port: int, annotations: Mapping[str, str] | None = None, **spec: Any
    ) -> Manifest:
        """A Service for the pods' port of that name. Field managers own ports by number and
        protocol, so the protocol is explicit."""
        ports = [{"name": port_name, "protocol": "TCP", "port": port, "targetPort": port_name}]
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self.metadata(annotations),
            "spec": {**spec, "selector": self.selector(), "ports": ports},
        }

"""Names, labels and owner of whatever a pool owns.

In: a pool and what the child is in it. Out: the metadata of its manifest and of its pods. Selectors
use labels of our own domain, which no other tool sets; app.kubernetes.io's are for people.
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
)
from baton_protocol.store import Role

Manifest = dict[str, Any]


def child_name(pool: str, component: Component) -> str:
    """That of the component's objects; revisions and instances add theirs."""
    return f"{pool}-{component}"


class NodeRevision(msgspec.Struct, frozen=True):
    """What a pool's nodes are now to be made from. `name`: hex digits for names and labels. `gpus`:
    how many a node of each role takes, by its podTemplate too."""

    name: str
    gpus: dict[Role, int]


class ChildIdentity(msgspec.Struct, frozen=True):
    """Nodes have a revision; the servers of which a component has several that are not alike, an
    instance."""

    pool: Pool
    component: Component
    revision: str = ""
    instance: str = ""

    @property
    def name(self) -> str:
        words = (child_name(self.pool.name, self.component), self.revision, self.instance)
        return "-".join(word for word in words if word)

    @property
    def host(self) -> str:
        """Its Service's name, for any namespace and any cluster domain."""
        return f"{self.name}.{self.pool.namespace}.svc"

    def selector(self) -> dict[str, str]:
        """Never to be changed: Kubernetes refuses another selector for an existing object."""
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
        """The owner reference is what deletes a child: no finalizers."""
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
        """Of pods made from `template`. Kubernetes, and who asks it, calls it failing when none of
        its pods got ready for `deadline_s`."""
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
        """A Service on the pods' port of that name. Ports are owned by number and protocol, so
        the protocol is said."""
        ports = [{"name": port_name, "protocol": "TCP", "port": port, "targetPort": port_name}]
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self.metadata(annotations),
            "spec": {**spec, "selector": self.selector(), "ports": ports},
        }

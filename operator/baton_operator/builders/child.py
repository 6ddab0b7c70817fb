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
)
from baton_protocol.store import Role

WHOLE_ITEMS = frozenset({"volumes", "env"})
HANDLERS = frozenset({"exec", "grpc", "httpGet", "sleep", "tcpSocket"})


def merged(built: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Merge a user's podTemplate over the built one. Pure, for any JSON value.

        objects               field by field
        lists of named items  item by item, by `name` (volumeMounts: by `mountPath`); new ones
                              follow
        volumes, env          the same, but an item replaces its namesake completely, because the
                              API server rejects an item with two sources
        tolerations           the built ones stay, except those whose `key` the user names
        probes and hooks      another kind of handler replaces the built one
        null                  removes what was built
        everything else       replaced

    In: two trees. Out: a third that shares no part with either and contains no null, because
    server-side apply would own the null.
    """
    result: dict[str, Any] = copied(built)
    if not HANDLERS.isdisjoint(override):
        result = {key: value for key, value in result.items() if key not in HANDLERS - {*override}}
    for key, value in override.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged_value(key, result.get(key), value)
    return result


def copied(value: Any) -> Any:
    """A deep copy without nulls. Unlike in deepcopy, a part that occurs twice is copied twice."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value if item is not None]
    return value


def _merged_value(key: str, built: Any, override: Any) -> Any:
    if isinstance(built, dict) and isinstance(override, dict):
        return merged(built, override)
    if key == "tolerations" and _are_objects(built) and _are_objects(override):
        return _merged_tolerations(built, override)
    name = "mountPath" if key == "volumeMounts" else "name"
    if _is_keyed(built, name) and _is_keyed(override, name):
        return _merged_items(built, override, name, whole=key in WHOLE_ITEMS)
    return copied(override)


def _is_keyed(value: Any, name: str) -> bool:
    return _are_objects(value) and all(isinstance(item.get(name), str) for item in value)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _merged_tolerations(
    built: list[dict[str, Any]], override: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Several tolerations may share a key, each with another effect; one without a key matches
    all."""
    overrides = copied(override)
    keys = [item.get("key") for item in overrides]
    return [*(item for item in built if item.get("key") not in keys), *overrides]


def _merged_items(
    built: list[dict[str, Any]], override: list[dict[str, Any]], name: str, *, whole: bool
) -> list[dict[str, Any]]:
    result = {item[name]: item for item in built}
    for item in override:
        before = {} if whole else result.get(item[name], {})
        result[item[name]] = merged(before, item)
    return list(result.values())


Manifest = dict[str, Any]


def child_name(pool: str, component: Component) -> str:
    """The name of the component's objects; revisions and instances append theirs."""
    return f"{pool}-{component}"


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

"""Checks of the spec's pod templates, which the API server does not make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_operator.api.spec import PoolSpec
from baton_operator.api.spec_reader import SpecError
from baton_operator.names import FETCH_CONTAINER, OWN_PREFIX
from baton_protocol.model_source import HubModel
from baton_protocol.store import ROLES

_CONTAINERS = {
    "prefill": ("node",),
    "decode": ("node",),
    "router": ("router",),
    "kvStore.managed": ("redis",),
}


def check_pod_templates(spec: PoolSpec) -> None:
    """Reject labels and annotations with our prefix, because selectors, policies and roll-outs use
    them, and names of containers that do not exist."""
    managed = spec.kv_store.managed
    templates = {
        "prefill": spec.prefill.pod_template,
        "decode": spec.decode.pod_template,
        "router": spec.router.pod_template,
        "kvStore.managed": managed.pod_template if managed is not None else {},
    }
    for part, template in templates.items():
        _check_kept(f"spec.{part}.podTemplate", template, "metadata")
        _check_containers(part, template, isinstance(spec.model.source, HubModel))
        metadata = template.get("metadata")
        # The API server rejects anything that is not a mapping.
        metadata = metadata if isinstance(metadata, Mapping) else {}
        for kind in ("labels", "annotations"):
            _check_kept(f"spec.{part}.podTemplate.metadata", metadata, kind)
            entries = metadata.get(kind)
            names = entries if isinstance(entries, Mapping) else ()
            ours = next((name for name in names if name.startswith(OWN_PREFIX)), None)
            if ours is not None:
                raise SpecError(
                    f"spec.{part}.podTemplate.metadata.{kind}: {ours!r} is set by the operator; "
                    f"write names that do not start with {OWN_PREFIX}"
                )


def _check_containers(part: str, template: Mapping[str, Any], fetches: bool) -> None:
    """Reject a container without an image whose name is none of ours: it can only be a slip. One
    with an image is the user's own."""
    spec = template.get("spec")
    ours = {
        "containers": _CONTAINERS[part],
        "initContainers": (FETCH_CONTAINER,) if fetches and part in ROLES else (),
    }
    for kind, names in ours.items():
        given = spec.get(kind) if isinstance(spec, Mapping) else None
        for item in given if isinstance(given, list) else ():
            name = item.get("name") if isinstance(item, Mapping) else None
            if not isinstance(name, str) or name in names or item.get("image"):
                continue
            choices = " or ".join(names)
            write = f"write {choices}, or give" if choices else "there is none to change; give"
            raise SpecError(
                f"spec.{part}.podTemplate.spec.{kind}: {name!r} is no container of the operator's "
                f"and has no image; {write} a container of your own an image"
            )


def _check_kept(field: str, parent: Mapping[str, Any], key: str) -> None:
    """Reject null, which would remove what the operator set there."""
    if key in parent and parent[key] is None:
        raise SpecError(
            f"{field}.{key}: null would remove a value that the operator sets; leave it out, or "
            f"write names that do not start with {OWN_PREFIX}"
        )

"""What a field's Meta adds to its schema: how server-side appliers share a list, and objects whose
contents Kubernetes validates.
"""

from __future__ import annotations

from typing import Any

# Lists to which several server-side appliers may add items. All other lists have one owner. A set
# holds strings: the API server cannot merge objects without keys, such as peers.
SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}
KEY_DEFAULT: dict[str, Any] = {"default": ""}


def keyed(*keys: str) -> dict[str, Any]:
    """List type of objects that these fields identify. An optional key field needs a default in
    the schema: `KEY_DEFAULT`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


def open_object(record: str, *keys: str) -> dict[str, Any]:
    """An object of Kubernetes' type `record`. What is below these keys is not validated here:
    Kubernetes validates it when the pods are created."""
    part = {
        "type": "object",
        "description": f"See {record}.",
        "x-kubernetes-preserve-unknown-fields": True,
    }
    return {"properties": dict.fromkeys(keys, part)}

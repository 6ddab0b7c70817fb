"""Which resources are GPUs, and how many of them a node takes.

In: limits of containers, as in a spec or in a pod. Out: a number. A slice of a GPU, or a share of
one, counts as whatever its name offers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_operator.api.fields import quantity_bytes


def is_gpu(resource: str) -> bool:
    """nvidia.com/gpu, or a slice's or a shared one's name there, or amd.com/gpu."""
    return resource.startswith("nvidia.com/") or resource.endswith("/gpu")


def gpus_of(limits: Mapping[str, int | str]) -> int:
    """Of one node with these limits."""
    return sum(quantity_bytes(amount) for name, amount in limits.items() if is_gpu(name))


def gpus_of_pod(spec: Mapping[str, Any]) -> int:
    """Of a pod's or a template's containers, the podTemplate's own among them."""
    containers = spec.get("containers") or ()
    limits = [(one.get("resources") or {}).get("limits") or {} for one in containers]
    return sum(gpus_of(each) for each in limits)

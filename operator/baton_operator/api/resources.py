"""Quantities of Kubernetes, resource requests and limits, and the GPUs among them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, ClassVar

from msgspec import Meta, field

from baton_operator.api.cel import CelRule, ruled
from baton_operator.api.record import Record

# The API server's syntax. The client's parser alone would also accept 1_0, NaN and 1e999999999.
_QUANTITY = re.compile(
    r"\+?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?"
)
Quantity = Annotated[
    int | Annotated[str, Meta(max_length=24)],
    ruled(
        CelRule(
            "isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('0')) >= 0",
            "not a Kubernetes quantity; write a number with or without a unit, such as 2, "
            "500m, 512Mi or 16Gi",
        ),
    ),
]
Quantities = Annotated[dict[str, Quantity], Meta(max_length=32)]


def quantity_bytes(quantity: int | str) -> int:
    """A Kubernetes quantity as an integer, rounded up. Raise ValueError if it is not one."""
    if _QUANTITY.fullmatch(str(quantity)) is None:
        raise ValueError(f"{quantity!r} is not a quantity; write 1Gi, 512Mi or a number of bytes")
    # Its import takes 0.8 s, and a reader of a pool's status needs no quantity.
    from kubernetes.utils.quantity import parse_quantity

    number: Decimal = parse_quantity(quantity)  # type: ignore[no-untyped-call]
    return math.ceil(number)


def check_quantity(name: str, quantity: int | str) -> None:
    """Raise ValueError, prefixed with the field's name; for a __post_init__."""
    try:
        quantity_bytes(quantity)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


class Resources(Record, frozen=True, kw_only=True):
    """Resource requests and limits, as in Kubernetes. A resource that is in neither list keeps
    its default, if it has one."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "!has(self.requests) || !has(self.limits) || self.requests.all(name,"
            " !(name in self.limits)"
            " || !isQuantity(string(self.requests[name]))"
            " || !isQuantity(string(self.limits[name]))"
            " || quantity(string(self.requests[name]))"
            ".compareTo(quantity(string(self.limits[name]))) <= 0)",
            "a request exceeds its limit; write a request that is at most the limit of the "
            "same name",
            field=".requests",
        ),
    )

    requests: Annotated[Quantities, Meta(description="Requested amount per resource.")] = field(
        default_factory=dict
    )
    limits: Annotated[Quantities, Meta(description="Maximum amount per resource.")] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        for kind, quantities in (("requests", self.requests), ("limits", self.limits)):
            for name, quantity in quantities.items():
                check_quantity(f"{kind}.{name}", quantity)


def is_gpu(resource: str) -> bool:
    """Whether the resource is a GPU: nvidia.com/gpu, an NVIDIA slice or shared GPU, or
    amd.com/gpu. One slice or share counts as one GPU."""
    return resource.startswith("nvidia.com/") or resource.endswith("/gpu")


def gpus_of(limits: Mapping[str, int | str]) -> int:
    """The number of GPUs of one node with these limits."""
    return sum(quantity_bytes(amount) for name, amount in limits.items() if is_gpu(name))


def gpus_of_pod(spec: Mapping[str, Any]) -> int:
    """The number of GPUs of a pod spec: of all its containers, including the podTemplate's own."""
    containers = spec.get("containers") or ()
    limits = [(container.get("resources") or {}).get("limits") or {} for container in containers]
    return sum(gpus_of(limit) for limit in limits)

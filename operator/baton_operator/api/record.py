"""What all parts of a spec are, and the parts that several of them hold."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, field

from baton_operator.api.cel_rules import CelRule
from baton_operator.api.quantity import check_quantity
from baton_operator.api.values import Name, Quantities, SecretKey, check_name


class Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of the spec. mypy wants `frozen` said again by each, msgspec does not. Unknown fields
    are passed over: the definition may be newer than the operator, and typos are refused by it.
    `whole`: of several appliers one has all of its fields, as half of each would be neither's."""

    rules: ClassVar[tuple[CelRule, ...]] = ()
    whole: ClassVar[bool] = False


class SecretRef(Record, frozen=True, kw_only=True):
    """A Secret in the pool's namespace. The operator reads some by this name."""

    whole: ClassVar[bool] = True

    name: Annotated[Name, Meta(description="the Secret's name")]

    def __post_init__(self) -> None:
        check_name("name", self.name)


class SecretFile(Record, frozen=True, kw_only=True):
    """One key of a Secret in the pool's namespace, read as a file."""

    whole: ClassVar[bool] = True

    name: Annotated[Name, Meta(description="the Secret's name")]
    key: Annotated[SecretKey, Meta(description="which of its keys")]


class Resources(Record, frozen=True, kw_only=True):
    """Kubernetes' own: quantities by resource name. A resource that is named in neither list has
    its default, where there is one."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "!has(self.requests) || !has(self.limits) || self.requests.all(name,"
            " !(name in self.limits)"
            " || !isQuantity(string(self.requests[name]))"
            " || !isQuantity(string(self.limits[name]))"
            " || quantity(string(self.requests[name]))"
            ".compareTo(quantity(string(self.limits[name]))) <= 0)",
            "more is requested than limits allows; write a request that is at most the limit of"
            " the same name",
            field=".requests",
        ),
    )

    requests: Annotated[Quantities, Meta(description="what a pod is promised")] = field(
        default_factory=dict
    )
    limits: Annotated[Quantities, Meta(description="what a pod may use at most")] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        for kind, quantities in (("requests", self.requests), ("limits", self.limits)):
            for name, quantity in quantities.items():
                check_quantity(f"{kind}.{name}", quantity)

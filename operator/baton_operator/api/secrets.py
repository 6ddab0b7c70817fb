"""References to Secrets in the pool's namespace."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from baton_operator.api.cel import CelRule, matches, ruled
from baton_operator.api.fields import Name, check_name
from baton_operator.api.record import Record

_NOT_A_KEY = "not a key of a Secret; write letters, digits and any of . _ -, such as api-keys"
SecretKey = Annotated[
    str,
    ruled(
        CelRule(
            f"{matches('[-._a-zA-Z0-9]+')} && !self.startsWith('..') && self != '.'", _NOT_A_KEY
        ),
        max_length=253,
    ),
]


class SecretRef(Record, frozen=True, kw_only=True):
    """A Secret in the pool's namespace."""

    whole: ClassVar[bool] = True

    name: Annotated[Name, Meta(description="Name of the Secret.")]

    def __post_init__(self) -> None:
        check_name("name", self.name)


class SecretFile(Record, frozen=True, kw_only=True):
    """One key of a Secret in the pool's namespace, mounted as a file."""

    whole: ClassVar[bool] = True

    name: Annotated[Name, Meta(description="Name of the Secret.")]
    key: Annotated[SecretKey, Meta(description="Key in the Secret.")]

"""The InferencePool's `status`, as written to the API; the CRD's schema is generated from it.

Times are RFC 3339 in UTC, in whole seconds (`stamp`). Anybody may have edited what is read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from baton_operator.api.autoscaling import PlannedMode
from baton_operator.api.fields import Count, keyed


def stamp(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_fresh(since: str, now: datetime, seconds: float) -> bool:
    """Whether it was said less than so long ago: not where the clock was set back since, nor where
    an operator with a clock ahead of this one said it. It spares writes, nothing waits for it."""
    if not since:
        return False
    return 0 <= (now - datetime.fromisoformat(since)).total_seconds() < seconds


READY = "Ready"  # the condition that sums up the others

Truth = Literal["True", "False", "Unknown"]
Moment = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Generation = Annotated[int, Meta(ge=0)]
_CONDITION_TYPE = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"
)
_CONDITION_REASON = "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"


class _Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of the status. Fields that a newer operator wrote are ignored."""


class Condition(_Record, frozen=True, kw_only=True):
    """As Kubernetes' own (metav1.Condition), whose bounds these are."""

    type: Annotated[
        str,
        Meta(
            description="what is spoken of, in one CamelCase word",
            extra_json_schema={"maxLength": 316, "pattern": _CONDITION_TYPE},
        ),
    ]
    status: Annotated[Truth, Meta(description="whether it is so: True, False or Unknown")]
    reason: Annotated[
        str,
        Meta(
            description="why, in one CamelCase word",
            extra_json_schema={"minLength": 1, "maxLength": 1024, "pattern": _CONDITION_REASON},
        ),
    ]
    message: Annotated[
        str, Meta(description="the same for people", extra_json_schema={"maxLength": 32768})
    ]
    last_transition_time: Annotated[Moment, Meta(description="when status changed last")]
    observed_generation: Annotated[Generation, Meta(description="of the spec it was said of")] = 0


class RoleStatus(_Record, frozen=True, kw_only=True):
    """How many of one kind of pod there are."""

    summary: Annotated[str, Meta(description="ready/desired, for the printer column")] = "0/0"
    desired: Annotated[Count, Meta(description="how many the spec wants")] = 0
    ready: Annotated[Count, Meta(description="those that serve")] = 0
    updated: Annotated[Count, Meta(description="ready ones of the current revision")] = 0
    draining: Annotated[Count, Meta(description="those that drain or end")] = 0


class ModelStatus(_Record, frozen=True, kw_only=True):
    """The model that is served."""

    name: Annotated[str, Meta(description="what clients call it")] = ""
    progress: Annotated[str, Meta(description="of the slowest fetch, while there is one")] = ""
    progress_time: (
        Annotated[Moment, Meta(description="as of when progress is; said anew every 5 s at most")]
        | UnsetType
    ) = UNSET


class AutoscalingStatus(_Record, frozen=True, kw_only=True):
    """What the planner decided last; there while `autoscaling.mode` is auto or advise."""

    mode: Annotated[PlannedMode, Meta(description="auto: it is done; advise: it is only said")]
    desired_prefill: Annotated[Count, Meta(description="prefill nodes")]
    desired_decode: Annotated[Count, Meta(description="decode nodes")]
    reason: Annotated[str, Meta(description="why, in one CamelCase word")]
    message: Annotated[str, Meta(description="the same for people, role by role")]
    numbers: Annotated[str, Meta(description="what it rests on: names and values")] = ""
    since: Annotated[Moment, Meta(description="when counts or reason changed")]
    time: Annotated[
        Moment, Meta(description="as of when message and numbers are; said anew once a minute")
    ]


class PoolStatus(_Record, frozen=True, kw_only=True):
    """What the operator sees of a pool."""

    observed_generation: Annotated[
        Generation, Meta(description="of the spec all this was said of")
    ] = 0
    conditions: Annotated[
        tuple[Condition, ...],
        Meta(
            description="what is well and what is not; Ready sums them up",
            extra_json_schema=keyed("type"),
        ),
    ] = ()
    prefill: Annotated[RoleStatus, Meta(description="its prefill nodes")] = RoleStatus()
    decode: Annotated[RoleStatus, Meta(description="its decode nodes")] = RoleStatus()
    router: Annotated[RoleStatus, Meta(description="its routers")] = RoleStatus()
    model: ModelStatus = ModelStatus()
    autoscaling: AutoscalingStatus | None = None
    endpoint: Annotated[str, Meta(description="the OpenAI API inside the cluster")] = ""
    url: Annotated[str, Meta(description="the same from outside where there is a route")] = ""
    revision: Annotated[str, Meta(description="of the nodes' template")] = ""
    fingerprint: Annotated[str, Meta(description="of the KV of the current revision's nodes")] = ""

    def written(self) -> dict[str, Any]:
        """As the API takes it: what is not there is left out."""
        return {name: part for name, part in msgspec.to_builtins(self).items() if part is not None}

    def condition(self, kind: str) -> Condition | None:
        """The condition of that type."""
        return next((item for item in self.conditions if item.type == kind), None)


def read_status(body: Mapping[str, Any]) -> PoolStatus | None:
    """What was last written to a pool; None where there is nothing, or nothing that can be read:
    then all of it is derived anew."""
    try:
        return msgspec.convert(body["status"], PoolStatus) if body.get("status") else None
    except msgspec.ValidationError:
        return None

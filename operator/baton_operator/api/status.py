"""The InferencePool's `status` as written to the API. The CRD's schema is generated from it.

Times are RFC 3339 in UTC, in whole seconds (`stamp`). A status that is read back is not trusted:
anyone may have edited it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from baton_operator.api.autoscaling import PlannedMode
from baton_operator.api.fields import Count
from baton_operator.api.schema_extras import keyed
from baton_protocol.store import Exact

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
    """A condition with the fields and bounds of Kubernetes' metav1.Condition."""

    type: Annotated[
        str,
        Meta(
            description="Aspect of the pool, in one CamelCase word.",
            extra_json_schema={"maxLength": 316, "pattern": _CONDITION_TYPE},
        ),
    ]
    status: Annotated[
        Truth, Meta(description="Whether the condition holds: True, False or Unknown.")
    ]
    reason: Annotated[
        str,
        Meta(
            description="Reason for the status, in one CamelCase word.",
            extra_json_schema={"minLength": 1, "maxLength": 1024, "pattern": _CONDITION_REASON},
        ),
    ]
    message: Annotated[
        str,
        Meta(
            description="Details for people, in a sentence.",
            extra_json_schema={"maxLength": 32768},
        ),
    ]
    last_transition_time: Annotated[Moment, Meta(description="When `status` last changed.")]
    observed_generation: Annotated[
        Generation, Meta(description="Generation of the spec that the operator observed.")
    ] = 0


class RoleStatus(_Record, frozen=True, kw_only=True):
    """Numbers of pods of one component."""

    summary: Annotated[
        str, Meta(description="READY/DESIRED, for the columns of `kubectl get`.")
    ] = "0/0"
    desired: Annotated[Count, Meta(description="Desired number of pods.")] = 0
    ready: Annotated[Count, Meta(description="Pods that serve requests.")] = 0
    updated: Annotated[Count, Meta(description="Ready pods of the current revision.")] = 0
    draining: Annotated[Count, Meta(description="Pods that drain or terminate.")] = 0


class ModelStatus(_Record, frozen=True, kw_only=True):
    """The model that the pool serves."""

    name: Annotated[str, Meta(description="Model name in the API.")] = ""
    progress: Annotated[
        str, Meta(description="Progress of the slowest fetch, while a node fetches the model.")
    ] = ""
    progress_time: (
        Annotated[Moment, Meta(description="When `progress` was last updated, at most every 5 s.")]
        | UnsetType
    ) = UNSET


class AutoscalingStatus(_Record, frozen=True, kw_only=True):
    """The planner's last decision; present while `autoscaling.mode` is auto or advise."""

    mode: Annotated[
        PlannedMode,
        Meta(description="Effect of the decision. auto: the operator applies it. advise: none."),
    ]
    desired_prefill: Annotated[Count, Meta(description="Desired number of prefill nodes.")]
    desired_decode: Annotated[Count, Meta(description="Desired number of decode nodes.")]
    reason: Annotated[str, Meta(description="Reason of the decision, in one CamelCase word.")]
    message: Annotated[str, Meta(description="Explanation for people, role by role.")]
    numbers: Annotated[str, Meta(description="Inputs of the decision, as names and values.")] = ""
    since: Annotated[Moment, Meta(description="When the counts or the reason last changed.")]
    time: Annotated[
        Moment,
        Meta(
            description="When `message` and `numbers` were last updated. Without a change they are"
            " updated once a minute."
        ),
    ]


class OperatorStatus(_Record, frozen=True, kw_only=True):
    """The operator that manages the pool."""

    name: Annotated[
        str, Meta(description="Namespace and name of the installation that manages the pool.")
    ]
    time: Annotated[
        Moment,
        Meta(
            description="When it last looked at the pool, renewed every minute. An older time means"
            " that no operator is at work."
        ),
    ]
    other: Annotated[
        str,
        Meta(
            description="Another operator that serves the pool's namespace too and leaves the pool"
            " alone."
        ),
    ] = ""
    other_time: (
        Annotated[Moment, Meta(description="When the other operator last saw the pool.")]
        | UnsetType
    ) = UNSET


class PoolStatus(_Record, frozen=True, kw_only=True):
    """What the operator observes of a pool."""

    observed_generation: Annotated[
        Generation, Meta(description="Generation of the spec that the operator observed.")
    ] = 0
    conditions: Annotated[
        tuple[Condition, ...],
        Meta(
            description="State of the pool, one aspect each. Ready summarizes the others.",
            extra_json_schema=keyed("type"),
        ),
    ] = ()
    prefill: Annotated[RoleStatus, Meta(description="Prefill nodes.")] = RoleStatus()
    decode: Annotated[RoleStatus, Meta(description="Decode nodes.")] = RoleStatus()
    router: Annotated[RoleStatus, Meta(description="Routers.")] = RoleStatus()
    model: ModelStatus = ModelStatus()
    autoscaling: AutoscalingStatus | None = None
    operator: OperatorStatus | None = None
    endpoint: Annotated[str, Meta(description="URL of the OpenAI API inside the cluster.")] = ""
    url: Annotated[
        str, Meta(description="URL of the OpenAI API from outside, if there is a route.")
    ] = ""
    revision: Annotated[str, Meta(description="Current revision of the nodes' pod template.")] = ""
    fingerprint: Annotated[
        str, Meta(description="KV fingerprint of the current revision's nodes.")
    ] = ""
    exact: Annotated[
        Exact | None,
        Meta(
            description="How exact the ready nodes of all revisions are together. bitwise: a"
            " token's bits depend only on the tokens before it. numeric: on some node they also"
            " depend on the batch."
        ),
    ] = None

    def written(self) -> dict[str, Any]:
        """The status as the API accepts it: absent parts are left out."""
        return {name: part for name, part in msgspec.to_builtins(self).items() if part is not None}

    def condition(self, kind: str) -> Condition | None:
        """The condition of that type."""
        return next((item for item in self.conditions if item.type == kind), None)


def read_status(body: Mapping[str, Any]) -> PoolStatus | None:
    """The status last written to a pool. None if it is missing or cannot be parsed; then all of it
    is derived again."""
    try:
        return msgspec.convert(body["status"], PoolStatus) if body.get("status") else None
    except msgspec.ValidationError:
        return None


def read_operator(body: Mapping[str, Any]) -> OperatorStatus | None:
    """Who manages the pool. Read by itself: another version of the operator may have written a
    status that this one cannot parse, and still holds the pool."""
    try:
        return msgspec.convert((body.get("status") or {}).get("operator"), OperatorStatus | None)
    except msgspec.ValidationError:
        return None

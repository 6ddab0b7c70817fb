"""A PoolScaler: one role's count as a resource of its own, with /scale, for whoever is to say it.

In: nothing. Out: the records that its definition is generated from.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from baton_operator.api.fields import Count, Record


class ScalerSpec(Record, frozen=True, kw_only=True):
    """What HPA, KEDA or `kubectl scale` write."""

    replicas: Annotated[int, Meta(ge=0, description="nodes of the role that there shall be")]


class ScalerStatus(Record, frozen=True, kw_only=True):
    """What they read."""

    replicas: Annotated[Count, Meta(description="nodes of the role, without those that go")] = 0
    selector: Annotated[str, Meta(description="of the role's pods, all revisions")] = ""

"""A PoolScaler: the number of nodes of one role as a resource with /scale, for autoscalers.

In: nothing. Out: the records from which its CRD is generated.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from baton_operator.api.fields import MOST_NODES, Count
from baton_operator.api.record import Record


class ScalerSpec(Record, frozen=True, kw_only=True):
    """Written by HPA, KEDA or `kubectl scale`."""

    replicas: Annotated[
        int, Meta(ge=0, le=MOST_NODES, description="Desired number of nodes of the role.")
    ]


class ScalerStatus(Record, frozen=True, kw_only=True):
    """Read by HPA, KEDA or `kubectl scale`."""

    replicas: Annotated[
        Count, Meta(description="Current nodes of the role, without those that are being removed.")
    ] = 0
    selector: Annotated[
        str, Meta(description="Label selector of the role's pods, of all revisions.")
    ] = ""

"""Placements as a record takes them, without a pool."""

from __future__ import annotations

from typing import Any

from baton_protocol.ids import NodeId
from baton_router.placement.placement import Placement
from baton_router.requests.attempt import PlacementBasis

BASIS = PlacementBasis(store_up=True, chunks=4, stored_chunks=2, exact="bitwise")


def placement_on(decode: NodeId, prefill: NodeId | None = None, **changes: Any) -> Placement:
    facts: dict[str, Any] = {
        "decode": decode,
        "prefill": prefill,
        "reason": "split" if prefill else "short",
        "explanation": "",
        "predicted_ms": 40.0,
        "uncached": 2,
    }
    return Placement(**(facts | changes))

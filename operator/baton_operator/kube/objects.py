"""An object as the API takes and returns it, and parts of it that may be absent. Pure."""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]


def find_condition(status: Body, kind: str) -> Body:
    """The condition of that type; an empty one if there is none."""
    conditions = status.get("conditions") or ()
    return next((item for item in conditions if item["type"] == kind), {})


def version_of(body: Body) -> int:
    """Comparable between objects and over time. Kubernetes guarantees this since 1.35; earlier
    versions behave the same."""
    return int(body["metadata"]["resourceVersion"])

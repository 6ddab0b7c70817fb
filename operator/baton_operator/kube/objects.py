"""Parts of an object as the API returns it, where a part may be absent. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Body = Mapping[str, Any]


def find_condition(status: Body, kind: str) -> Body:
    """The condition of that type; an empty one if there is none."""
    conditions = status.get("conditions") or ()
    return next((item for item in conditions if item["type"] == kind), {})

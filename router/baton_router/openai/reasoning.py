"""What a client wants of the model's reasoning.

In: the values of a chat's fields. Out: RequestedReasoning. Whether there is any reasoning depends
on the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MAX_BUDGET = (1 << 31) - 1
NO_BUDGET = -1


@dataclass(frozen=True, slots=True)
class RequestedReasoning:
    """`included`: the answer shows the reasoning. `budget`: the most reasoning tokens (None: no
    limit), and `budget_field` is the client's name of it. `kwargs` are values for the chat
    template."""

    included: bool = True
    budget: int | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    budget_field: str = "thinking_token_budget"


def requested_reasoning(
    effort: str | None, budget: int | None, *, included: bool
) -> RequestedReasoning:
    """The values of `reasoning_effort`, `thinking_token_budget` and `include_reasoning`."""
    kwargs: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        kwargs["enable_thinking"] = False
    return RequestedReasoning(included, None if budget == NO_BUDGET else budget, kwargs)

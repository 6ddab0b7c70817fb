"""The result of a placement: the nodes, the reason, and the options that were considered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton_protocol.ids import NodeId
from baton_protocol.policies import MissingRole
from baton_protocol.store import Role

Way = Literal["split", "whole"]

PlacementReason = Literal[
    "split",
    "always",
    "never",
    "short",
    "costly",
    "no_prefill",
    "no_decode",
    "store_down",
    "resumed",
    "prompt_logprobs",
    "no_cache",
    "pooling",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """One considered option. `predicted_ms` is the sum of its parts, in milliseconds: the queue
    ahead, computing the uncached tokens, fetching beyond that, and the slowdown of sequences that
    already decode there."""

    decode: NodeId
    prefill: NodeId | None
    predicted_ms: float
    queue_ms: float
    compute_ms: float
    fetch_ms: float
    slowdown_ms: float
    cached_tokens: int
    uncached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`uncached`: prompt tokens to compute, booked on the prefill node if there is one.
    `predicted_ms`: time until the request decodes, plus the slowdown of others. `considered` holds
    the best options, the cheapest first."""

    decode: NodeId
    prefill: NodeId | None
    reason: PlacementReason
    explanation: str
    predicted_ms: float
    uncached: int
    considered: tuple[Considered, ...] = ()

    def header_line(self) -> str:
        """The value of the `x-baton-placement` header."""
        prefill = self.prefill or "-"
        return f"prefill={prefill} decode={self.decode} reason={self.reason}: {self.explanation}"


@dataclass(frozen=True, slots=True)
class Missing:
    """No node of this role is ready, and no node of the other role may replace it."""

    role: Role
    policy: MissingRole

    @property
    def explanation(self) -> str:
        if self.policy == "aggregate":
            return "no node is ready"
        return f"no {self.role} node is ready, and missing_role is {self.policy}"


@dataclass(frozen=True, slots=True)
class PredictionError:
    """A predicted and the measured time until a request decodes, in seconds."""

    way: Way
    predicted_s: float
    measured_s: float

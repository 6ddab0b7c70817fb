"""Candidate nodes as single records, where placement itself uses arrays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from baton_protocol.ids import NodeId
from baton_protocol.store import Role, Speeds
from baton_router.placement.costs import FALLBACK, SPEEDS, NodeGroup, RequestFacts, fill_speeds
from baton_router.placement.placement import Missing, Placement
from baton_router.placement.policy import PlacementPolicy, place


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One node's figures, as in Group."""

    node: NodeId
    role: Role
    queued_tokens: int = 0
    sequences: int = 0
    requests: int = 0
    speeds: Speeds = FALLBACK
    cached_chunks: int = 0
    store: str = "up"


def group_of(nodes: Sequence[Candidate]) -> NodeGroup:
    def column(name: str) -> Any:
        return np.array([getattr(node, name) for node in nodes], dtype=np.float64)

    speeds: dict[str, Any] = {
        name: np.array([getattr(node.speeds, name) for node in nodes], dtype=np.float64)
        for name in SPEEDS
    }
    return NodeGroup(
        nodes=[node.node for node in nodes],
        queued_tokens=column("queued_tokens"),
        sequences=column("sequences"),
        requests=column("requests"),
        cached_chunks=column("cached_chunks").astype(np.int64),
        store_up=np.array([node.store == "up" for node in nodes], dtype=np.bool_),
        **speeds,
    )


def fill_group_speeds(groups: Sequence[NodeGroup]) -> list[NodeGroup]:
    """The groups without unmeasured speeds, as a pool's view gives them to placement."""
    reported = [np.array([getattr(group, name) for name in SPEEDS]) for group in groups]
    return [
        replace(group, **dict(zip(SPEEDS, speeds, strict=True)))
        for group, speeds in zip(groups, fill_speeds(reported), strict=True)
    ]


def candidates_of(group: NodeGroup, role: Role) -> list[Candidate]:
    return [
        Candidate(
            node=name,
            role=role,
            queued_tokens=int(group.queued_tokens[at]),
            sequences=int(group.sequences[at]),
            requests=int(group.requests[at]),
            speeds=Speeds(**{each: float(getattr(group, each)[at]) for each in SPEEDS}),
            cached_chunks=int(group.cached_chunks[at]),
            store="up" if group.store_up[at] else "down",
        )
        for at, name in enumerate(group.nodes)
    ]


def place_among(
    facts: RequestFacts,
    nodes: Sequence[Candidate],
    policy: PlacementPolicy,
    rng: random.Random,
    turn: int = 0,
) -> Placement | Missing:
    """Call place() with the prefill and decode nodes among `nodes`."""
    prefills, decodes = fill_group_speeds(
        [group_of([node for node in nodes if node.role == role]) for role in ("prefill", "decode")]
    )
    return place(facts, prefills, decodes, policy, rng, turn)

"""Whether a pool has room for one more request, or it would only wait on a node.

In: what the view knows of the ready nodes; what was let in and is not booked yet. Out: yes or no.
A node without a free sequence has none, nor has one with prompts to compute for longer than is
allowed, by its own measured speed. Prefill nodes lend their time to decode nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton_router.node_view import NodeView
from baton_router.settings import RouterSettings

# Of a node that does not say how many sequences it computes at once.
USUAL_SEQUENCES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A node is full with `sequences` (0: as many as it says), or with prompts for `queue_ms`
    (0: no pool is ever full). Where nothing is handed over, prefill nodes lend no time."""

    queue_ms: float
    sequences: int = 0
    hands_over: bool = True

    @classmethod
    def of_settings(cls, settings: RouterSettings) -> Rule:
        return cls(
            queue_ms=settings.admission_queue_ms,
            sequences=settings.max_inflight,
            hands_over=settings.handoff != "never",
        )


@dataclass(slots=True)
class Load:
    """Sequences and prompt tokens."""

    sequences: int = 0
    tokens: int = 0


def has_room(nodes: Iterable[NodeView], rule: Rule, pending: Load) -> bool:
    """Beyond what is `pending`. A pool without a ready node is not full: there requests wait for a
    node. Most often the first node says it: the rest is not looked at."""
    if not rule.queue_ms:
        return True
    decode, helpers = _Room(), []
    for node in nodes:
        if node.report.role != "decode":
            helpers.append(node)
            continue
        decode.add(node, rule)
        if decode.takes(pending):
            return True
    prefill = _Room()
    for node in helpers:
        prefill.add(node, rule)
    if not decode.nodes:
        return prefill.takes(pending) or not prefill.nodes
    return decode.takes(pending, prefill.tokens if rule.hands_over else 0.0)


@dataclass(slots=True)
class _Room:
    """Of the nodes of one role."""

    nodes: int = 0
    sequences: int = 0
    tokens: float = 0.0

    def add(self, node: NodeView, rule: Rule) -> None:
        self.nodes += 1
        most = rule.sequences or node.report.max_num_seqs or USUAL_SEQUENCES
        free = most - node.sequences
        if free > 0:
            self.sequences += free
            self.tokens += max(0.0, _tokens(node, rule.queue_ms) - node.queued_tokens)

    def takes(self, pending: Load, lent: float = 0.0) -> bool:
        """More than what is `pending`, with `lent` tokens of others."""
        return self.sequences > pending.sequences and self.tokens + lent > pending.tokens


def _tokens(node: NodeView, queue_ms: float) -> float:
    """So many prompt tokens fill the node; one that has not measured itself is not filled."""
    speed = node.report.speeds.prefill_tokens_per_s
    return max(1.0, speed * queue_ms / 1000) if speed > 0 else float("inf")

"""Whether the pool has room: a request would start now, rather than queue on a node.

In: the nodes' load and speeds, the load that was just admitted, the request's size. Out: yes or no.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from baton_protocol.policies import Handoff
from baton_router.nodes.node_view import NodeView
from baton_router.placement.policy import hands_over
from baton_router.settings import RouterSettings

# Assumed for a node that does not report how many sequences it computes at once.
USUAL_SEQUENCES = 256
# When tenants share a pool, a tenant may fill 25 % of a node's queue, or 5 % if its recent prompts
# exceed its share. A tenant that runs more than its share leaves 1/8 of a node's sequences free.
# Requests of other tenants then start at once, with a short queue before them.
SHARED_PART, MORE_PART = 0.25, 0.05
KEPT_PART = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRule:
    """When a node is full: with `sequences` (0: the number it reports), less the `kept` share of
    them, or with prompts that take `queue_ms` to compute (0: no pool is ever full). `handoff` and
    `handoff_tokens` repeat the placement policy."""

    queue_ms: float
    sequences: int = 0
    handoff: Handoff = "auto"
    handoff_tokens: int = 0
    kept: float = 0.0

    @classmethod
    def of_settings(cls, settings: RouterSettings) -> CapacityRule:
        return cls(
            queue_ms=settings.admission_queue_ms,
            sequences=settings.max_inflight,
            handoff=settings.handoff,
            handoff_tokens=settings.handoff_min_tokens,
        )

    def for_shared_pool(self, *, prompts: bool, sequences: bool) -> CapacityRule:
        """The rule for a tenant that shares the pool. `prompts`, `sequences`: it has more than its
        share of recent prompts, or of running sequences."""
        part = MORE_PART if prompts else SHARED_PART
        return replace(self, queue_ms=part * self.queue_ms, kept=KEPT_PART if sequences else 0.0)

    def is_within(self, other: CapacityRule) -> bool:
        """Whether this rule never has room when `other` has none."""
        return self.queue_ms <= other.queue_ms and self.kept >= other.kept

    def splits(self, tokens: int) -> bool:
        """Whether prefill nodes compute a prompt with this many uncached tokens."""
        return hands_over(self.handoff, self.handoff_tokens, tokens)


@dataclass(slots=True)
class AdmittedLoad:
    """Load of admitted requests in sequences and prompt tokens."""

    sequences: int = 0
    tokens: int = 0


def has_room(
    nodes: Iterable[NodeView],
    rule: CapacityRule,
    pending: AdmittedLoad,
    tokens: int,
    sequences: int = 1,
) -> bool:
    """Whether the pool can start one more request now, rather than queue it on a node.

    `pending` is the load that was admitted and is not booked on nodes yet. `tokens` are the
    request's uncached prompt tokens, `sequences` its choices. A pool without ready nodes is not
    full: there, requests wait for a node.

    A node needs a free sequence for each choice, and queued prompts of less than `rule.queue_ms` by
    its measured speed. A request with more choices than half of a node's sequences needs only that
    half free, so it can run on a busy node. If prefill nodes compute prompts, a decode node's time
    counts only if placement would use it: if computing there slows its running sequences by less
    than the shortest prefill queue delays the request. A node of any role makes vectors.
    """
    nodes = tuple(nodes)
    if not rule.queue_ms or not nodes:
        return True
    decodes = [node for node in nodes if node.report.role == "decode"]
    if not decodes or nodes[0].kind.pooling:
        return _hosts_have_room(nodes, rule, pending, tokens, sequences)
    free_tokens, max_slowdown_ms = 0.0, math.inf
    if rule.splits(tokens):
        prefills = [node for node in nodes if node.report.role != "decode"]
        free_tokens, max_slowdown_ms = _prefill_tokens(prefills, rule, pending.tokens)
    return _hosts_have_room(decodes, rule, pending, tokens, sequences, free_tokens, max_slowdown_ms)


def _prefill_tokens(
    prefills: Sequence[NodeView], rule: CapacityRule, needed: int
) -> tuple[float, float]:
    """Prompt tokens that the prefill nodes can still take, counted up to `needed`, and the most ms
    by which the request may slow a decode node's sequences for that node's time to count. The limit
    is infinite if the prefill nodes have room or if there are none."""
    free_tokens, shortest_queue_ms = 0.0, math.inf
    for node in prefills:
        free_tokens += _free_tokens(node, rule)
        if free_tokens > needed:
            return free_tokens, math.inf
        shortest_queue_ms = min(shortest_queue_ms, _compute_ms(node, node.queued_tokens))
    only_prefills = rule.handoff != "auto" and prefills
    return free_tokens, 0.0 if only_prefills else shortest_queue_ms


def _hosts_have_room(
    hosts: Sequence[NodeView],
    rule: CapacityRule,
    pending: AdmittedLoad,
    tokens: int,
    sequences: int,
    free_tokens: float = 0.0,
    max_slowdown_ms: float = math.inf,
) -> bool:
    """Whether the hosts have free sequences for the request and the pending ones, and whether the
    pool, with `free_tokens` of the prefill nodes, can compute the pending tokens. Usually the first
    host decides, and the rest is not examined."""
    free, reserved = 0, math.inf
    for node in hosts:
        free_here = max(0, _free_sequences(node, rule))
        free += free_here
        needed_here = min(sequences, max(1, _max_sequences(node, rule) // 2))
        if free_here >= needed_here:
            reserved = min(reserved, needed_here)
        if node.sequences * _compute_ms(node, tokens) < max_slowdown_ms:
            free_tokens += _free_tokens(node, rule)
        if free - reserved >= pending.sequences and free_tokens > pending.tokens:
            return True
    return False


def _max_sequences(node: NodeView, rule: CapacityRule) -> int:
    limit = rule.sequences or node.report.max_num_seqs or USUAL_SEQUENCES
    return limit - int(rule.kept * limit)


def _free_sequences(node: NodeView, rule: CapacityRule) -> int:
    return _max_sequences(node, rule) - node.sequences


def _free_tokens(node: NodeView, rule: CapacityRule) -> float:
    """Prompt tokens until the node is full; infinite if the node has not measured its speed."""
    if _free_sequences(node, rule) <= 0:
        return 0.0
    speed = node.report.speeds.prefill_tokens_per_s
    capacity = max(1.0, speed * rule.queue_ms / 1000) if speed > 0 else math.inf
    return max(0.0, capacity - node.queued_tokens)


def _compute_ms(node: NodeView, tokens: int) -> float:
    """Milliseconds to compute this many prompt tokens; 0 if the node has not measured its speed."""
    speed = node.report.speeds.prefill_tokens_per_s
    return 1000 * tokens / speed if speed > 0 else 0.0

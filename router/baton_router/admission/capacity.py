"""Whether a pool has room for one more request, or it would only wait on a node.

In: what the view knows of the ready nodes; what was let in and is not booked yet; how much of the
request's prompt is to be computed, and its choices. Out: yes or no. A node needs a free sequence
for each choice, and prompts to compute for no longer than is allowed, by its own measured speed. A
request with more choices than half of a node's sequences needs that half: it may run while the node
is busy with others, too. Where prefill nodes compute prompts, decode nodes lend their time only as
long as placement would take it: while that costs those who decode there less than the prefill
nodes' queues cost the request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from baton_router.nodes.node_view import NodeView
from baton_router.placement.policy import hands_over
from baton_router.settings import Handoff, RouterSettings

# Of a node that does not say how many sequences it computes at once.
USUAL_SEQUENCES = 256
# Where tenants share a pool, each gets so much of a node's queue; who lately had more prompts
# computed than its share, so much; and who runs more than its share leaves so much of a node's
# sequences. Others come in at once, and find little before them.
SHARED_PART, MORE_PART = 0.25, 0.05
KEPT_PART = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRule:
    """A node is full with `sequences` (0: as many as it says) less the part of them that is `kept`,
    or with prompts for `queue_ms` (0: no pool is ever full). What is handed over, and from how many
    tokens on, is the placement's policy."""

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

    def shared(self, *, prompts: bool, sequences: bool) -> CapacityRule:
        """Where there are other tenants, for one with more than its share of them."""
        part = MORE_PART if prompts else SHARED_PART
        return replace(self, queue_ms=part * self.queue_ms, kept=KEPT_PART if sequences else 0.0)

    def within(self, other: CapacityRule) -> bool:
        """Whether this one never has room where the other has none."""
        return self.queue_ms <= other.queue_ms and self.kept >= other.kept

    def splits(self, tokens: int) -> bool:
        """Whether prefill nodes compute what has so many tokens to be computed."""
        return hands_over(self.handoff, self.handoff_tokens, tokens)


@dataclass(slots=True)
class AdmittedLoad:
    """Sequences and prompt tokens."""

    sequences: int = 0
    tokens: int = 0


def has_room(
    nodes: Iterable[NodeView],
    rule: CapacityRule,
    pending: AdmittedLoad,
    tokens: int,
    sequences: int = 1,
) -> bool:
    """Beyond what is `pending`, for a request of so many `sequences` with so many `tokens` to be
    computed. A pool without a ready node is not full: there requests wait for a node."""
    nodes = tuple(nodes)
    if not rule.queue_ms or not nodes:
        return True
    decodes = [node for node in nodes if node.report.role == "decode"]
    if not decodes:
        return _hosts_have_room(nodes, rule, pending, tokens, sequences)
    time, most_ms = 0.0, math.inf
    if rule.splits(tokens):
        prefills = [node for node in nodes if node.report.role != "decode"]
        time, most_ms = _prefill_time(prefills, rule, pending.tokens)
    return _hosts_have_room(decodes, rule, pending, tokens, sequences, time, most_ms)


def _prefill_time(
    prefills: Sequence[NodeView], rule: CapacityRule, needed: int
) -> tuple[float, float]:
    """How many more prompt tokens the prefill nodes take, counted up to `needed`; and the longest
    a decode node may need to compute the request itself, in ms, to count as another place for it.
    That is no limit where the prefill nodes have room, or where there are none."""
    time, shortest_queue_ms = 0.0, math.inf
    for node in prefills:
        time += _time(node, rule)
        if time > needed:
            return time, math.inf
        shortest_queue_ms = min(shortest_queue_ms, _ms(node, node.queued_tokens))
    only_prefills = rule.handoff != "auto" and prefills
    return time, 0.0 if only_prefills else shortest_queue_ms


def _hosts_have_room(
    hosts: Sequence[NodeView],
    rule: CapacityRule,
    pending: AdmittedLoad,
    tokens: int,
    sequences: int,
    time: float = 0.0,
    most_ms: float = math.inf,
) -> bool:
    """Whether the nodes that run the sequences have places for them, and with the prefill nodes'
    `time` the pool computes what is pending. Most often the first host answers: the others are not
    looked at."""
    free, beside = 0, math.inf
    for node in hosts:
        mine = max(0, _free(node, rule))
        free += mine
        wanted = min(sequences, max(1, _most(node, rule) // 2))
        if mine >= wanted:
            beside = min(beside, wanted)
        if node.sequences * _ms(node, tokens) < most_ms:
            time += _time(node, rule)
        if free - beside >= pending.sequences and time > pending.tokens:
            return True
    return False


def _most(node: NodeView, rule: CapacityRule) -> int:
    most = rule.sequences or node.report.max_num_seqs or USUAL_SEQUENCES
    return most - int(rule.kept * most)


def _free(node: NodeView, rule: CapacityRule) -> int:
    return _most(node, rule) - node.sequences


def _time(node: NodeView, rule: CapacityRule) -> float:
    """In prompt tokens, of which so many fill the node; one that has not measured itself is not
    filled."""
    if _free(node, rule) <= 0:
        return 0.0
    speed = node.report.speeds.prefill_tokens_per_s
    most = max(1.0, speed * rule.queue_ms / 1000) if speed > 0 else math.inf
    return max(0.0, most - node.queued_tokens)


def _ms(node: NodeView, tokens: int) -> float:
    """To compute so many prompt tokens; 0 where the node has not measured itself."""
    speed = node.report.speeds.prefill_tokens_per_s
    return 1000 * tokens / speed if speed > 0 else 0.0

"""A disaggregated pool modelled as queues with a simulated clock: a day of requests in seconds.

A request goes to the ready prefill node with the least queued work, which sends its first token.
`HANDOFF_S` later it joins the decode node with the least promised KV. While a role has no ready
node, requests are held until both roles have one. A new node costs GPU time at once and serves
after its start-up; a removed node drains, and costs GPU time until it is empty. Starting nodes are
removed first, newest first, then the node with the least to lose. The simulation goes from event to
event: between two events the state is known in closed form (pool_nodes.py).

In: requests in order of their times, desired node counts. Out: answers, nodes, GPU time.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from baton_operator.autoscaling.planner.inputs import Capability, Phase
from baton_protocol.store import ROLES, Role
from benchmarks.support.autoscaling.pool_nodes import (
    Answer,
    DecodeNode,
    Life,
    Node,
    PrefillNode,
    SimRequest,
)

HANDOFF_S = 0.05  # the part of the KV transfer that does not overlap with the prefill
START_SPREAD = 0.25  # relative variation of the start-up time, in both directions

N = TypeVar("N", bound=Life)


class Pool:
    """A simulated pool. `initial` nodes are ready at time 0. `prefill` and `decode` hold the nodes
    that are not gone."""

    def __init__(
        self,
        truth: Capability,
        rng: random.Random,
        requests: Sequence[SimRequest],
        initial: Mapping[Role, int],
    ) -> None:
        self.now_s = 0.0
        self.truth = truth
        self.desired: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self.prefill: list[PrefillNode] = []
        self.decode: list[DecodeNode] = []
        self.answers: list[Answer] = []  # of all that have arrived
        self.started: list[Answer] = []  # in the order of their first tokens
        self.finished: list[Answer] = []
        self.held: deque[Answer] = deque()
        self.starts_s: list[float] = []  # how long each start-up took
        self._parked: deque[Answer] = deque()  # have a first token but no decode node
        self._all: list[Node] = []
        self._rng = rng
        self._requests = iter(requests)
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0
        self.scale(initial)
        for node in self._all:
            node.enter(Phase.READY, 0.0)
        self._expect()

    def scale(self, desired: Mapping[Role, int]) -> None:
        """Create and remove nodes to reach the desired counts; draining nodes do not count."""
        self.desired = dict(desired)
        for role in ROLES:
            nodes = [node for node in self.nodes(role) if node.phase is not Phase.DRAINING]
            for _ in range(desired[role] - len(nodes)):
                self._create(role)
            for _ in range(len(nodes) - desired[role]):
                node = min(nodes, key=self._loss)
                nodes.remove(node)
                self._remove(node)

    def run_until(self, time_s: float) -> None:
        """Process all events up to and including `time_s`."""
        events = self._events
        while events and events[0][0] <= time_s:
            self.now_s, _, happen, what = heapq.heappop(events)
            happen(what)
        self.now_s = time_s
        for node in self.decode:
            node.advance(time_s)

    def nodes(self, role: Role) -> Sequence[Node]:
        return self.prefill if role == "prefill" else self.decode

    def gpu_s(self, role: Role, until_s: float) -> float:
        """The role's node-seconds, including nodes that are gone."""
        return sum(node.gpu_s(until_s) for node in self._all if node.role == role)

    def generated(self) -> float:
        """Output tokens as of the last `run_until`."""
        return len(self.started) + sum(n.tokens for n in self._all if isinstance(n, DecodeNode))

    def steps(self) -> float:
        """Steps of all decode nodes so far."""
        return sum(node.steps for node in self._all if isinstance(node, DecodeNode))

    @property
    def live(self) -> int:
        """The number of requests that have arrived and not ended."""
        return len(self.answers) - len(self.finished)

    def _at(self, time_s: float, happen: Callable[[Any], None], what: object) -> None:
        self._count += 1  # events at the same time run in the order of creation
        heapq.heappush(self._events, (time_s, self._count, happen, what))

    def _expect(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._at(request.at_s, self._arrive, request)

    def _arrive(self, request: SimRequest) -> None:
        self._expect()
        answer = Answer(request)
        self.answers.append(answer)
        self._place(answer)

    def _place(self, answer: Answer) -> None:
        prefill = ready(self.prefill)
        if not prefill or not ready(self.decode):
            self.held.append(answer)
            return
        node = min(prefill, key=lambda one: one.free_s)
        self._at(node.take(answer.request.uncached, self.now_s), self._first, (answer, node))

    def _first(self, what: tuple[Answer, PrefillNode]) -> None:
        answer, node = what
        answer.first_s = self.now_s
        self.started.append(answer)
        node.known -= 1
        self._retire(node)
        self._at(self.now_s + HANDOFF_S, self._hand_over, answer)

    def _hand_over(self, answer: Answer) -> None:
        nodes = ready(self.decode)
        if not nodes:
            self._parked.append(answer)
            return
        node = min(nodes, key=lambda one: one.promised)
        node.advance(self.now_s)
        node.take(answer)
        self._next(node)

    def _next(self, node: DecodeNode) -> None:
        """Schedule the next end in the batch, after the batch has changed."""
        node.admit()
        if node.batch:
            self._at(node.next_end_s(), self._end, (node, node.turn))

    def _end(self, what: tuple[DecodeNode, int]) -> None:
        node, turn = what
        if node.turn != turn:
            return
        node.advance(self.now_s)
        for answer in node.ended():
            answer.end_s = self.now_s
            answer.ends += 1
            self.finished.append(answer)
        self._next(node)
        self._retire(node)

    def _create(self, role: Role) -> None:
        name = f"{role}-{len(self._all)}"
        node: Node
        if role == "prefill":
            node = PrefillNode(name, self.now_s, self.truth, since_s=self.now_s)
            self.prefill.append(node)
        else:
            node = DecodeNode(name, self.now_s, self.truth, since_s=self.now_s, at_s=self.now_s)
            self.decode.append(node)
        self._all.append(node)
        after = self.truth.start_s * self._rng.uniform(1 - START_SPREAD, 1 + START_SPREAD)
        self._at(self.now_s + after, self._up, node)

    def _up(self, node: Node) -> None:
        if node.phase is not Phase.STARTING or node.gone_s is not None:
            return
        node.enter(Phase.READY, self.now_s)
        self.starts_s.append(self.now_s - node.born_s)
        for waiting, take in ((self._parked, self._hand_over), (self.held, self._place)):
            for answer in [waiting.popleft() for _ in range(len(waiting))]:
                take(answer)

    def _loss(self, node: Node) -> tuple[bool, float]:
        """The sort key for removal: the node with the smallest goes first."""
        if node.phase is Phase.STARTING:
            return False, -node.born_s
        return True, node.free_s if isinstance(node, PrefillNode) else float(node.promised)

    def _remove(self, node: Node) -> None:
        if node.phase is Phase.STARTING:
            self._forget(node)
            return
        node.enter(Phase.DRAINING, self.now_s)
        self._retire(node)

    def _retire(self, node: Node) -> None:
        if node.phase is Phase.DRAINING and node.empty:
            self._forget(node)

    def _forget(self, node: Node) -> None:
        node.gone_s = self.now_s
        if isinstance(node, PrefillNode):
            self.prefill.remove(node)
        else:
            self.decode.remove(node)


def ready(nodes: Iterable[N]) -> list[N]:
    return [node for node in nodes if node.phase is Phase.READY]

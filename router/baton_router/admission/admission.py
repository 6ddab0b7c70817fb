"""Admits prompts: within their tenant's budget and, while every node is full, in fair order.

In: prepared calls, the pool's view, the end of their prompts. Out: a Ticket for each prompt, or
RateLimited, QueueFull or QueueTimeout. A call is charged to the budget before any of it runs. Its
prompts are admitted one by one as the pool has room for all their choices, so other calls' prompts
run in between. A pool with room admits everything at once. If tenants share the pool, part of the
room is kept for tenants that run, or recently had computed, less than their share. Admission never
holds an admitted prompt again: if it loses its node, the dispatcher places it again.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from baton_protocol.errors import BatonError, QueueFull, QueueTimeout, Unavailable
from baton_protocol.store import Kind
from baton_router.admission.fair_queue import FairQueue, KeepAlive, UsageShares, Waiter, Waiting
from baton_router.admission.tenant_limits import BudgetBooking, Budgets, Limits
from baton_router.auth import Tenants
from baton_router.metrics.admission_metrics import AdmissionMetrics
from baton_router.nodes.fleet import Fleet
from baton_router.nodes.node_view import NodeView
from baton_router.nodes.pool_view import PoolView
from baton_router.openai.answers import Usage
from baton_router.openai.endpoint import Call, check_alone
from baton_router.placement.policy import hands_over
from baton_router.requests.in_flight import Prepared, Ticket
from baton_router.settings import Handoff, RouterSettings


class ColdStart:
    """Holds calls for a pool without nodes, which is scaled up because calls wait.

    In: calls whose bodies are read, changes of the fleet. Out: the moment from which they can be
    prepared. Until a node is ready the router knows nothing of the model, not even its tokenizer,
    so calls wait unprepared; streams get comment lines. The router's load report counts waiting
    calls.

    `wait_s` 0 holds no call. `changed` returns the event of the fleet's next change.
    """

    def __init__(
        self,
        fleet: Fleet,
        changed: Callable[[], asyncio.Event],
        *,
        wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.held = 0
        self._fleet = fleet
        self._changed = changed
        self._wait_s = wait_s
        self._clock = clock
        self._ending = False

    @property
    def on(self) -> bool:
        return self._wait_s > 0

    def end(self) -> None:
        """Shutdown: fail held calls at the fleet's next change."""
        self._ending = True

    async def hold(self, call: Call, waiting: Waiting, events: KeepAlive | None) -> float | None:
        """Wait until a node is ready. Return the time until which the call may wait for anything
        else, or None if it did not have to wait. Raise Unavailable after `wait_s` seconds. Raise
        InvalidRequest or NotFound at once for a call that no node would accept."""
        if not self.on or self._fleet.offers.why_unready() is None:
            return None
        check_alone(call.sampling, call.default_max_tokens)
        self._fleet.offers.check_name(call.options.model)
        give_up_at = self._clock() + self._wait_s
        waiting.waits = "the pool has no ready node yet"
        self.held += 1
        try:
            await self._wait(give_up_at, events)
        finally:
            self.held -= 1
        return give_up_at

    async def _wait(self, give_up_at: float, events: KeepAlive | None) -> None:
        silent_until = self._silent_until(events)
        while True:
            change = self._changed()  # read before the check, so no change is missed
            if self._ending:
                raise Unavailable("the router is shutting down; send the request again")
            if self._fleet.offers.why_unready() is None:
                return
            now = self._clock()
            if now >= give_up_at:
                states = self._fleet.view.states() or "none"
                raise Unavailable(
                    f"no node was ready within {self._wait_s:g} s (nodes: {states}); send the"
                    " request again"
                )
            if events is not None and now >= silent_until:
                await events.keep_alive()
                silent_until = self._silent_until(events)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(give_up_at, silent_until) - now):
                    await change.wait()

    def _silent_until(self, events: KeepAlive | None) -> float:
        return self._clock() + events.keepalive_s if events is not None else float("inf")


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

    def shared(self, *, prompts: bool, sequences: bool) -> CapacityRule:
        """The rule for a tenant that shares the pool. `prompts`, `sequences`: it has more than its
        share of recent prompts, or of running sequences."""
        part = MORE_PART if prompts else SHARED_PART
        return replace(self, queue_ms=part * self.queue_ms, kept=KEPT_PART if sequences else 0.0)

    def within(self, other: CapacityRule) -> bool:
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
    than the shortest prefill queue delays the request.
    """
    nodes = tuple(nodes)
    if not rule.queue_ms or not nodes:
        return True
    decodes = [node for node in nodes if node.report.role == "decode"]
    if not decodes:
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
    pool, with the prefill nodes' `time`, can compute the pending tokens. Usually the first host
    decides, and the rest is not examined."""
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


# Interval of checks for room, in seconds: node reports also free room.
POLL_S = 0.02
# Decay time of recent prompts, in seconds: longer than a tenant's usual bursts, shorter than a
# flood.
RECENT_S = 5.0
# Tokens booked for an answer without a limit; the rest is charged when the answer is over.
USUAL_ANSWER = 1024
RATE_OVER = 64  # number of last turns from which the drain rate is computed
MAX_RETRY_AFTER_S = 60.0


class Admission:
    """Decides when prompts may start. `limits` are the limits in force."""

    def __init__(
        self,
        settings: RouterSettings,
        view: PoolView,
        budgets: Budgets,
        metrics: AdmissionMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.limits = Limits()
        self._shared = False
        rule = self._rule = CapacityRule.of_settings(settings)
        self._shared_rules = {
            flags: rule.shared(prompts=flags[0], sequences=flags[1])
            for flags in product((False, True), repeat=2)
        }
        self._wait_s = settings.queue_timeout_s
        self._max_call_sequences = settings.max_call_sequences
        self._view = view
        view.eased = self._admit_waiting
        self._budgets = budgets
        self._metrics = metrics
        self._clock = clock
        self._queue = FairQueue(settings.max_queued)
        self._turns: dict[Waiter, _Turn] = {}
        self._pending = AdmittedLoad()
        self._running = UsageShares(clock)  # sequences
        self._computed = UsageShares(clock, RECENT_S)  # tokens of prompts
        self._granted: deque[float] = deque(maxlen=RATE_OVER)
        self._admitting: asyncio.Task[None] | None = None
        self._ending = False

    def use(self, tenants: Tenants, limits: Limits) -> None:
        """Replace tenants and limits; called when their files change."""
        self.limits, self._shared = limits, len(tenants.names) > 1

    @property
    def waiting(self) -> int:
        """Number of calls that wait."""
        return len(self._queue)

    @property
    def held(self) -> int:
        """Number of prompts of the calls that wait."""
        return sum(turn.prompts for turn in self._turns.values())

    def max_call_sequences(self, tenant: str) -> int:
        """The most sequences one call of this tenant may ask for."""
        limit = self.limits.of(tenant).max_call_sequences
        return self._max_call_sequences if limit is None else limit

    async def charge(self, tenant: str, prepared: Sequence[Prepared]) -> BudgetBooking | None:
        """Charge the most a call can cost; None without a budget. Raise RateLimited, or
        InvalidRequest if the call costs more than the budget ever holds."""
        tokens = sum(map(_expected, prepared))
        return await self._budgets.book(tenant, self.limits.of(tenant), len(prepared), tokens)

    async def admit(
        self, call: Waiting, prompts: Sequence[Prepared], events: KeepAlive | None, begun: bool
    ) -> list[Ticket]:
        """Wait for the turn of the call's first prompt. Return a ticket for it, and for the next
        prompts that find room at once. Raise QueueFull, QueueTimeout or Unavailable; a call that
        has `begun` can only raise Unavailable."""
        tenant = call.tenant_name
        limits = self.limits.of(tenant)
        turn = self._turn(tenant, prompts[0], len(prompts))
        if self.waiting or not self._fits(turn, self._rule_of(tenant)):
            waiter = Waiter(
                tenant,
                _expected(prompts[0]),
                limits.weight,
                limits.priority,
                limits.max_queued,
                splits=self._rule.splits(turn.load.tokens),
                begun=begun,
            )
            await self._wait(waiter, turn, call, events)
        else:
            self._admit(turn)
        tickets = [self._ticket(turn)]
        for item in prompts[1:]:
            turn = self._turn(tenant, item)
            if self.waiting or not self._fits(turn, self._rule_of(tenant)):
                break
            self._admit(turn)
            tickets.append(self._ticket(turn))
        return tickets

    def end(self) -> None:
        """Shutdown: fail waiting calls with Unavailable."""
        self._ending = True
        error = Unavailable("the router is shutting down; send the request again")
        for waiter, turn in list(self._turns.items()):
            self._queue.remove(waiter)
            turn.refuse(error)

    async def close(self) -> None:
        self.end()
        if self._admitting is not None:
            self._admitting.cancel()
            await asyncio.gather(self._admitting, return_exceptions=True)
        await self._budgets.close()

    def end_call(self, tenant: str, usage: Usage | None, booking: BudgetBooking | None) -> None:
        """A call is over: record its usage and settle its budget. `usage` None: it never ran."""
        if usage is not None:
            self._metrics.used(tenant, usage)
        if booking is not None:
            used = usage.total_tokens if usage is not None else 0
            self._budgets.settle(booking, used)

    # --- tickets ----------------------------------------------------------------------------------

    def _ticket(self, turn: _Turn) -> Ticket:
        return Ticket(
            turn.load.sequences,
            placed=partial(self._placed, turn.load),
            free=partial(self._running.give_back, turn.tenant),
        )

    def _placed(self, load: AdmittedLoad) -> None:
        self._pending.sequences -= load.sequences
        self._pending.tokens -= load.tokens
        self._admit_waiting()

    # --- turns ------------------------------------------------------------------------------------

    async def _wait(
        self, waiter: Waiter, turn: _Turn, call: Waiting, events: KeepAlive | None
    ) -> None:
        since = self._clock()
        call.waits = f"every node is full; {self.waiting} requests wait ahead of this one"
        self._join(waiter, turn)
        try:
            wait_s = math.inf if waiter.begun else self._wait_s
            await self._wait_for_turn(turn, since, since + wait_s, events)
        except BaseException:
            if not self._queue.remove(waiter) and turn.granted:
                self._ticket(turn).over()
            raise
        finally:
            del self._turns[waiter]
            self._metrics.waited(waiter.priority, self._clock() - since, self._queue.lengths())
        call.waits = ""

    def _join(self, waiter: Waiter, turn: _Turn) -> None:
        if self._ending:
            raise Unavailable("the router is shutting down; send the request again")
        try:
            evicted = self._queue.add(waiter)
        except QueueFull as error:
            error.retry_after = self._retry_after_s()
            raise
        if evicted is not None:
            self._turns[evicted].refuse(
                QueueFull(
                    "the queue is full, and a tenant with fewer waiting requests took this "
                    "request's place; send the request again later",
                    retry_after=self._retry_after_s(),
                )
            )
        self._turns[waiter] = turn
        self._metrics.lengths(self._queue.lengths())
        self._admit_waiting()
        if self.waiting and (self._admitting is None or self._admitting.done()):
            self._admitting = asyncio.create_task(self._keep_admitting())

    async def _wait_for_turn(
        self, turn: _Turn, since: float, give_up_at: float, events: KeepAlive | None
    ) -> None:
        sent_at = since
        while not turn.done:
            now = self._clock()
            if now >= give_up_at:
                raise QueueTimeout(
                    f"every node was full for {self._wait_s:g} s; send the request again later",
                    retry_after=self._retry_after_s(),
                )
            send_at = sent_at + events.keepalive_s if events is not None else give_up_at
            if events is not None and now >= send_at:
                await events.keep_alive()
                sent_at = now
                continue
            await turn.within(min(give_up_at, send_at) - now)
        turn.check()

    async def _keep_admitting(self) -> None:
        while self.waiting:
            await asyncio.sleep(POLL_S)
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Admit waiting prompts in order while the pool has room."""
        while (head := self._next_admissible()) is not None:
            self._queue.take(head)
            self._granted.append(self._clock())
            self._admit(self._turns[head])

    def _next_admissible(self) -> Waiter | None:
        """The first waiter that fits. Waiters below their share, or for other nodes, may pass those
        that do not fit. A waiter whose rule allows no more than that of an earlier one stays behind
        it even if it needs fewer sequences; otherwise a request with many choices would starve."""
        full: list[tuple[CapacityRule, tuple[Kind, bool]]] = []
        for head in self._queue.heads():
            turn = self._turns[head]
            rule, nodes = self._rule_of(turn.tenant), (turn.kind, head.splits)
            if not any(nodes == others and rule.within(other) for other, others in full):
                if self._fits(turn, rule):
                    return head
                full.append((rule, nodes))
        return None

    def _fits(self, turn: _Turn, rule: CapacityRule) -> bool:
        nodes, load = self._view.ready(turn.kind), turn.load
        return has_room(nodes, rule, self._pending, load.tokens, load.sequences)

    def _rule_of(self, tenant: str) -> CapacityRule:
        if not self._shared:
            return self._rule
        weight = self.limits.of(tenant).weight
        over_share = self._computed.has_more(tenant, weight), self._running.has_more(tenant, weight)
        return self._shared_rules[over_share]

    def _turn(self, tenant: str, item: Prepared, prompts: int = 1) -> _Turn:
        """Tokens that some node has cached do not count: placement sends the request there."""
        cached = self._view.chunks.longest(item.chunks)
        chunk = item.serving.sample.layout.chunk_tokens
        tokens = max(1, len(item.request.prompt_ids) - cached * chunk)
        return _Turn(tenant, AdmittedLoad(item.request.params.n, tokens), item.kind, prompts)

    def _admit(self, turn: _Turn) -> None:
        self._pending.sequences += turn.load.sequences
        self._pending.tokens += turn.load.tokens
        weight = self.limits.of(turn.tenant).weight
        self._running.add(turn.tenant, turn.load.sequences, weight)
        self._computed.add(turn.tenant, turn.load.tokens, weight)
        turn.grant()

    def _retry_after_s(self) -> float:
        """Estimated seconds until all waiting prompts had their turn, at the latest rate."""
        if len(self._granted) < 2:
            return 1.0
        rate = len(self._granted) / max(1e-3, self._clock() - self._granted[0])
        return min(MAX_RETRY_AFTER_S, max(1.0, self.held / rate))


class _Turn:
    """The outcome a waiter waits for. `prompts`: waiting prompts of its call, with this one."""

    def __init__(self, tenant: str, load: AdmittedLoad, kind: Kind, prompts: int) -> None:
        self.tenant = tenant
        self.load = load
        self.kind = kind
        self.prompts = prompts
        self._error: BatonError | None = None
        self._decided = asyncio.Event()

    @property
    def done(self) -> bool:
        return self._decided.is_set()

    @property
    def granted(self) -> bool:
        return self.done and self._error is None

    def grant(self) -> None:
        self._decided.set()

    def refuse(self, error: BatonError) -> None:
        if not self.done:
            self._error = error
            self._decided.set()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    async def within(self, seconds: float) -> None:
        """Wait until the turn is decided, at most this long."""
        try:
            async with asyncio.timeout(seconds):
                await self._decided.wait()
        except TimeoutError:
            pass


def _expected(item: Prepared) -> int:
    """Expected tokens of a request: its prompt, computed once for all choices, and its answers up
    to their limit."""
    params = item.request.params
    answer = min(params.max_tokens, USUAL_ANSWER) if item.fills else params.max_tokens
    return len(item.request.prompt_ids) + params.n * answer

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
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from baton_protocol.errors import BatonError, QueueFull, QueueTimeout, Unavailable
from baton_protocol.store import Kind
from baton_router.admission.budgets import BudgetBooking, TenantBudgets
from baton_router.admission.capacity import AdmittedLoad, CapacityRule, has_room
from baton_router.admission.fair_queue import BACKGROUND, FairQueue, Waiter
from baton_router.admission.keep_alive import KeepAlive
from baton_router.admission.tenant_limits import LimitsByTenant
from baton_router.admission.usage_shares import UsageShares
from baton_router.auth import Tenants
from baton_router.metrics.admission_metrics import AdmissionMetrics
from baton_router.nodes.pool_view import PoolView
from baton_router.openai.answers import Usage
from baton_router.requests.context import RequestContext
from baton_router.requests.prepared import Prepared
from baton_router.requests.ticket import Ticket
from baton_router.settings import RouterSettings

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
        budgets: TenantBudgets,
        metrics: AdmissionMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.limits = LimitsByTenant()
        self._shared = False
        rule = self._rule = CapacityRule.of_settings(settings)
        self._shared_rules = {
            flags: rule.for_shared_pool(prompts=flags[0], sequences=flags[1])
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

    def use_limits(self, tenants: Tenants, limits: LimitsByTenant) -> None:
        """Replace tenants and limits; called when their files change."""
        self.limits, self._shared = limits, len(tenants.names) > 1

    @property
    def waiting(self) -> int:
        """Number of calls that wait."""
        return len(self._queue)

    @property
    def waiting_prompts(self) -> int:
        """Number of prompts of the calls that wait, without those in the background: they are no
        reason for more nodes."""
        return sum(turn.prompts for turn in self._turns.values() if not turn.background)

    def max_call_sequences(self, tenant: str) -> int:
        """The most sequences one call of this tenant may ask for."""
        limit = self.limits.of_tenant(tenant).max_call_sequences
        return self._max_call_sequences if limit is None else limit

    @property
    def shared(self) -> bool:
        """Whether several tenants share the pool."""
        return self._shared

    async def charge_call(self, tenant: str, prepared: Sequence[Prepared]) -> BudgetBooking | None:
        """Charge the most a call can cost; None without a budget. A stream that goes on counts as
        no request, and costs only the tokens to come. Raise RateLimited, or InvalidRequest if the
        call costs more than the budget ever holds."""
        requests = sum(item.resumed is None for item in prepared)
        tokens = sum(_expected_tokens(item) - _charged_before(item) for item in prepared)
        return await self._budgets.book_call(
            tenant, self.limits.of_tenant(tenant), requests, tokens
        )

    async def admit_prompts(
        self,
        context: RequestContext,
        prompts: Sequence[Prepared],
        events: KeepAlive | None,
        begun: bool,
    ) -> list[Ticket]:
        """Wait for the turn of the call's first prompt. Return a ticket for it, and for the next
        prompts that find room at once. Raise QueueFull, QueueTimeout or Unavailable; a call that
        has `begun` can only raise Unavailable."""
        tenant = context.tenant_name
        limits = self.limits.of_tenant(tenant)
        background = context.background
        turn = self._make_turn(tenant, prompts[0], background, len(prompts))
        if self.waiting or not self._fits(turn, self._rule_of(turn)):
            waiter = Waiter(
                tenant,
                _expected_tokens(prompts[0]),
                limits.weight,
                BACKGROUND if background else limits.priority,
                None if background else limits.max_queued,
                splits=self._rule.splits(turn.load.tokens),
                begun=begun,
                rank=prompts[0].priority,
            )
            await self._wait_in_queue(waiter, turn, context, events)
        else:
            self._grant_turn(turn)
        tickets = [self._make_ticket(turn)]
        for item in prompts[1:]:
            turn = self._make_turn(tenant, item, background)
            if self.waiting or not self._fits(turn, self._rule_of(turn)):
                break
            self._grant_turn(turn)
            tickets.append(self._make_ticket(turn))
        return tickets

    def refuse_waiting(self) -> None:
        """Shutdown: fail waiting calls with Unavailable."""
        self._ending = True
        error = Unavailable("the router is shutting down; send the request again")
        for waiter, turn in list(self._turns.items()):
            self._queue.remove(waiter)
            turn.refuse(error)

    async def shut_down(self) -> None:
        self.refuse_waiting()
        if self._admitting is not None:
            self._admitting.cancel()
            await asyncio.gather(self._admitting, return_exceptions=True)
        await self._budgets.finish_corrections()

    def end_call(self, tenant: str, usage: Usage | None, booking: BudgetBooking | None) -> None:
        """A call is over: record its usage and settle its budget. `usage` None: it never ran."""
        if usage is not None:
            self._metrics.used(tenant, usage)
        if booking is not None:
            used = usage.total_tokens if usage is not None else 0
            self._budgets.settle_call(booking, used)

    # --- tickets ----------------------------------------------------------------------------------

    def _make_ticket(self, turn: _Turn) -> Ticket:
        placed = partial(self._end_pending, turn.load)
        if turn.background:
            return Ticket(turn.load.sequences, placed)
        free = partial(self._running.give_back, turn.tenant)
        return Ticket(turn.load.sequences, placed, free)

    def _end_pending(self, load: AdmittedLoad) -> None:
        self._pending.sequences -= load.sequences
        self._pending.tokens -= load.tokens
        self._admit_waiting()

    # --- turns ------------------------------------------------------------------------------------

    async def _wait_in_queue(
        self, waiter: Waiter, turn: _Turn, context: RequestContext, events: KeepAlive | None
    ) -> None:
        since = self._clock()
        context.waits = f"every node is full; {self.waiting} requests wait ahead of this one"
        self._join_queue(waiter, turn)
        try:
            wait_s = math.inf if waiter.begun else self._wait_s
            await self._wait_for_turn(turn, since, since + wait_s, events)
        except BaseException:
            if not self._queue.remove(waiter) and turn.granted:
                self._make_ticket(turn).release()
            raise
        finally:
            del self._turns[waiter]
            self._metrics.waited(waiter.priority, self._clock() - since, self._queue.lengths())
        context.waits = ""

    def _join_queue(self, waiter: Waiter, turn: _Turn) -> None:
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
            await turn.wait_until_decided(min(give_up_at, send_at) - now)
        turn.raise_refusal()

    async def _keep_admitting(self) -> None:
        while self.waiting:
            await asyncio.sleep(POLL_S)
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Admit waiting prompts in order while the pool has room."""
        while (head := self._next_admissible()) is not None:
            self._queue.take_head(head)
            self._granted.append(self._clock())
            self._grant_turn(self._turns[head])

    def _next_admissible(self) -> Waiter | None:
        """The first waiter that fits. Waiters below their share, or for other nodes, may pass those
        that do not fit. A waiter whose rule allows no more than that of an earlier one stays behind
        it even if it needs fewer sequences; otherwise a request with many choices would starve."""
        full: list[tuple[CapacityRule, tuple[Kind, bool]]] = []
        for head in self._queue.heads():
            turn = self._turns[head]
            rule, nodes = self._rule_of(turn), (turn.kind, head.splits)
            if not any(nodes == others and rule.is_within(other) for other, others in full):
                if self._fits(turn, rule):
                    return head
                full.append((rule, nodes))
        return None

    def _fits(self, turn: _Turn, rule: CapacityRule) -> bool:
        nodes, load = self._view.ready(turn.kind), turn.load
        return has_room(nodes, rule, self._pending, load.tokens, load.sequences)

    def _rule_of(self, turn: _Turn) -> CapacityRule:
        if turn.background:
            return self._shared_rules[True, True]  # the one that leaves most for others
        if not self._shared:
            return self._rule
        tenant = turn.tenant
        weight = self.limits.of_tenant(tenant).weight
        over_share = self._computed.has_more(tenant, weight), self._running.has_more(tenant, weight)
        return self._shared_rules[over_share]

    def _make_turn(self, tenant: str, item: Prepared, background: bool, prompts: int = 1) -> _Turn:
        """Tokens that some node has cached do not count: placement sends the request there."""
        cached = self._view.chunks.longest(item.chunks)
        chunk = item.serving.sample.layout.chunk_tokens
        tokens = max(1, len(item.request.prompt_ids) - cached * chunk)
        load = AdmittedLoad(item.request.params.n, tokens)
        return _Turn(tenant, load, item.kind, prompts, background)

    def _grant_turn(self, turn: _Turn) -> None:
        self._pending.sequences += turn.load.sequences
        self._pending.tokens += turn.load.tokens
        if not turn.background:  # what runs in spare room takes nothing of the tenant's share
            weight = self.limits.of_tenant(turn.tenant).weight
            self._running.add(turn.tenant, turn.load.sequences, weight)
            self._computed.add(turn.tenant, turn.load.tokens, weight)
        turn.grant()

    def _retry_after_s(self) -> float:
        """Estimated seconds until all waiting prompts had their turn, at the latest rate."""
        if len(self._granted) < 2:
            return 1.0
        rate = len(self._granted) / max(1e-3, self._clock() - self._granted[0])
        return min(MAX_RETRY_AFTER_S, max(1.0, self.waiting_prompts / rate))


class _Turn:
    """The outcome a waiter waits for. `prompts`: waiting prompts of its call, with this one."""

    def __init__(
        self, tenant: str, load: AdmittedLoad, kind: Kind, prompts: int, background: bool
    ) -> None:
        self.tenant = tenant
        self.load = load
        self.kind = kind
        self.prompts = prompts
        self.background = background
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

    def raise_refusal(self) -> None:
        if self._error is not None:
            raise self._error

    async def wait_until_decided(self, seconds: float) -> None:
        """Wait until the turn is decided, at most this long."""
        try:
            async with asyncio.timeout(seconds):
                await self._decided.wait()
        except TimeoutError:
            pass


def _charged_before(item: Prepared) -> int:
    """Tokens of a request that the call which began its stream was charged."""
    if item.resumed is None:
        return 0
    return len(item.request.prompt_ids) + sum(map(len, item.resumed.outputs))


def _expected_tokens(item: Prepared) -> int:
    """Expected tokens of a request: its prompt, computed once for all choices, and its answers up
    to their limit. A vector counts none."""
    params = item.request.params
    if item.request.pooling is not None:
        return len(item.request.prompt_ids)
    answer = min(params.max_tokens, USUAL_ANSWER) if item.fills else params.max_tokens
    return len(item.request.prompt_ids) + params.n * answer

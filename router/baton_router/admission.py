"""Lets calls in: within their tenant's budgets, and in their turn while every node is full.

In: calls that are prepared, the pool's view, what became of calls. Out: a Ticket, or RateLimited,
QueueFull, QueueTimeout. A pool with room lets everybody in at once; where tenants share it, some of
the room is for those who run less, or had less computed lately, than their share. What was let in
is never held again here: who loses its node is placed anew by the dispatcher.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import product

from baton_protocol.errors import BatonError, QueueFull, QueueTimeout, Unavailable
from baton_protocol.store import Kind
from baton_router.access import Trail
from baton_router.admission_metrics import AdmissionMetrics
from baton_router.budgets import Booking, Budgets
from baton_router.calls import Usage
from baton_router.events import WAITING, EventStream
from baton_router.flights import Prepared
from baton_router.limits import Limits
from baton_router.queueing import FairQueue, Waiter
from baton_router.room import Load, Rule, has_room
from baton_router.settings import RouterSettings
from baton_router.shares import Shares
from baton_router.tenants import Tenants
from baton_router.view import PoolView

# Room also comes with nodes' reports: it is looked for so often.
LOOK_S = 0.02
# A burst of a tenant's usual traffic is short against this, and a flood is not.
LATELY_S = 5.0
# Where a client names no limit, so much of an answer is booked; the rest is paid when it is over.
USUAL_ANSWER = 1024
RATE_OVER = 64  # the last turns, by which the next ones are predicted
MAX_RETRY_AFTER_S = 60.0


class Ticket:
    """One call that was let in. To be told when it is `placed`, and when it is `over`."""

    def __init__(
        self, admission: Admission, tenant: str, load: Load, booking: Booking | None
    ) -> None:
        self._admission = admission
        self._tenant = tenant
        self._sequences = load.sequences
        self._load: Load | None = load
        self._booking = booking

    def placed(self) -> None:
        """Its requests are booked on nodes, or wait for nodes; or it is given up."""
        if self._load is not None:
            self._admission.arrived(self._load)
            self._load = None

    def over(self, usage: Usage | None) -> None:
        """`usage` is what it used; None: it had no place."""
        self.placed()
        self._admission.ended(self._tenant, self._sequences)
        self._admission.left(self._tenant, usage, self._booking)


class Admission:
    """`limits` are those in force."""

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
        rule = self._rule = Rule.of_settings(settings)
        self._shared_rules = {
            each: rule.shared(prompts=each[0], sequences=each[1])
            for each in product((False, True), repeat=2)
        }
        self._wait_s = settings.queue_timeout_s
        self._view = view
        view.eased = self._look
        self._budgets = budgets
        self._metrics = metrics
        self._clock = clock
        self._queue = FairQueue(settings.max_queued)
        self._turns: dict[Waiter, _Turn] = {}
        self._pending = Load()
        self._running = Shares(clock)  # sequences
        self._computed = Shares(clock, LATELY_S)  # tokens of prompts
        self._granted: deque[float] = deque(maxlen=RATE_OVER)
        self._looking: asyncio.Task[None] | None = None
        self._ending = False

    def use(self, tenants: Tenants, limits: Limits) -> None:
        """From now on; files that change say others."""
        self.limits, self._shared = limits, len(tenants.names) > 1

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def admit(
        self, trail: Trail, prepared: Sequence[Prepared], events: EventStream | None
    ) -> Ticket:
        """When its turn has come. Raise RateLimited, QueueFull, QueueTimeout, Unavailable."""
        tenant = trail.tenant_name
        limits = self.limits.of(tenant)
        load, tokens = self._load(prepared), sum(map(_expected, prepared))
        booking = await self._budgets.book(tenant, limits, 1, tokens)
        splits = self._rule.splits(load.tokens)
        waiter = Waiter(
            *(tenant, tokens, limits.weight, limits.priority, limits.max_queued), splits=splits
        )
        turn = _Turn(tenant, load, prepared[0].kind)
        try:
            if self.waiting or not self._fits(turn, self._rule_of(tenant)):
                await self._wait(waiter, turn, trail, events)
            else:
                self._let_in(turn)
        except BaseException:
            if booking is not None:
                self._budgets.settle(booking, 0)
            raise
        return Ticket(self, tenant, load, booking)

    def end(self) -> None:
        """The router goes: who waits is told to come again."""
        self._ending = True
        told = Unavailable("the router is shutting down; send the request again")
        for waiter, turn in list(self._turns.items()):
            self._queue.remove(waiter)
            turn.refuse(told)

    async def close(self) -> None:
        self.end()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._budgets.close()

    # --- what tickets say -------------------------------------------------------------------------

    def arrived(self, load: Load) -> None:
        self._pending.sequences -= load.sequences
        self._pending.tokens -= load.tokens
        self._look()

    def ended(self, tenant: str, sequences: int) -> None:
        self._running.give_back(tenant, sequences)

    def left(self, tenant: str, usage: Usage | None, booking: Booking | None) -> None:
        if usage is not None:
            self._metrics.used(tenant, usage)
        if booking is not None:
            used = usage.prompt + usage.completion if usage is not None else 0
            self._budgets.settle(booking, used)
        self._look()

    # --- turns ------------------------------------------------------------------------------------

    async def _wait(
        self, waiter: Waiter, turn: _Turn, trail: Trail, events: EventStream | None
    ) -> None:
        since = self._clock()
        trail.waits = f"every node is full; {self.waiting} requests waited before it"
        self._join(waiter, turn)
        try:
            await self._come(turn, since, events)
        except BaseException:
            if not self._queue.remove(waiter) and turn.granted:
                self.ended(turn.tenant, turn.load.sequences)
                self.arrived(turn.load)
            raise
        finally:
            del self._turns[waiter]
            self._metrics.waited(waiter.priority, self._clock() - since, self._queue.lengths())
        trail.waits = ""

    def _join(self, waiter: Waiter, turn: _Turn) -> None:
        if self._ending:
            raise Unavailable("the router is shutting down; send the request again")
        try:
            loser = self._queue.add(waiter)
        except QueueFull as error:
            error.retry_after = self._drain_s()
            raise
        if loser is not None:
            self._turns[loser].refuse(
                QueueFull(
                    "another tenant, with fewer requests that wait, got this one's place in the"
                    " full queue; send the request again later",
                    retry_after=self._drain_s(),
                )
            )
        self._turns[waiter] = turn
        self._metrics.lengths(self._queue.lengths())
        self._look()
        if self.waiting and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._keep_looking())

    async def _come(self, turn: _Turn, since: float, events: EventStream | None) -> None:
        give_up_at, told_at = since + self._wait_s, since
        while not turn.done:
            now = self._clock()
            if now >= give_up_at:
                raise QueueTimeout(
                    f"every node was full for {self._wait_s:g} s; send the request again later",
                    retry_after=self._drain_s(),
                )
            tell_at = told_at + events.keepalive_s if events is not None else give_up_at
            if events is not None and now >= tell_at:
                await events.write(WAITING)
                told_at = now
                continue
            await turn.within(min(give_up_at, tell_at) - now)
        turn.check()

    async def _keep_looking(self) -> None:
        while self.waiting:
            await asyncio.sleep(LOOK_S)
            self._look()

    def _look(self) -> None:
        """Let in whose turn it is, as long as there is room."""
        while (head := self._next()) is not None:
            self._queue.take(head)
            self._granted.append(self._clock())
            self._let_in(self._turns[head])

    def _next(self) -> Waiter | None:
        """The first for whom there is room: who has less than its share, or waits for other nodes,
        passes the others. Of those who want the same the first is asked for all."""
        full: set[tuple[Rule, Kind, bool]] = set()
        for head in self._queue.heads():
            turn = self._turns[head]
            rule = self._rule_of(turn.tenant)
            wanted = rule, turn.kind, head.splits
            if wanted not in full:
                if self._fits(turn, rule):
                    return head
                full.add(wanted)
        return None

    def _fits(self, turn: _Turn, rule: Rule) -> bool:
        return has_room(self._view.ready(turn.kind), rule, self._pending, turn.load.tokens)

    def _rule_of(self, tenant: str) -> Rule:
        if not self._shared:
            return self._rule
        weight = self.limits.of(tenant).weight
        more = self._computed.has_more(tenant, weight), self._running.has_more(tenant, weight)
        return self._shared_rules[more]

    def _load(self, prepared: Sequence[Prepared]) -> Load:
        """What is in some node's cache is not computed: there its requests go."""
        load = Load()
        for item in prepared:
            cached = self._view.chunks.longest(item.chunks)
            chunk = item.serving.sample.layout.chunk_tokens
            load.sequences += item.request.params.n
            load.tokens += max(1, len(item.request.prompt_ids) - cached * chunk)
        return load

    def _let_in(self, turn: _Turn) -> None:
        self._pending.sequences += turn.load.sequences
        self._pending.tokens += turn.load.tokens
        weight = self.limits.of(turn.tenant).weight
        self._running.add(turn.tenant, turn.load.sequences, weight)
        self._computed.add(turn.tenant, turn.load.tokens, weight)
        turn.grant()

    def _drain_s(self) -> float:
        """Until as many as wait now have had their turn, by the rate of the last ones."""
        if len(self._granted) < 2:
            return 1.0
        rate = len(self._granted) / max(1e-3, self._clock() - self._granted[0])
        return min(MAX_RETRY_AFTER_S, max(1.0, self.waiting / rate))


class _Turn:
    """What a waiter waits for."""

    def __init__(self, tenant: str, load: Load, kind: Kind) -> None:
        self.tenant = tenant
        self.load = load
        self.kind = kind
        self._error: BatonError | None = None
        self._come = asyncio.Event()

    @property
    def done(self) -> bool:
        return self._come.is_set()

    @property
    def granted(self) -> bool:
        return self.done and self._error is None

    def grant(self) -> None:
        self._come.set()

    def refuse(self, error: BatonError) -> None:
        if not self.done:
            self._error = error
            self._come.set()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    async def within(self, seconds: float) -> None:
        """Until it has come, or so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._come.wait()
        except TimeoutError:
            pass


def _expected(item: Prepared) -> int:
    """Tokens of a request's prompt and answers, as far as its client has said."""
    params = item.request.params
    answer = min(params.max_tokens, USUAL_ANSWER) if item.fills else params.max_tokens
    return len(item.request.prompt_ids) + params.n * answer

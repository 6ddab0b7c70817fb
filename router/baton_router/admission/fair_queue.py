"""Whose turn it is where requests wait for nodes. Nothing here knows of time, nodes or asyncio.

In: waiters, each of a tenant with its weight and priority. Out: the next one. All of a higher
priority go first. Tenants of one priority share by weight and tokens, by start-time fair queueing:
a tenant's first waiter has the virtual time at which its tenant's share of what went before is used
up, and the lowest goes first. Within a tenant the first that came goes first. Who finds no room for
the one whose turn it is may let the next tenant's pass, or the first of the same tenant's other
lane: what prefill nodes compute waits for other nodes than what is short.

A call waits as one: for its first prompt, and again for the next one when that had its turn.

Bounded: where it is full, a waiter takes the place of the last one of whoever has more than it,
of those with the lowest priority; else it is refused. A call that has begun keeps its place.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Protocol

from baton_protocol.errors import QueueFull

FADED = 0.01  # who has less of all than this is forgotten


@dataclass(slots=True)
class _Share:
    amount: float
    weight: float


class UsageShares:
    """Whether a tenant has more of something than its share: of what runs, or of what was begun
    lately.

    In: how much tenants get and give back, and their weights. Out: yes or no. Where amounts fade,
    they do so by being added ever larger, so that nothing else is touched: only ratios are asked
    for.

    An amount fades to 1/e in `fades_s` by `clock`; else it stays until it is given back.
    """

    def __init__(self, clock: Callable[[], float], fades_s: float = math.inf) -> None:
        self._clock = clock
        self._fades_s = fades_s
        self._since = clock()
        self._shares: dict[str, _Share] = {}
        self._amounts = 0.0
        self._weights = 0.0

    def __len__(self) -> int:
        """Tenants that have something."""
        return len(self._shares)

    def add(self, tenant: str, amount: float, weight: float) -> None:
        passed = (self._clock() - self._since) / self._fades_s
        if passed > 1:
            self._fade(math.exp(-passed))
            passed = 0.0
        grown = math.exp(passed)
        share = self._shares.setdefault(tenant, _Share(0.0, 0.0))
        share.amount += amount * grown
        self._amounts += amount * grown
        self._weights += weight - share.weight
        share.weight = weight

    def give_back(self, tenant: str, amount: float) -> None:
        """Of what does not fade."""
        share = self._shares[tenant]
        share.amount -= amount
        self._amounts -= amount
        if share.amount <= 0:
            self._weights -= self._shares.pop(tenant).weight

    def has_more(self, tenant: str, weight: float) -> bool:
        """Than its weight's share, beside those who have something, or one other of weight 1."""
        share = self._shares.get(tenant)
        if share is None:
            return False
        others = self._weights - share.weight if len(self._shares) > 1 else 1.0
        return share.amount * (weight + others) > weight * self._amounts

    def _fade(self, left: float) -> None:
        """To so much of what they are; after long enough nothing is left of anybody."""
        self._since = self._clock()
        least = FADED * left * self._amounts
        for share in self._shares.values():
            share.amount *= left
        self._shares = {name: one for name, one in self._shares.items() if one.amount > least}
        self._amounts = sum(share.amount for share in self._shares.values())
        self._weights = sum(share.weight for share in self._shares.values())


class Waiting(Protocol):
    """What admission sees of a call that waits; the HTTP layer has the real one.

    `waits` is set to why the call waits, "" for one that does not.
    """

    waits: str

    @property
    def tenant_name(self) -> str:
        """Whose call it is; "" where the router has no API keys."""


class KeepAlive(Protocol):
    """A stream whose client is to hear something every `keepalive_s`, or it gives up."""

    keepalive_s: float

    async def keep_alive(self) -> None:
        """Say that the stream lives; raise ConnectionError where the client is gone."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """One call, for its next prompt; `tokens` is what that is expected to cost. At most `most` of
    its tenant wait. Its lane is whether prefill nodes compute the prompt (`splits`). Of a call that
    has `begun` earlier prompts run, or did: it is never refused."""

    tenant: str
    tokens: int
    weight: float = 1.0
    priority: int = 0
    most: int | None = None
    splits: bool = False
    begun: bool = False


Lane = OrderedDict[Waiter, int]  # with their numbers in the order in which they came


@dataclass(slots=True)
class _Flow:
    """One tenant at one priority. `start` is the virtual time of its first waiter."""

    tenant: str
    start: float
    weight: float = 1.0
    lanes: tuple[Lane, Lane] = field(default_factory=lambda: (OrderedDict(), OrderedDict()))
    came: int = 0
    begun: int = 0  # of those that wait

    def __len__(self) -> int:
        return sum(map(len, self.lanes))

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self.lanes[waiter.splits]

    def add(self, waiter: Waiter) -> None:
        self.came += 1
        self.weight = waiter.weight
        self.begun += waiter.begun
        self.lanes[waiter.splits][waiter] = self.came

    def remove(self, waiter: Waiter) -> None:
        self.begun -= waiter.begun
        del self.lanes[waiter.splits][waiter]

    def heads(self) -> list[Waiter]:
        """The first of each lane, the first of all first."""
        heads = [(lane[head], head) for lane in self.lanes for head in islice(lane, 1)]
        return [head for _, head in sorted(heads, key=itemgetter(0))]

    def last(self) -> Waiter:
        """Of those that have not begun; there is one."""
        lasts = [
            (lane[last], last)
            for lane in self.lanes
            for last in islice((one for one in reversed(lane) if not one.begun), 1)
        ]
        return max(lasts, key=itemgetter(0))[1]

    @property
    def refusable(self) -> int:
        return len(self) - self.begun

    @property
    def share(self) -> float:
        return self.refusable / self.weight


class _Level:
    """One priority. `now` is its virtual time; `ends`: where a tenant that waits no more used more
    than its share until, kept as long as that is ahead of `now` and somebody waits: when nobody
    does any more, all begin anew alike."""

    def __init__(self) -> None:
        self.now = 0.0
        self.flows: dict[str, _Flow] = {}
        self.ends: dict[str, float] = {}

    def add(self, waiter: Waiter) -> None:
        flow = self.flows.get(waiter.tenant)
        if flow is None:
            start = max(self.now, self.ends.pop(waiter.tenant, 0.0))
            flow = self.flows[waiter.tenant] = _Flow(waiter.tenant, start)
        flow.add(waiter)

    def take(self, head: Waiter) -> None:
        """The time is that of the lowest, so that who comes next starts no later than those that
        were passed."""
        flow = self.flows[head.tenant]
        flow.remove(head)
        self.now = min(flow.start for flow in self.flows.values())
        flow.start += max(1, head.tokens) / head.weight
        self.tidy(flow)

    def tidy(self, flow: _Flow) -> None:
        if len(flow):
            return
        del self.flows[flow.tenant]
        if not self.flows:
            self.now, self.ends = 0.0, {}
            return
        self.ends = {name: end for name, end in self.ends.items() if end > self.now}
        if flow.start > self.now:
            self.ends[flow.tenant] = flow.start


class FairQueue:
    """At most `most` waiters that have not begun."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._levels: dict[int, _Level] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def lengths(self) -> dict[int, int]:
        """How many wait, by priority; also of priorities where nobody does any more."""
        return {
            priority: sum(map(len, level.flows.values()))
            for priority, level in self._levels.items()
        }

    def of(self, tenant: str) -> int:
        """How many of its calls wait to begin."""
        found = (level.flows.get(tenant) for level in self._levels.values())
        return sum(flow.refusable for flow in found if flow is not None)

    def add(self, waiter: Waiter) -> Waiter | None:
        """Who lost its place to the newcomer, if somebody did. Raise QueueFull."""
        loser = None if waiter.begun else self._place(waiter)
        if loser is not None:
            self.remove(loser)
        self._levels.setdefault(waiter.priority, _Level()).add(waiter)
        self._size += 1
        return loser

    def remove(self, waiter: Waiter) -> bool:
        """Its client left, or it waited too long; False where it does not wait."""
        level = self._levels.get(waiter.priority)
        flow = level.flows.get(waiter.tenant) if level is not None else None
        if level is None or flow is None or waiter not in flow:
            return False
        flow.remove(waiter)
        self._size -= 1
        level.tidy(flow)
        return True

    def heads(self) -> Iterator[Waiter]:
        """The first of each lane of each tenant of the highest priority, in the order of turns."""
        level = self._highest()
        if level is not None:
            for flow in sorted(level.flows.values(), key=lambda flow: flow.start):
                yield from flow.heads()

    def take(self, head: Waiter) -> None:
        """One of `heads` waits no more."""
        self._levels[head.priority].take(head)
        self._size -= 1

    def _highest(self) -> _Level | None:
        priority = max((p for p, level in self._levels.items() if level.flows), default=None)
        return self._levels[priority] if priority is not None else None

    def _place(self, waiter: Waiter) -> Waiter | None:
        """Whose place it takes, if not a free one."""
        if waiter.most is not None and self.of(waiter.tenant) >= waiter.most:
            raise QueueFull(
                f"{self.of(waiter.tenant)} requests of this tenant wait already, and {waiter.most}"
                " may; send the request again later"
            )
        flows = (flow for level in self._levels.values() for flow in level.flows.values())
        full = sum(flow.refusable for flow in flows) >= self._most
        return self._loser(waiter) if full else None

    def _loser(self, waiter: Waiter) -> Waiter:
        new = {
            p: [flow for flow in level.flows.values() if flow.refusable]
            for p, level in self._levels.items()
        }
        lowest = min((p for p, flows in new.items() if flows), default=None)
        if lowest is not None and lowest <= waiter.priority:
            largest = max(new[lowest], key=lambda flow: flow.share)
            mine = self._levels[lowest].flows.get(waiter.tenant)
            having = mine.refusable if mine is not None else 0
            if lowest < waiter.priority or (having + 1) / waiter.weight < largest.share:
                return largest.last()
        raise QueueFull(
            f"every node is full and {self._most} requests wait already; send the request again"
            " later"
        )

"""The order of waiting calls. Pure: no time, nodes or asyncio.

In: waiters, each with its tenant, weight and priority. Out: the next one. Higher priorities go
first. Tenants of one priority share by weight and tokens with start-time fair queueing: a tenant's
first waiter starts at the virtual time when the tenant's earlier work has used up its share, and
the lowest start goes first. Within a tenant the lowest `rank` goes first, and among equal ones the
first that came: ranks change no tenant's share. If there is no
room for the first waiter, the caller may try the next tenant's, or the first of the same tenant's
other lane: split requests and whole ones need different nodes.

A call is one waiter at a time: it waits for its first prompt, then again for the next one.

The queue is bounded. When it is full, a newcomer replaces the last waiter of the tenant with the
largest share among those of the lowest priority, or is refused. A call that has begun keeps its
place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from baton_protocol.errors import QueueFull

# The priority of calls in the background, below each that a tenant can have.
BACKGROUND = -1000
Place = tuple[int, int]  # a waiter's rank, and its number in order of arrival


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """One call, waiting for its next prompt. `tokens` is that prompt's expected cost. At most
    `max_queued` calls of its tenant wait to begin. `splits` selects its lane: whether prefill nodes
    compute the prompt. A call has `begun` once one of its prompts was admitted; it is never
    refused. `rank` is the priority that the client gave the call, lowest first."""

    tenant: str
    tokens: int
    weight: float = 1.0
    priority: int = 0
    max_queued: int | None = None
    splits: bool = False
    begun: bool = False
    rank: int = 0


class _Lane:
    """Waiters in the order of their places."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._waiters: list[Waiter] = []
        self._place_of: dict[Waiter, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self._place_of

    def add(self, waiter: Waiter, number: int) -> None:
        place = self._place_of[waiter] = (waiter.rank, number)
        index = bisect_left(self._places, place)
        self._places.insert(index, place)
        self._waiters.insert(index, waiter)

    def remove(self, waiter: Waiter) -> None:
        index = bisect_left(self._places, self._place_of.pop(waiter))
        del self._places[index], self._waiters[index]

    def first(self) -> list[tuple[Place, Waiter]]:
        """The first waiter and its place; empty if there is none."""
        return list(zip(self._places[:1], self._waiters[:1], strict=True))

    def last_to_begin(self) -> list[tuple[Place, Waiter]]:
        """The same for the last waiter that has not begun."""
        for waiter in reversed(self._waiters):
            if not waiter.begun:
                return [(self._place_of[waiter], waiter)]
        return []


@dataclass(slots=True)
class _Flow:
    """The waiters of one tenant at one priority. `start` is the virtual time of the first one."""

    tenant: str
    start: float
    weight: float = 1.0
    lanes: tuple[_Lane, _Lane] = field(default_factory=lambda: (_Lane(), _Lane()))
    arrivals: int = 0
    begun: int = 0  # how many of the waiters have begun

    def __len__(self) -> int:
        return sum(map(len, self.lanes))

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self.lanes[waiter.splits]

    def add(self, waiter: Waiter) -> None:
        self.arrivals += 1
        self.weight = waiter.weight
        self.begun += waiter.begun
        self.lanes[waiter.splits].add(waiter, self.arrivals)

    def remove(self, waiter: Waiter) -> None:
        self.begun -= waiter.begun
        self.lanes[waiter.splits].remove(waiter)

    def heads(self) -> list[Waiter]:
        """The first waiter of each lane, in order."""
        heads = [head for lane in self.lanes for head in lane.first()]
        return [head for _, head in sorted(heads, key=itemgetter(0))]

    def last(self) -> Waiter:
        """The last waiter that has not begun; at least one must exist."""
        candidates = [last for lane in self.lanes for last in lane.last_to_begin()]
        return max(candidates, key=itemgetter(0))[1]

    @property
    def refusable(self) -> int:
        return len(self) - self.begun

    @property
    def share(self) -> float:
        return self.refusable / self.weight


class _Level:
    """The waiters of one priority. `now` is the virtual time. `ends` maps tenants without waiters
    to the virtual time until which they have used their share. Entries last while they are ahead of
    `now`; when the level is empty, `now` and `ends` are reset."""

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
        """Remove a head. The virtual time becomes the lowest start, so that a newcomer does not
        start before waiters that were passed over."""
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
    """Holds at most `max_waiting` waiters that have not begun."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._levels: dict[int, _Level] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def lengths(self) -> dict[int, int]:
        """Number of waiters by priority, including priorities that have none left."""
        return {
            priority: sum(map(len, level.flows.values()))
            for priority, level in self._levels.items()
        }

    def count_waiting(self, tenant: str) -> int:
        """Number of the tenant's calls that wait to begin, without those in the background."""
        levels = (level for priority, level in self._levels.items() if priority > BACKGROUND)
        flows = (level.flows.get(tenant) for level in levels)
        return sum(flow.refusable for flow in flows if flow is not None)

    def add(self, waiter: Waiter) -> Waiter | None:
        """Add a waiter. Return the waiter it replaced, if any. Raise QueueFull."""
        evicted = None if waiter.begun else self._make_room(waiter)
        if evicted is not None:
            self.remove(evicted)
        self._levels.setdefault(waiter.priority, _Level()).add(waiter)
        self._size += 1
        return evicted

    def remove(self, waiter: Waiter) -> bool:
        """Remove a waiter that gave up; False if it does not wait."""
        level = self._levels.get(waiter.priority)
        flow = level.flows.get(waiter.tenant) if level is not None else None
        if level is None or flow is None or waiter not in flow:
            return False
        flow.remove(waiter)
        self._size -= 1
        level.tidy(flow)
        return True

    def heads(self) -> Iterator[Waiter]:
        """The first waiter of each lane and tenant at the highest priority, in fair order."""
        level = self._highest()
        if level is not None:
            for flow in sorted(level.flows.values(), key=lambda flow: flow.start):
                yield from flow.heads()

    def take_head(self, head: Waiter) -> None:
        """Remove a waiter that `heads` returned, because it was admitted."""
        self._levels[head.priority].take(head)
        self._size -= 1

    def _highest(self) -> _Level | None:
        priority = max((p for p, level in self._levels.items() if level.flows), default=None)
        return self._levels[priority] if priority is not None else None

    def _make_room(self, waiter: Waiter) -> Waiter | None:
        """The waiter to replace, or None if a place is free. Raise QueueFull."""
        waiting = self.count_waiting(waiter.tenant)
        if waiter.max_queued is not None and waiting >= waiter.max_queued:
            raise QueueFull(
                f"this tenant already has {waiting} waiting requests and may have at most "
                f"{waiter.max_queued}; send the request again later"
            )
        flows = (flow for level in self._levels.values() for flow in level.flows.values())
        full = sum(flow.refusable for flow in flows) >= self._max_waiting
        return self._choose_evicted(waiter) if full else None

    def _choose_evicted(self, waiter: Waiter) -> Waiter:
        refusable = {
            p: [flow for flow in level.flows.values() if flow.refusable]
            for p, level in self._levels.items()
        }
        lowest = min((p for p, flows in refusable.items() if flows), default=None)
        if lowest is not None and lowest <= waiter.priority:
            largest = max(refusable[lowest], key=lambda flow: flow.share)
            own = self._levels[lowest].flows.get(waiter.tenant)
            own_waiting = own.refusable if own is not None else 0
            if lowest < waiter.priority or (own_waiting + 1) / waiter.weight < largest.share:
                return largest.last()
        raise QueueFull(
            f"every node is full and the queue already holds {self._max_waiting} requests; send"
            " the request again later"
        )

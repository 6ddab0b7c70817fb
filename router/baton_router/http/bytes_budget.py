"""Room for large bodies, shared among tenants.

In: how many bytes a body of a tenant needs. Out: a turn, or an error after a wait. Tenants get
room in turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict, deque

from baton_protocol.errors import BodiesFull

MAX_WAITING = 100  # large bodies of one tenant; more are refused at once
RETRY_AFTER_S = 1.0


class BytesBudget:
    """Shares `total` bytes among bodies. Several bodies of one tenant get at most half. A body that
    is alone always fits."""

    def __init__(self, total: int, wait_s: float) -> None:
        self._total = total
        self._wait_s = wait_s
        self._taken: defaultdict[str, int] = defaultdict(int)
        # Waiting bodies by tenant; the tenant without a turn for longest comes first.
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()

    async def take_room(self, tenant: str, size: int) -> None:
        """Wait for `size` bytes. Raise BodiesFull on timeout, or at once if too many wait."""
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= MAX_WAITING:
            raise BodiesFull(
                f"{len(queue)} of your large bodies already wait to be read; send fewer at a time",
                retry_after=RETRY_AFTER_S,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (turn, size)
        queue.append(place)
        self._hand_out()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.free_room(tenant, size)
            else:
                self._leave(tenant, place)
            if isinstance(error, TimeoutError):
                raise BodiesFull(
                    f"other large bodies took all the room for {self._wait_s:g} s; send fewer "
                    "at a time, or smaller ones",
                    retry_after=RETRY_AFTER_S,
                ) from None
            raise

    def free_room(self, tenant: str, size: int) -> None:
        self._taken[tenant] -= size
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._hand_out()

    def _leave(self, tenant: str, place: tuple[asyncio.Future[None], int]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and place in queue:
            queue.remove(place)
        self._hand_out()

    def _hand_out(self) -> None:
        """Give room to waiting bodies in turn. Skip a tenant that has its half. If the next body
        does not fit into the total, stop, so that smaller ones do not overtake it forever."""
        progress = True
        while progress:
            progress = False
            for tenant in list(self._waiting):
                queue = self._waiting[tenant]
                if not queue:
                    del self._waiting[tenant]
                    continue
                turn, size = queue[0]
                own, taken = self._taken.get(tenant, 0), sum(self._taken.values())
                if own and own + size > self._total // 2:
                    continue
                if taken and taken + size > self._total:
                    return
                queue.popleft()
                self._waiting.move_to_end(tenant)
                self._taken[tenant] += size
                turn.set_result(None)
                progress = True

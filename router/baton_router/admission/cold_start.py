"""Holds calls for a pool without nodes, which is scaled up because calls wait, and for one whose
nodes sleep, which are woken.

In: calls whose bodies are read, changes of the fleet. Out: the moment from which they can be
prepared. Until a node is ready the router knows nothing of the model, not even its tokenizer, so
calls wait unprepared; streams get comment lines. The router's load report counts waiting calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from baton_protocol.errors import Unavailable
from baton_router.admission.keep_alive import KeepAlive
from baton_router.nodes.fleet import Fleet
from baton_router.nodes.pool_sleep import PoolSleep
from baton_router.openai.call import Call
from baton_router.openai.sampling import check_alone
from baton_router.requests.context import RequestContext


class ColdStart:
    """Holds a call for up to `wait_s` seconds (0: holds none). `changed` returns the event of the
    fleet's next change. `held_calls` counts the calls that wait."""

    def __init__(
        self,
        fleet: Fleet,
        changed: Callable[[], asyncio.Event],
        sleep: PoolSleep,
        *,
        wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.held_calls = 0
        self._fleet = fleet
        self._changed = changed
        self._sleep = sleep
        self._wait_s = wait_s
        self._clock = clock
        self._ending = False

    @property
    def enabled(self) -> bool:
        return self._wait_s > 0

    def refuse_held(self) -> None:
        """Shutdown: fail held calls at the fleet's next change."""
        self._ending = True

    async def hold_call(
        self, call: Call, context: RequestContext, events: KeepAlive | None
    ) -> float | None:
        """Wait until a node is ready. Return the time until which the call may wait for anything
        else, or None if it did not have to wait. Raise Unavailable after `wait_s` seconds. Raise
        InvalidRequest or NotFound at once for a call that no node would accept."""
        if not self.enabled or self._fleet.offers.why_unready() is None:
            return None
        check_alone(call.sampling, call.default_max_tokens)
        self._fleet.offers.check_name(call.options.model)
        give_up_at = self._clock() + self._wait_s
        context.waits = "the pool has no ready node yet"
        self.held_calls += 1
        self._sleep.act()
        try:
            await self._wait_for_node(give_up_at, events)
        finally:
            self.held_calls -= 1
        return give_up_at

    async def _wait_for_node(self, give_up_at: float, events: KeepAlive | None) -> None:
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
                trouble = self._sleep.trouble()
                raise Unavailable(
                    f"no node was ready within {self._wait_s:g} s (nodes: {states}); "
                    + (f"{trouble}; " if trouble else "")
                    + "send the request again"
                )
            if events is not None and now >= silent_until:
                await events.keep_alive()
                silent_until = self._silent_until(events)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(give_up_at, silent_until) - now):
                    await change.wait()

    def _silent_until(self, events: KeepAlive | None) -> float:
        return self._clock() + events.keepalive_s if events is not None else float("inf")

"""Holds calls for a pool that sleeps: it has no node, and gets one because they wait.

In: calls whose bodies are read, changes of the fleet. Out: the moment from which they can be
prepared. Until a node is there nothing is known of the model, not even its tokenizer, so they wait
as they came; streams get signs of life. How many wait is in the router's report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from baton_protocol.errors import Unavailable
from baton_router.admission.waiting import KeepAlive, Waiting
from baton_router.nodes.fleet import Fleet
from baton_router.openai.endpoint import Call
from baton_router.openai.sampling_params import check_alone


class ColdStart:
    """`wait_s` 0: nobody is held. `changed` is the event of the fleet's next change."""

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
        """The router goes: with the fleet's next change all are told to come again."""
        self._ending = True

    async def hold(self, call: Call, waiting: Waiting, events: KeepAlive | None) -> float | None:
        """Until a node is ready. Return until when the call may wait for what it still lacks, None
        for one that did not have to wait. Raise Unavailable after `wait_s`; InvalidRequest and
        NotFound at once, for what no node would take."""
        if not self.on or self._fleet.why_unready() is None:
            return None
        check_alone(call.sampling, call.default_max_tokens)
        self._fleet.check_name(call.options.model)
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
            change = self._changed()  # taken before looking: what changes meanwhile is not missed
            if self._ending:
                raise Unavailable("the router is shutting down; send the request again")
            if self._fleet.why_unready() is None:
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

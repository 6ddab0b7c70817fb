"""What clients ask of this router and how long they wait, counted as it happens.

In: requests accepted and placed, tokens delivered. Out: a RouterReport, for whoever decides how
many nodes the pool has; `ttft` and `itl` are on the router's /metrics too. All counters begin at 0
with the process, which has a name of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from baton_protocol.store import LATENCY_BOUNDS_S, RouterReport
from baton_router.metrics.histograms import Timings


class Demand:
    """`router` names this start of this router."""

    def __init__(self, router: str, clock: Callable[[], float]) -> None:
        self.router = router
        self._clock = clock
        self._started = self._busy_at = clock()
        self._requests = self._prompt_tokens = self._uncached_tokens = self._output_tokens = 0
        self.ttft = _timings("time_to_first_token", "Request to its first token.")
        self.itl = _timings("inter_token_latency", "Between deltas of one choice.")

    def accepted(self, prompts: Iterable[int]) -> None:
        """A call's requests, each by its prompt's tokens."""
        self._busy_at = self._clock()
        for tokens in prompts:
            self._requests += 1
            self._prompt_tokens += tokens

    def placed(self, uncached: int) -> None:
        """For the first time: so many tokens of the prompt are to be computed."""
        self._uncached_tokens += uncached

    def delivered(self, tokens: int) -> None:
        self._output_tokens += tokens

    def report(self, live: int, held: int) -> RouterReport:
        """As of now. What was live between two calls and is over counts as the last one saw it:
        `idle_s` is too long by at most the time between them."""
        now = self._clock()
        if live or held:
            self._busy_at = now
        return RouterReport(
            router=self.router,
            uptime_s=now - self._started,
            requests_total=self._requests,
            prompt_tokens_total=self._prompt_tokens,
            uncached_tokens_total=self._uncached_tokens,
            output_tokens_total=self._output_tokens,
            live=live,
            held=held,
            idle_s=now - self._busy_at,
            ttft_counts=tuple(self.ttft.counts),
            itl_counts=tuple(self.itl.counts),
        )


def _timings(name: str, what: str) -> Timings:
    return Timings(f"baton_router_{name}_seconds", what, LATENCY_BOUNDS_S)

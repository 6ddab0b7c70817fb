"""What this router's clients ask of it, for its load report and /metrics.

In: requests, placements, tokens. Out: a RouterReport, which the autoscaler adds up over all
routers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from baton_protocol.store import LATENCY_BOUNDS_S, RouterReport
from baton_router.metrics.timings import Timings


class DemandCounter:
    """Counts the demand of this router's clients and their latencies.

    In: requests accepted and placed, tokens delivered. Out: a RouterReport for the autoscaler;
    /metrics also shows `ttft` and `itl`. All counters start at 0 with the process. `router` is a
    name that is unique to this start of the router.
    """

    def __init__(self, router: str, clock: Callable[[], float]) -> None:
        self.router = router
        self._clock = clock
        self._started = self._busy_at = clock()
        self._requests = self._prompt_tokens = self._uncached_tokens = self._output_tokens = 0
        self.ttft = _timings(
            "time_to_first_token", "Seconds from a request's start to its first token."
        )
        self.itl = _timings("inter_token_latency", "Seconds between two deltas of one choice.")

    def accepted(self, prompts: Iterable[int]) -> None:
        """Count a call's requests. `prompts` holds the tokens of each prompt."""
        self._busy_at = self._clock()
        for tokens in prompts:
            self._requests += 1
            self._prompt_tokens += tokens

    def placed(self, uncached: int) -> None:
        """Count a first placement, with the prompt tokens to compute."""
        self._uncached_tokens += uncached

    def delivered(self, tokens: int) -> None:
        self._output_tokens += tokens

    def report(self, live: int, held: int) -> RouterReport:
        """The current report. Requests that ended since the last call count as busy until that
        call, so `idle_s` is too long by at most the time between the calls."""
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


def _timings(name: str, help_text: str) -> Timings:
    return Timings(f"baton_router_{name}_seconds", help_text, LATENCY_BOUNDS_S)

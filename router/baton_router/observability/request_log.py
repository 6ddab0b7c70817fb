"""Writes one log line per generation request, when it ends.

In: the request's context and its status. Out: a line with the router's own numbers and names. It
contains nothing a client wrote except its `x-request-id`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton_router.requests.context import RequestContext
from baton_router.requests.in_flight import InFlightRequest

# Node figures about prompts: numbers of tokens, and the predicted costs of fetching and computing.
TOKEN_FIGURES = ("matched_tokens", "fetched_tokens", "declined_tokens")
COST_FIGURES = ("fetch_predicted_ms", "compute_predicted_ms")

logger = logging.getLogger(__name__)


def log_request(context: RequestContext, status: int, now: float) -> None:
    """Write the line. `status` is the failure's if a stream failed after its 200."""
    if not logger.isEnabledFor(logging.INFO):
        return
    usage, ttft_s = context.usage(), context.ttft_s
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    total_ms = round((now - context.started) * 1000, 1)
    logger.info(
        "%s %d: %d prompt and %d completion tokens, attempts %d, %.0f ms",
        *(context.endpoint, status, prompt, completion, context.attempts, total_ms),
        extra={
            "request": context.id,
            "client_request": context.client_id or None,
            "endpoint": context.endpoint,
            "tenant": context.tenant_name,
            "status": status,
            "error": None if context.failure is None else context.failure.code,
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            **_prompt_figures(context.in_flight),
            "attempts": context.attempts,
            "ttft_ms": None if ttft_s is None else round(ttft_s * 1000, 1),
            "total_ms": total_ms,
        },
    )


def _prompt_figures(in_flight: Sequence[InFlightRequest]) -> dict[str, float]:
    """Node figures about the prompts, summed over all prompts of a call."""
    reported = [request.record.stats for request in in_flight if request.record.stats is not None]
    token_sums = {name: sum(getattr(stats, name) for stats in reported) for name in TOKEN_FIGURES}
    cost_sums = {
        name: round(sum(getattr(stats, name) for stats in reported), 1) for name in COST_FIGURES
    }
    return token_sums | cost_sums

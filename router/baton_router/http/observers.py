"""The parts that record how each request began and ended: metrics, log, explanations, traces, the
live page's feed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from baton_router.live.feed import LiveFeed
from baton_router.metrics.router_metrics import RouterMetrics
from baton_router.metrics.vllm_names import VllmNames
from baton_router.observability.explanation import ExplanationHistory
from baton_router.observability.request_log import log_request
from baton_router.observability.tracing import Tracing
from baton_router.requests.context import RequestContext

CONTEXT = web.RequestKey("context", RequestContext)  # set by the outer middleware in `app`
CLIENT_LEFT = 499  # recorded for an answer whose client did not wait for its status

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """`vllm` has the figures under vLLM's names. `refused` counts errors by code."""

    metrics: RouterMetrics
    vllm: VllmNames
    refused: Callable[[str], None]
    explanations: ExplanationHistory
    tracing: Tracing
    live: LiveFeed

    def begin_call(self, context: RequestContext, traceparent: str) -> None:
        context.trace = self.tracing.begin_call(traceparent)
        self.explanations.begin_call(context)

    def end_call(self, context: RequestContext, status: int, now: float) -> None:
        """Record the end of a call. A bug in what explains it must not cost the answer."""
        self.metrics.answered(context.endpoint, status)
        log_request(context, status, now)
        if context.failure is not None:
            self.refused(context.failure.code)
        try:
            self.explanations.end_call(context, status)
            self.tracing.end_call(context, status)
            self.live.note_end(context, status, now)
        except Exception:
            logger.exception(
                "cannot record the request's explanation or trace", extra={"request": context.id}
            )

"""The server's table of requests: which router owns each, and what was sent to it.

In: frames from routers and from the engine. Out: frames for the engine; Deltas, PrefillDone and
JobFailed on the owner's link.

A broken link does not abort its requests. A router that reconnects within `grace_s` and sends its
job again gets each delta that it missed, whole and once. So the table keeps sent deltas for a
while, also those of ended requests, whose last frame may have been lost with the link. After the
grace period, requests without a link are aborted.

A request belongs to the router that sent its job. Other routers can neither end it nor get its
tokens.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from baton_engine.interface import Complete, TokenOut
from baton_node.ipc.messages import FinishChoice, Step, ToEngine
from baton_node.server.links import RouterLink
from baton_node.server.metrics import NodeMetrics
from baton_node.server.request_stream import RequestStream, open_stream
from baton_node.server.spans import NodeSpans
from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import RequestId
from baton_protocol.link import (
    Abort,
    Delta,
    Deltas,
    FirstTokens,
    JobFailed,
    NoFirstTokens,
    PrefillJob,
    RunJob,
)
from baton_text.logprobs import add_token_texts
from baton_text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

HISTORY_LOST = ErrorRecord(
    message="this node no longer has all the output that the router missed",
    code="history_lost",
    status=503,
    retryable=True,
)


@dataclass(frozen=True, slots=True)
class KeptLimits:
    """How much a table keeps for routers that reconnect. It drops the oldest first."""

    history_bytes: int = 64 << 20  # deltas of all running requests, shared evenly
    request_bytes: int = 8 << 20  # deltas of one running request
    ended: int = 4096  # number of ended requests
    ended_bytes: int = 64 << 20  # deltas of all ended requests
    aborted: int = 4096  # number of Abort frames whose job may still arrive


class RequestTable:
    """All requests of one node. Belongs to the server's event loop.

    `send` sends a frame to the engine. `grace_s` is how long requests outlive their link, and how
    long ended requests are kept. `spans` records the requests that have ended.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        send: Callable[[ToEngine], None],
        metrics: NodeMetrics,
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
        spans: NodeSpans | None = None,
        limits: KeptLimits | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._send = send
        self._metrics = metrics
        self._grace_s = grace_s
        self._clock = clock
        self._spans = spans
        self._limits = limits or KeptLimits()
        self._live: dict[RequestId, RequestStream] = {}
        self._ended: OrderedDict[RequestId, RequestStream] = OrderedDict()  # oldest first
        self._ended_bytes = 0
        # The newest aborted attempt of each (router, request).
        self._aborted: OrderedDict[tuple[str, RequestId], int] = OrderedDict()

    def __len__(self) -> int:
        """Number of requests that have not ended."""
        return len(self._live)

    # --- from routers ---------------------------------------------------------------------------

    def is_anothers(self, request: RequestId, router: str) -> bool:
        """Return whether a request with this id is here and belongs to another router."""
        live = self._live.get(request) or self._ended.get(request)
        if live is None or live.router == router:
            return False
        logger.warning("refused a frame for another router's request", extra=live.about)
        return True

    def resume_job(self, job: PrefillJob | RunJob, link: RouterLink) -> bool:
        """Return True if the job is not new and needs no open_request().

        That is a job that is here already, that is older than the attempt here, or whose Abort
        arrived first. If the job is here and its router has a new link, the request moves to that
        link, and the router gets what it missed.
        """
        request = job.request
        if self._aborted.get((link.router, request.id), -1) >= request.attempt:
            return True
        live = self._live.get(request.id) or self._ended.get(request.id)
        if live is None or live.attempt < request.attempt:
            return False
        same = live.attempt == request.attempt and live.prefill == isinstance(job, PrefillJob)
        if same and live.link is not link:
            logger.info("the router reconnected to its request", extra=live.about)
            live.link = link
            self._catch_up(live, job, link)
        return True

    def open_request(self, job: PrefillJob | RunJob, link: RouterLink) -> None:
        """Start a new request, or a newer attempt, which replaces the older one."""
        live = open_stream(job, link, self._tokenizer, self._clock())
        if (older := self._live.get(live.id)) is not None:
            self._give_up(older)
        self._forget(live.id)
        if live.open_choices:
            self._live[live.id] = live
            self._send(job)

    def use_first_tokens(self, frame: FirstTokens, router: str = "") -> None:
        """The router has the prefill node's first tokens: continue after them."""
        live = self._awaiting(frame.request, frame.attempt, router)
        if live is None:
            return
        if len(frame.outputs) != live.request.params.n:
            reason = f"FirstTokens has {len(frame.outputs)} outputs for n={live.request.params.n}"
            self.use_no_first_tokens(NoFirstTokens(frame.request, frame.attempt, reason), router)
            return
        self._stop_waiting(live)
        live.start_texts(self._tokenizer, frame.outputs)
        live.open_choices -= set(frame.finished)
        self._send(frame)
        if not live.open_choices:
            self._end(live)

    def use_no_first_tokens(self, frame: NoFirstTokens, router: str = "") -> None:
        live = self._awaiting(frame.request, frame.attempt, router)
        if live is not None:
            self._stop_waiting(live)
            self._send(frame)

    def abort_request(self, frame: Abort, router: str = "") -> None:
        """Forget the request now. The engine waits for its transfers in flight. Remember the abort,
        in case it arrived before its job."""
        if self.is_anothers(frame.request, router):
            return
        key = (router, frame.request)
        self._aborted[key] = max(frame.attempt, self._aborted.pop(key, -1))
        if len(self._aborted) > self._limits.aborted:
            self._aborted.popitem(last=False)
        if (live := self._get(frame.request, frame.attempt)) is not None:
            self._give_up(live)

    # --- from the engine ------------------------------------------------------------------------

    def send_step(self, step: Step) -> None:
        """Send the tokens of one engine step: one frame per link."""
        for prompted in step.prompts:
            if (live := self._get(prompted.request, prompted.attempt)) is not None:
                live.stats = prompted.stats
                live.prompt_logprobs = add_token_texts(self._tokenizer, prompted.logprobs)
                self._metrics.observe_prompt(prompted.stats)
                if live.is_answered:
                    self._answer(live)
        for cost in step.spent:
            if (live := self._get(cost.request, cost.attempt)) is not None:
                live.note_spent(cost.time)
        for drafts in step.drafts:
            if (live := self._get(drafts.request, drafts.attempt)) is not None:
                live.add_drafts(drafts)
        limits = self._limits
        share = min(limits.request_bytes, limits.history_bytes // max(1, len(self._live)))
        frames: dict[RouterLink, list[Delta]] = {}
        ends_and_tokens: tuple[TokenOut | Complete, ...] = (*step.complete, *step.tokens)
        for token in ends_and_tokens:
            live = self._get(token.request, token.attempt)
            if live is None or token.choice not in live.open_choices:
                continue
            delta = live.make_delta(token, share)
            if delta.finish is not None and token.finish is None:
                self._send(FinishChoice(token.request, token.attempt, token.choice))
            if live.prefill:
                if live.is_answered:
                    self._answer(live)
                continue
            if live.link is not None:
                frames.setdefault(live.link, []).append(delta)
            if not live.open_choices:
                self._end(live)
        for link, deltas in frames.items():
            link.send(Deltas(tuple(deltas)))

    def fail_request(self, frame: JobFailed) -> None:
        live = self._get(frame.request, frame.attempt)
        if live is None:
            return
        level = logging.INFO if frame.error.status < 500 else logging.WARNING
        logger.log(level, "failed: %s", frame.error.code, extra=live.about)
        live.last = frame
        self._say_last(live)

    def _answer(self, live: RequestStream) -> None:
        live.last = live.prefill_done()
        self._say_last(live)

    def _say_last(self, live: RequestStream) -> None:
        self._end(live)
        if live.link is not None and live.last is not None:
            live.link.send(live.last)

    # --- lost links -----------------------------------------------------------------------------

    def orphan_requests(self, link: RouterLink) -> bool:
        """A link is lost: its requests have no link from now on. Return True if any of them still
        runs; the caller then calls tidy() after `grace_s`."""
        live = [stream for stream in self._live.values() if stream.link is link]
        ended = [stream for stream in self._ended.values() if stream.link is link]
        for stream in (*live, *ended):
            stream.link, stream.until = None, self._clock() + self._grace_s
        return bool(live)

    def drop_expired(self) -> None:
        """Abort requests whose router has not reconnected in time, and forget ended requests after
        the grace period."""
        now = self._clock()
        for live in [stream for stream in self._live.values() if stream.link is None]:
            if live.until <= now:
                logger.warning("aborted: its router did not reconnect", extra=live.about)
                self._give_up(live)
        self._forget_ended(now)

    def _catch_up(self, live: RequestStream, job: PrefillJob | RunJob, link: RouterLink) -> None:
        """Send a reconnected router what it missed. Its job, sent again, holds what it has."""
        if live.last is not None:
            link.send(live.last)
        elif isinstance(job, PrefillJob):
            return  # PrefillDone is sent later
        elif not live.awaits_first:
            self._send_missed(live, job, link)
        elif job.await_first:
            return  # the router has no FirstTokens or NoFirstTokens yet
        elif any(job.request.outputs):
            frame = FirstTokens(live.id, live.attempt, job.request.outputs, job.finished)
            self.use_first_tokens(frame, live.router)
        else:
            none = NoFirstTokens(live.id, live.attempt, "the router received no first token")
            self.use_no_first_tokens(none, live.router)

    def _send_missed(self, live: RequestStream, job: RunJob, link: RouterLink) -> None:
        missed = live.missed_deltas(job)
        if missed is None:
            logger.warning(
                "the output that the router missed is no longer available", extra=live.about
            )
            self._give_up(live)
            link.send(JobFailed(live.id, live.attempt, HISTORY_LOST))
        elif missed:
            link.send(Deltas(tuple(missed)))

    # --- shutdown -------------------------------------------------------------------------------

    def hand_back_requests(self, error: ErrorRecord) -> None:
        """Return each running request to its router with this error, so that the router places it
        again."""
        for live in list(self._live.values()):
            logger.info("handed back: %s", error.code, extra=live.about)
            self._give_up(live)
            if live.link is not None:
                live.link.send(JobFailed(live.id, live.attempt, error))

    # --- helpers --------------------------------------------------------------------------------

    def _get(self, request: RequestId, attempt: int) -> RequestStream | None:
        live = self._live.get(request)
        return live if live is not None and live.attempt == attempt else None

    def _awaiting(self, request: RequestId, attempt: int, router: str) -> RequestStream | None:
        live = self._get(request, attempt)
        if live is None or not live.awaits_first or self.is_anothers(request, router):
            return None
        return live

    def _stop_waiting(self, live: RequestStream) -> None:
        live.awaits_first = False
        self._metrics.observe_handoff(self._clock() - live.opened)

    def _end(self, live: RequestStream) -> None:
        """The request has ended. Keep its deltas for the grace period."""
        now = self._clock()
        if self._spans is not None:
            self._spans.record_span(live)
        del self._live[live.id]
        live.texts, live.until = [], now + self._grace_s
        self._ended[live.id] = live
        self._ended_bytes += live.bytes
        self._forget_ended(now)

    def _forget_ended(self, now: float) -> None:
        limits = self._limits
        while self._ended:
            oldest = next(iter(self._ended.values()))
            many = len(self._ended) > limits.ended or self._ended_bytes > limits.ended_bytes
            if not many and oldest.until > now:
                return
            self._forget(oldest.id)

    def _give_up(self, live: RequestStream) -> None:
        """Forget the request here and abort it in the engine."""
        if self._live.pop(live.id, None) is not None and self._spans is not None:
            self._spans.record_span(live, aborted=True)
        self._forget(live.id)
        self._send(Abort(live.id, live.attempt))

    def _forget(self, request: RequestId) -> None:
        if (ended := self._ended.pop(request, None)) is not None:
            self._ended_bytes -= ended.bytes

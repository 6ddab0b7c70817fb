"""The server's table of requests: whose they are, and how their tokens go out.

In: jobs and words of routers, frames of the engine. Out: frames for the engine, and Deltas,
PrefillDone and JobFailed on the link the job came by.

The loss of a link is not an abort: the request goes on, and a router that comes back within
`grace_s` and sends its job again gets all that it has not seen, each delta once and whole. So what
went out is kept for a while, also of requests that have ended: their last frame may have gone into
a link that was broken already. After the grace period a request without a link is aborted.

A request belongs to the router that sent its job: others can neither end it nor have its tokens.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from baton_node.ipc.messages import FinishChoice, Step, ToEngine
from baton_node.server.links import RouterLink
from baton_node.server.metrics import NodeMetrics
from baton_node.server.request_stream import RequestStream, open_live
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
from baton_text.logprobs import named
from baton_text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

HISTORY_LOST = ErrorRecord(
    message="this node has not kept all that the router missed",
    code="history_lost",
    status=503,
    retryable=True,
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a table keeps for routers that come back; the oldest is forgotten first."""

    history_bytes: int = 64 << 20  # of all requests that run, shared evenly
    request_bytes: int = 8 << 20  # of one of them
    ended: int = 4096  # requests that have ended
    ended_bytes: int = 64 << 20  # of all of them
    aborted: int = 4096  # aborts whose job may still come


class RequestTable:
    """`send` gives a frame to the engine; `spans` hears of what is over."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        send: Callable[[ToEngine], None],
        metrics: NodeMetrics,
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
        spans: NodeSpans | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._send = send
        self._metrics = metrics
        self._grace_s = grace_s
        self._clock = clock
        self._spans = spans
        self._bounds = bounds or Bounds()
        self._live: dict[RequestId, RequestStream] = {}
        self._ended: OrderedDict[RequestId, RequestStream] = OrderedDict()  # the oldest first
        self._ended_bytes = 0
        # By router and request, the newest such attempt.
        self._aborted: OrderedDict[tuple[str, RequestId], int] = OrderedDict()

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    # --- from routers ---------------------------------------------------------------------------

    def is_anothers(self, request: RequestId, router: str) -> bool:
        """Whether another router's request of that id is here."""
        live = self._live.get(request) or self._ended.get(request)
        if live is None or live.router == router:
            return False
        logger.warning("a router was refused what is another's", extra=live.about)
        return True

    def goes_on(self, job: PrefillJob | RunJob, link: RouterLink) -> bool:
        """True for a job that is here already, that is older than what is here, or whose Abort was
        faster. One that is here goes out on this link from now on, what was missed first."""
        request = job.request
        if self._aborted.get((link.router, request.id), -1) >= request.attempt:
            return True
        live = self._live.get(request.id) or self._ended.get(request.id)
        if live is None or live.attempt < request.attempt:
            return False
        same = live.attempt == request.attempt and live.prefill == isinstance(job, PrefillJob)
        if same and live.link is not link:
            logger.info("a router is back for its request", extra=live.about)
            live.link = link
            self._catch_up(live, job, link)
        return True

    def open(self, job: PrefillJob | RunJob, link: RouterLink) -> None:
        """A new request, or a newer attempt of one."""
        live = open_live(job, link, self._tokenizer, self._clock())
        if (older := self._live.get(live.id)) is not None:
            self._give_up(older)
        self._forget(live.id)
        if live.open_choices:
            self._live[live.id] = live
            self._send(job)

    def first(self, word: FirstTokens, router: str = "") -> None:
        """The texts start behind what the prefill node has shown."""
        live = self._awaiting(word.request, word.attempt, router)
        if live is None:
            return
        if len(word.outputs) != live.request.params.n:
            reason = (
                f"FirstTokens brought {len(word.outputs)} outputs for n={live.request.params.n}"
            )
            self.no_first(NoFirstTokens(word.request, word.attempt, reason), router)
            return
        self._stop_waiting(live)
        live.start(self._tokenizer, word.outputs)
        live.open_choices -= set(word.finished)
        self._send(word)
        if not live.open_choices:
            self._end(live)

    def no_first(self, word: NoFirstTokens, router: str = "") -> None:
        live = self._awaiting(word.request, word.attempt, router)
        if live is not None:
            self._stop_waiting(live)
            self._send(word)

    def abort(self, word: Abort, router: str = "") -> None:
        """Forgotten here at once; the engine settles what is in flight."""
        if self.is_anothers(word.request, router):
            return
        key = (router, word.request)
        self._aborted[key] = max(word.attempt, self._aborted.pop(key, -1))
        if len(self._aborted) > self._bounds.aborted:
            self._aborted.popitem(last=False)
        if (live := self._get(word.request, word.attempt)) is not None:
            self._give_up(live)

    # --- from the engine ------------------------------------------------------------------------

    def stepped(self, step: Step) -> None:
        """Send one step's tokens, all those of one link in one frame."""
        for prompted in step.prompts:
            if (live := self._get(prompted.request, prompted.attempt)) is not None:
                live.stats = prompted.stats
                live.prompt_logprobs = named(self._tokenizer, prompted.logprobs)
                self._metrics.prompted(prompted.stats)
        bounds = self._bounds
        share = min(bounds.request_bytes, bounds.history_bytes // max(1, len(self._live)))
        frames: dict[RouterLink, list[Delta]] = {}
        for token in step.tokens:
            live = self._get(token.request, token.attempt)
            if live is None or token.choice not in live.open_choices:
                continue
            delta = live.take(token, share // live.request.params.n)
            if delta.finish is not None and token.finish is None:
                self._send(FinishChoice(token.request, token.attempt, token.choice))
            if live.link is not None and not live.prefill:
                frames.setdefault(live.link, []).append(delta)
            if live.answered:
                self._answer(live)
            elif not live.prefill and not live.open_choices:
                self._end(live)
        for link, deltas in frames.items():
            link.send(Deltas(tuple(deltas)))

    def failed(self, frame: JobFailed) -> None:
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

    # --- links that are lost --------------------------------------------------------------------

    def orphan(self, link: RouterLink) -> bool:
        """A link is gone: True if tidy() is due in `grace_s`."""
        live = [each for each in self._live.values() if each.link is link]
        ended = [each for each in self._ended.values() if each.link is link]
        for each in (*live, *ended):
            each.link, each.until = None, self._clock() + self._grace_s
        return bool(live)

    def tidy(self) -> None:
        """Abort those that nobody has come back for, and forget what nobody can have missed."""
        now = self._clock()
        for live in [each for each in self._live.values() if each.link is None]:
            if live.until <= now:
                logger.warning("aborted: its router stayed away", extra=live.about)
                self._give_up(live)
        self._forget_ended(now)

    def _catch_up(self, live: RequestStream, job: PrefillJob | RunJob, link: RouterLink) -> None:
        """The router's job, sent again, says what it has."""
        if live.last is not None:
            link.send(live.last)
        elif isinstance(job, PrefillJob):
            return  # its answer is still to come
        elif not live.awaits_first:
            self._send_missed(live, job, link)
        elif job.await_first:
            return  # nothing was said yet
        elif any(job.request.outputs):
            word = FirstTokens(live.id, live.attempt, job.request.outputs, job.finished)
            self.first(word, live.router)
        else:
            none = NoFirstTokens(live.id, live.attempt, "the router has no first token")
            self.no_first(none, live.router)

    def _send_missed(self, live: RequestStream, job: RunJob, link: RouterLink) -> None:
        missed = live.missed(job)
        if missed is None:
            logger.warning("what its router missed is not kept any more", extra=live.about)
            self._give_up(live)
            link.send(JobFailed(live.id, live.attempt, HISTORY_LOST))
        elif missed:
            link.send(Deltas(tuple(missed)))

    # --- the end --------------------------------------------------------------------------------

    def hand_back(self, error: ErrorRecord) -> None:
        """Every request that is here goes to its router with this error, to be placed again."""
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
        self._metrics.handed_off(self._clock() - live.opened)

    def _end(self, live: RequestStream) -> None:
        """Nothing more will come of it; what did is kept for a while."""
        now = self._clock()
        if self._spans is not None:
            self._spans.ended(live)
        del self._live[live.id]
        live.texts, live.until = [], now + self._grace_s
        self._ended[live.id] = live
        self._ended_bytes += live.bytes
        self._forget_ended(now)

    def _forget_ended(self, now: float) -> None:
        bounds = self._bounds
        while self._ended:
            oldest = next(iter(self._ended.values()))
            many = len(self._ended) > bounds.ended or self._ended_bytes > bounds.ended_bytes
            if not many and oldest.until > now:
                return
            self._forget(oldest.id)

    def _give_up(self, live: RequestStream) -> None:
        """Forget it, here and in the engine."""
        if self._live.pop(live.id, None) is not None and self._spans is not None:
            self._spans.ended(live, aborted=True)
        self._forget(live.id)
        self._send(Abort(live.id, live.attempt))

    def _forget(self, request: RequestId) -> None:
        if (ended := self._ended.pop(request, None)) is not None:
            self._ended_bytes -= ended.bytes

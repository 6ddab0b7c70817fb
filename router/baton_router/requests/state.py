"""The state machine of one request over all its attempts, without I/O. The router owns it.

    in     placements, frames from nodes (deltas, PrefillDone, JobFailed), nodes lost or leaving,
           restored links, the client's disconnect
    out    actions: Emit to the client, Send to a node, Replace or Regroup (find a place), Measured,
           and finally Failed or Ended, exactly once

    waiting --placed--> handoff --FirstTokens or NoFirstTokens--> running --> over
       ^                   |                             |
       `----- Replace -----+-----------------------------'

The client gets ids in order and once: overlap is dropped, and a gap means the attempt is lost. Each
placement starts a numbered attempt. Frames of another attempt, or of nodes that do not serve this
one, are dropped. A request that loses its prefill node stays on its decode node until the
dispatcher has found another pair or calls give_up_prefill().

A lost node is a strike if the request made no progress on it: no new token and no new chunk of its
prompt. After MAX_STRIKES strikes in a row the request ends, because it is probably the cause. A
node that was silent before it got the request does not count, but only for the first MAX_ATTEMPTS
losses.

The record keeps the request's history by the clock passed in: its attempts, each with placement,
node figures and times, and its waits for a place. If there are many, it keeps the first and the
last ones.

A draining node is not lost. start_attempt() moves a request that decodes there; until then it
continues there. A node that shuts down returns its remaining requests, which does not count as a
refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from baton_protocol.errors import ErrorRecord, RequestKillsNodes
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import (
    DRAINED,
    Abort,
    Delta,
    FirstTokens,
    JobFailed,
    NoFirstTokens,
    PrefillDone,
    PrefillJob,
    RequestStats,
    RunJob,
    ToNode,
)
from baton_protocol.request import Request
from baton_protocol.resume import ResumeState
from baton_protocol.store import Exact, exact_together
from baton_router.nodes.link import Loss
from baton_router.placement.placement import Placement
from baton_router.requests.attempt import Attempt, Cause, End, FirstTokenTimes, PlacementBasis, Wait

Phase = Literal["waiting", "handoff", "running", "over"]
Action: TypeAlias = "Emit | Send | Replace | Regroup | Measured | Failed | Ended"

MAX_STRIKES = 3
# Retry on another node after up to this many refusals that the next node may not repeat ("busy",
# "draining"). A request whose client has tokens is retried until its deadline.
MAX_ATTEMPTS = 16
# How many attempts and waits a record keeps.
KEPT_ATTEMPTS = 16
KEPT_WAITS = 16


@dataclass(frozen=True, slots=True)
class Emit:
    """New ids or text of one choice for the client."""

    delta: Delta
    times: FirstTokenTimes | None = None


@dataclass(frozen=True, slots=True)
class Send:
    node: NodeId
    frame: ToNode


@dataclass(frozen=True, slots=True)
class Replace:
    """The attempt is over: find another place. `node` caused the end."""

    cause: Cause
    node: NodeId


@dataclass(frozen=True, slots=True)
class Regroup:
    """The prefill node is lost or drains: find another pair, or call give_up_prefill()."""

    cause: Cause
    node: NodeId


@dataclass(frozen=True, slots=True)
class Measured:
    """A node's figures for the request. `opening`: these are the first of the attempt."""

    stats: RequestStats
    attempt: int
    opening: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The request is over with this error."""

    error: ErrorRecord


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is over: every choice finished."""


class RequestRecord:
    """`request` is the client's; `outputs[c]` holds the ids of choice c that the client has.

    `attempt` counts placements; the record ignores `request.attempt`. `attempts` holds the kept
    ones and `left_out` counts the others. `current` is the last attempt, or None while the request
    waits for a place. `exact` is that of the nodes of all attempts together; None before the first.
    `end` says how the request ended. `token_at` is the time of the client's last token. `resumed`
    is what another owner did of the request before; its ids are in `request.outputs`.
    """

    def __init__(
        self,
        request: Request,
        clock: Callable[[], float],
        resumed: ResumeState | None = None,
    ) -> None:
        self.request = request
        self.began = clock()
        self.phase: Phase = "waiting"
        self.end: End | None = None
        self.attempt = 0
        self.attempts: list[Attempt] = []
        self.left_out = 0
        self.current: Attempt | None = None
        self.exact: Exact | None = None
        self.waits: list[Wait] = []
        self.outputs: list[list[int]] = [list(ids) for ids in request.outputs]
        self.open = set(range(request.params.n))
        self.strikes = 0
        self.token_at: float | None = None
        self._clock = clock
        self._losses = 0  # in a row without progress
        self._refusals = 0
        self._progress = False  # since the last loss
        self._chunks = 0
        self._cached: int | None = None
        self._prompt_sent = False  # the client has the prompt's logprobs
        self._most_cached: int | None = None
        self._after_loss = resumed is not None  # nodes may compute again what is lost
        self._begun = False  # the client may have events of tokens that the record lacks
        if resumed is not None:
            self.open -= resumed.finished
            self._cached, self._most_cached = resumed.cached, resumed.most_cached
            self._prompt_sent, self._begun = resumed.has_prompt_logprobs, resumed.begun

    # --- places -----------------------------------------------------------------------------------

    def check_strikes(self, chunks: int) -> list[Action]:
        """Call before each placement, with the number of the prompt's chunks that exist now. A new
        maximum is progress and clears the strikes. Too many strikes end the request."""
        if chunks > self._chunks:
            self._chunks = chunks
            self.strikes = self._losses = 0
        if self.strikes < MAX_STRIKES:
            return []
        error = RequestKillsNodes(
            f"{self.strikes} nodes in a row were lost while they served this request, without "
            "one new token; the router does not try again"
        )
        return self._fail(error.record())

    def note_wait(self, why: str) -> None:
        """Record that the request has no place. A new reason starts a new wait."""
        now = self._clock()
        if self.waits and self.waits[-1].until is None:
            if self.waits[-1].why == why:
                return
            self.waits[-1].until = now
        if len(self.waits) == KEPT_WAITS:
            del self.waits[1]
        self.waits.append(Wait(now, why))

    def start_attempt(
        self, placement: Placement, epoch: Epoch, basis: PlacementBasis
    ) -> list[Action]:
        """Start the next attempt: abort the earlier one if it still runs, and send the new jobs.
        `epoch` is the decode node's."""
        assert self.phase != "over"
        split = placement.prefill is not None
        assert not split or not any(self.outputs), "a request with output cannot be split"
        aborts = self._abort_jobs()
        now = self._clock()
        if self.current is not None and self.current.ended is None:  # its decode node drains
            self.current.note_end("drained", now, self.decode)
            self._after_loss = True
        self._end_wait(now)
        if len(self.attempts) == KEPT_ATTEMPTS:
            del self.attempts[1]
            self.left_out += 1
        self.attempt += 1
        self.current = Attempt(self.attempt, placement, epoch, basis, now)
        self.attempts.append(self.current)
        self.exact = exact_together((basis.exact, self.exact or basis.exact))
        self.phase = "handoff" if split else "running"
        sends = [Send(placement.decode, self._run_job())]
        if placement.prefill is not None:
            sends.append(Send(placement.prefill, self._prefill_job()))
        return [*aborts, *sends]

    def give_up_prefill(self, reason: str) -> list[Action]:
        """No other node computes the prompt: tell the decode node to compute it."""
        assert self.phase == "handoff"
        attempt = self._current()
        self.phase = "running"
        attempt.give_up_prefill(self._clock())
        decode = attempt.placement.decode
        return [Send(decode, NoFirstTokens(self.request.id, self.attempt, reason))]

    # --- frames from nodes ------------------------------------------------------------------------

    def append_tokens(self, node: NodeId, delta: Delta) -> bool:
        """Fast path for most deltas: append the next tokens of a choice that continues. Return
        False if the delta is anything else; then call on_delta()."""
        if (
            self.phase != "running"
            or self.current is None
            or self.current.decoding_at is None
            or node != self.current.placement.decode
            or delta.attempt != self.attempt
            or delta.finish is not None
            or delta.stats is not None
            or delta.prompt_logprobs
            or delta.choice not in self.open
            or not delta.ids
        ):
            return False
        output = self.outputs[delta.choice]
        if delta.offset != len(output):
            return False
        output.extend(delta.ids)
        self._progress = True
        self.token_at = self._clock()
        return True

    def on_delta(self, node: NodeId, delta: Delta) -> list[Action]:
        """Handle a delta of the decode node, which sends none before (No)FirstTokens."""
        if self.phase != "running" or node != self.decode or delta.attempt != self.attempt:
            return []
        return self._accept(node, delta)

    def on_prefill_done(self, node: NodeId, done: PrefillDone) -> list[Action]:
        """Pass first tokens to the client and to the decode node, or end the request."""
        if not self._prefills_on(node, done.attempt):
            return []
        if not self._answers_each_choice(done):
            return self.give_up_prefill(f"prefill node {node} did not answer each choice")
        attempt = self._current()
        decode = attempt.placement.decode
        self.phase = "running"
        actions = self._measure(node, done.stats)
        for delta in done.choices:
            actions += self._accept(node, delta)
        if not self.open:  # the decode node still has the request parked
            return [*actions, Send(decode, self._abort_frame())]
        attempt.handed_at = self._clock()
        first = FirstTokens(
            self.request.id, self.attempt, self._output_ids(), self._finished_choices()
        )
        return [*actions, Send(decode, first)]

    def on_failed(self, node: NodeId, failed: JobFailed) -> list[Action]:
        """A failed prefill job only costs time. A failed decode job fails the request, unless its
        node drains or the error is retryable: then the request is placed again."""
        if self._prefills_on(node, failed.attempt):
            return self.give_up_prefill(failed.error.message)
        if not self._decodes_on(node) or failed.attempt != self.attempt:
            return []
        if failed.error.code == DRAINED:
            return self._replace("drained", node, aborted=False)
        if failed.error.retryable and (self.tokens or self._refusals < MAX_ATTEMPTS):
            self._refusals += 1
            return self._replace("refused", node, aborted=False)
        return self._fail(failed.error, gone=node)

    # --- lost, leaving and resumed nodes ----------------------------------------------------------

    def on_lost(self, node: NodeId, cause: Loss, *, blamed: bool = True) -> list[Action]:
        """Give the node up, with an Abort in case it still lives. `blamed` is False if the node got
        the request after its last sign of life."""
        if self._prefills_on(node, self.attempt):
            self._strike(blamed)
            if self.on_probation:  # it must wait for its turn to get any node
                return self._replace(cause, node)
            return self._regroup(cause, node)
        if not self._decodes_on(node):
            return []
        if not self._is_regrouping():  # otherwise both nodes of the pair are lost: one strike
            self._strike(blamed)
        return self._replace(cause, node)

    def on_leaving(self, node: NodeId) -> list[Action]:
        """A prefill node drains: find another for its job. No effect for any other node."""
        return self._regroup("drained", node) if self._prefills_on(node, self.attempt) else []

    def on_rolled_out(self, node: NodeId) -> list[Action]:
        """The decode node drains and no other node of its kind will come."""
        return self._replace("drained", node) if self._decodes_on(node) else []

    def on_resumed(self, node: NodeId) -> list[Action]:
        """The link is back and the engine is the same: send the job again, in the same attempt,
        with the tokens so far. Nothing that was in flight is lost or doubled."""
        if self._prefills_on(node, self.attempt):
            return [Send(node, self._prefill_job())]
        return [Send(node, self._run_job())] if self._decodes_on(node) else []

    def cancel(self, error: ErrorRecord | None = None) -> list[Action]:
        """End the request: the client left (no error), or the router fails it with `error`."""
        if self.phase == "over":
            return []
        if error is not None:
            return self._fail(error)
        aborts = self._abort_jobs()
        self._end_request("left")
        return [*aborts]

    # --- figures ----------------------------------------------------------------------------------

    @property
    def on_probation(self) -> bool:
        """True if one more strike ends the request."""
        return self.strikes >= MAX_STRIKES - 1 and not self._progress

    @property
    def decode(self) -> NodeId | None:
        """The decode node of the current attempt."""
        return None if self.current is None else self.current.placement.decode

    @property
    def prefill(self) -> NodeId | None:
        """The node that computes the prompt for the decode node; None once it is done or gone."""
        if self.phase != "handoff" or self._is_regrouping():
            return None
        return self._current().placement.prefill

    @property
    def replaced_for(self) -> Cause | End | None:
        """Why the last attempt replaced the one before it; None for a first attempt."""
        return self.attempts[-2].ended if len(self.attempts) > 1 else None

    @property
    def stats(self) -> RequestStats | None:
        """First figures of the last attempt that has any: those of the node that had to compute the
        prompt."""
        first_figures = (
            attempt.measured[0][1] for attempt in reversed(self.attempts) if attempt.measured
        )
        return next(first_figures, None)

    @property
    def waits_for(self) -> str:
        """Why the request has no place; "" while it has one."""
        return self.waits[-1].why if self.current is None and self.waits else ""

    @property
    def tokens(self) -> int:
        """Number of ids the client has, over all choices."""
        return sum(map(len, self.outputs))

    @property
    def client_has_nothing(self) -> bool:
        """True if the client has neither tokens nor prompt logprobs."""
        return not (self.tokens or self._prompt_sent or self._begun)

    @property
    def reads_no_cache(self) -> bool:
        """True if one node must compute the prompt, without cached KV."""
        return self.asks_prompt_logprobs or self.request.params.skip_reading_prefix_cache

    @property
    def asks_prompt_logprobs(self) -> bool:
        """True if the client asked for the prompt's logprobs and does not have them yet."""
        return self.request.params.prompt_logprobs is not None and not self._prompt_sent

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that no node had to compute for this request (usage's cached_tokens).
        Tokens that an earlier attempt of this request computed do not count."""
        return self._cached or 0

    @property
    def known_cached_tokens(self) -> int | None:
        """`cached_tokens`, or None while no node has reported it."""
        return self._cached

    # --- tokens -----------------------------------------------------------------------------------

    def _accept(self, node: NodeId, delta: Delta) -> list[Action]:
        if delta.choice not in self.open:
            return []
        output = self.outputs[delta.choice]
        overlap = len(output) - delta.offset
        if overlap > 0:
            if overlap >= len(delta.ids) and delta.finish is None:
                return []
            delta = _drop_known_ids(delta, overlap)
        if delta.offset != len(output):
            self._strike()
            return self._replace("gap", node)
        output.extend(delta.ids)
        times = None
        if delta.ids:
            self._progress, now = True, self._clock()
            times = self._current().note_tokens(now, self.token_at)
            self.token_at = now
        if delta.prompt_logprobs:
            if self._prompt_sent:
                delta = msgspec.structs.replace(delta, prompt_logprobs=())
            self._prompt_sent = True
        actions: list[Action] = [Emit(delta, times)]
        if delta.stats is not None:
            actions += self._measure(node, delta.stats)
        if delta.finish is not None:
            self.open.discard(delta.choice)
        if not self.open:
            self._end_request("done")
            actions.append(Ended())
        return actions

    def _answers_each_choice(self, done: PrefillDone) -> bool:
        if self.request.params.use_beam_search:  # the decode node begins the search
            return not done.choices
        if sorted(delta.choice for delta in done.choices) != sorted(self.open):
            return False
        return all(
            delta.offset == len(self.outputs[delta.choice]) and delta.ids for delta in done.choices
        )

    def _measure(self, node: NodeId, stats: RequestStats) -> list[Action]:
        attempt = self._current()
        if self._cached is None:
            cached = stats.cached_tokens + stats.host_tokens + stats.fetched_tokens
            if self.attempt > 1 or attempt.prefill_given_up_at is not None:
                # A lost node may have computed some of it for this request.
                max_cached = len(self.request.prompt_ids) - self.attempts[0].placement.uncached
                cached = min(cached, max_cached)
            if self._most_cached is not None:  # as above, under the owner before
                cached = min(cached, self._most_cached)
            self._cached = cached
        opening = not attempt.measured
        attempt.measured.append((node, stats))
        return [Measured(stats, self.attempt, opening)]

    # --- attempts ---------------------------------------------------------------------------------

    def _strike(self, blamed: bool = True) -> None:
        if self._progress:
            self.strikes = self._losses = 0
        elif blamed or self._losses >= MAX_ATTEMPTS:
            self.strikes += 1
        self._losses += 1
        self._progress = False

    def _replace(self, cause: Cause, node: NodeId, *, aborted: bool = True) -> list[Action]:
        aborts = self._abort_jobs(gone=None if aborted else node)
        self._current().note_end(cause, self._clock(), node)
        self._after_loss |= cause != "refused"
        self.phase, self.current = "waiting", None
        self.note_wait(f"the attempt on {node} ended ({cause})")
        return [*aborts, Replace(cause, node)]

    def _regroup(self, cause: Cause, prefill: NodeId) -> list[Action]:
        self._current().note_end(cause, self._clock(), prefill)
        self._after_loss = True
        return [Send(prefill, self._abort_frame()), Regroup(cause, prefill)]

    def _is_regrouping(self) -> bool:
        """True if the prefill node is gone and the dispatcher looks for a replacement."""
        return self.phase == "handoff" and self._current().ended is not None

    def _fail(self, error: ErrorRecord, gone: NodeId | None = None) -> list[Action]:
        aborts = self._abort_jobs(gone)
        self._end_request("failed")
        return [*aborts, Failed(error)]

    def _end_request(self, end: End) -> None:
        now = self._clock()
        self.phase, self.end = "over", end
        self._end_wait(now)
        if self.attempts and self.attempts[-1].ended is None:
            self.attempts[-1].note_end(end, now)

    def _end_wait(self, now: float) -> None:
        if self.waits and self.waits[-1].until is None:
            self.waits[-1].until = now

    def _current(self) -> Attempt:
        assert self.current is not None, "the request waits for a place"
        return self.current

    def _abort_jobs(self, gone: NodeId | None = None) -> list[Send]:
        """Abort the request on the attempt's nodes, except on `gone`, which has dropped it."""
        nodes = [node for node in (self.prefill, self.decode) if node not in (None, gone)]
        return [Send(node, self._abort_frame()) for node in nodes if node is not None]

    def _run_job(self) -> RunJob:
        await_first = self.phase == "handoff"
        uncached = 0 if await_first else self._current().placement.uncached
        return RunJob(self._request_of_attempt(), await_first, self._finished_choices(), uncached)

    def _prefill_job(self) -> PrefillJob:
        attempt = self._current()
        placement = attempt.placement
        return PrefillJob(
            self._request_of_attempt(), placement.decode, attempt.epoch, placement.uncached
        )

    def _request_of_attempt(self) -> Request:
        params = self.request.params
        if self._prompt_sent:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(
            self.request,
            attempt=self.attempt,
            outputs=self._output_ids(),
            params=params,
            after_loss=self._after_loss,
        )

    def _output_ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(ids) for ids in self.outputs)

    def _finished_choices(self) -> tuple[int, ...]:
        return tuple(choice for choice in range(self.request.params.n) if choice not in self.open)

    def _abort_frame(self) -> Abort:
        return Abort(self.request.id, self.attempt)

    def _prefills_on(self, node: NodeId, attempt: int) -> bool:
        waiting = self.phase == "handoff" and node == self.prefill
        return waiting and attempt == self.attempt

    def _decodes_on(self, node: NodeId) -> bool:
        return self.phase in ("handoff", "running") and node == self.decode


def _drop_known_ids(delta: Delta, overlap: int) -> Delta:
    """The delta without its first `overlap` ids, which the client has. Text cannot be cut by ids: a
    delta with text, or with fewer ids, is returned unchanged and so counts as a gap."""
    if delta.text or overlap > len(delta.ids):
        return delta
    return msgspec.structs.replace(
        delta,
        offset=delta.offset + overlap,
        ids=delta.ids[overlap:],
        logprobs=delta.logprobs[overlap:],
    )

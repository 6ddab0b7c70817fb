"""Who owns a request: the router. One record per request over all its attempts, without sockets.

    in     places that were found, what nodes say (deltas, PrefillDone, JobFailed), nodes lost or
           leaving, links that are back, the client leaving
    out    actions: Emit to the client, Send to a node, Replace or Regroup (find a place), Measured,
           and Failed or Ended (one of them, once)

    waiting --placed--> handoff --FirstTokens or NoFirstTokens--> running --> over
       ^                   |                             |
       `----- Replace -----+-----------------------------'

Ids reach the client in order and once: overlap is dropped, a gap means that the attempt is lost.
Each placement is an attempt with a number of its own; frames of another attempt, or of nodes that
do not serve this one, are dropped. A request whose prefill node is lost stays with its decode node
until its owner has found another pair or says no_first().

Losses of nodes that served it without one new token, nor one more chunk of its prompt, are strikes;
with MAX_STRIKES in a row the request is taken for their cause and ends. A node that had fallen
silent before it got the request says nothing about it, but that too is believed MAX_ATTEMPTS times.

The record keeps what happened, by a clock that is passed in: its attempts, each with its placement,
its nodes' figures and its times, and its waits for a place. Of a request that is placed very often
it keeps the first attempt and the last ones.

A node that drains and is leaving is no loss. What decodes there is moved by placed(), and goes on
where it is until then; a node that ends hands back what it still has, and that is no refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

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
from baton_router.nodes.link import Loss
from baton_router.placement.policy import Considered, Placement, PredictionError, Way

# Why a request is placed again: its node is lost, refused it, or drains, or its tokens had a gap.
Cause = Loss | Literal["refused", "drained", "gap"]
# How a request ended: with its last token, with an error, without its client.
End = Literal["done", "failed", "left"]


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """What the first tokens of an attempt show, or the first ones of its decode node. `pause_s`:
    since the client's last token before. `handoff_s`: since the decode node got the first tokens.
    `error`: the placement's prediction, and what it came to."""

    pause_s: float | None
    handoff_s: float | None
    error: PredictionError | None


@dataclass(frozen=True, slots=True)
class PlacementBasis:
    """What a placement could rest on: the prompt's full chunks, and those with a marker."""

    store_up: bool
    chunks: int
    stored_chunks: int


@dataclass(slots=True)
class Wait:
    """A request had no place, and why. `until` is None while it waits."""

    since: float
    why: str
    until: float | None = None


@dataclass(slots=True)
class Attempt:
    """One attempt of a request: a placement, and what came of it.

    In: the placement, and what its record says as it happens. Out: what was predicted beside what
    was measured. A request's record keeps its attempts; explanations, traces, headers, logs and
    metrics are read from them. Counts, names and times of ours only; times are the router's clock.

    `epoch` is the decode node's. `handed_at`: the decode node was sent the first tokens.
    `first_at`: a token came for the client; `decoding_at`: one of the node that decodes, which is
    what `placement` predicts. `prefill_given_up_at`: the decode node was told to compute the prompt
    itself. `measured` are the nodes' own figures, of whom had to have the prompt first. `ended` is
    also set while another pair is looked for, and None again where the decode node goes on.
    """

    number: int
    placement: Placement
    epoch: Epoch
    basis: PlacementBasis
    placed_at: float
    handed_at: float | None = None
    first_at: float | None = None
    decoding_at: float | None = None
    prefill_given_up_at: float | None = None
    measured: list[tuple[NodeId, RequestStats]] = field(default_factory=list)
    ended_at: float | None = None
    ended: Cause | End | None = None
    blamed: NodeId | None = None

    @property
    def way(self) -> Way:
        return "whole" if self.placement.prefill is None else "split"

    @property
    def chosen(self) -> Considered | None:
        """The way that was taken, among those that were weighed."""
        place = self.placement
        pair = (place.decode, place.prefill)
        return next((one for one in place.considered if (one.decode, one.prefill) == pair), None)

    @property
    def expected_ms(self) -> float:
        """Until the request decodes: the prediction without its burden on others, where the two
        are known apart."""
        chosen = self.chosen
        return self.placement.predicted_ms - (chosen.slowdown_ms if chosen is not None else 0.0)

    def end(self, why: Cause | End, now: float, blamed: NodeId | None = None) -> None:
        self.ended, self.ended_at = why, now
        self.blamed = blamed or self.blamed

    def give_up_prefill(self, now: float) -> None:
        """The decode node computes the prompt, also where the attempt seemed to be over."""
        self.prefill_given_up_at, self.ended, self.ended_at = now, None, None

    def note_tokens(self, now: float, last_token_at: float | None) -> FirstTokenTimes | None:
        """New tokens came for the client, who got the last one before at that time. Return what
        the first ones of the attempt show, or the first ones of its decode node."""
        pause_s = handoff_s = error = None
        if self.first_at is None:
            self.first_at = now
            pause_s = None if last_token_at is None else now - last_token_at
        if self.decoding_at is None and not self._tokens_are_the_prefill_nodes():
            self.decoding_at = now
            handoff_s = None if self.handed_at is None else now - self.handed_at
            if self.prefill_given_up_at is None:
                took_s = now - self.placed_at
                error = PredictionError(self.way, self.expected_ms / 1000, took_s)
        if (pause_s, handoff_s, error) == (None, None, None):
            return None
        return FirstTokenTimes(pause_s, handoff_s, error)

    def _tokens_are_the_prefill_nodes(self) -> bool:
        return self.way == "split" and self.prefill_given_up_at is None and self.handed_at is None


Phase = Literal["waiting", "handoff", "running", "over"]

MAX_STRIKES = 3
# So many refusals that another node may not have ("busy", "draining") are followed by another try.
# A request whose client has tokens is tried until its deadline.
MAX_ATTEMPTS = 16
# So many are kept.
KEPT_ATTEMPTS = 16
KEPT_WAITS = 16


@dataclass(frozen=True, slots=True)
class Emit:
    """New ids or text of one choice, for the client."""

    delta: Delta
    times: FirstTokenTimes | None = None


@dataclass(frozen=True, slots=True)
class Send:
    node: NodeId
    frame: ToNode


@dataclass(frozen=True, slots=True)
class Replace:
    """The attempt is over: find another place for the request. `node` is whose fault it was."""

    cause: Cause
    node: NodeId


@dataclass(frozen=True, slots=True)
class Regroup:
    """The prefill node is lost, or drains: find another pair, or tell the decode node with
    no_first()."""

    cause: Cause
    node: NodeId


@dataclass(frozen=True, slots=True)
class Measured:
    """How a node closed the gap. `opening`: it is the first of its attempt to say so."""

    stats: RequestStats
    attempt: int
    opening: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The request is over; the client gets this error."""

    error: ErrorRecord


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is over; every choice finished."""


Action = Emit | Send | Replace | Regroup | Measured | Failed | Ended


class RequestRecord:
    """`request` is what the client asked; `outputs[c]` are the ids it has of choice c.

    `attempt` counts placements; of `request.attempt` nothing is kept. `attempts` are those that are
    kept, without `left_out` of them, and `current` is the last one, or None while the request waits
    for a place. `end` is how it ended. `token_at`: the client's last token came.
    """

    def __init__(self, request: Request, clock: Callable[[], float]) -> None:
        self.request = request
        self.began = clock()
        self.phase: Phase = "waiting"
        self.end: End | None = None
        self.attempt = 0
        self.attempts: list[Attempt] = []
        self.left_out = 0
        self.current: Attempt | None = None
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
        self._prompt_sent = False  # its logprobs, to the client

    # --- places -----------------------------------------------------------------------------------

    def check_strikes(self, chunks: int) -> list[Action]:
        """Before each placement: so many chunks of the prompt exist now. More than ever before is
        progress, which forgives strikes; too many strikes are the end."""
        if chunks > self._chunks:
            self._chunks = chunks
            self.strikes = self._losses = 0
        if self.strikes < MAX_STRIKES:
            return []
        error = RequestKillsNodes(
            f"{self.strikes} times in a row a node was lost while it served this request, "
            "without one new token; it is not tried again"
        )
        return self._fail(error.record())

    def wait(self, why: str) -> None:
        """There is no place for it now. Said again with other words it is another wait."""
        now = self._clock()
        if self.waits and self.waits[-1].until is None:
            if self.waits[-1].why == why:
                return
            self.waits[-1].until = now
        if len(self.waits) == KEPT_WAITS:
            del self.waits[1]
        self.waits.append(Wait(now, why))

    def placed(self, placement: Placement, epoch: Epoch, basis: PlacementBasis) -> list[Action]:
        """The next attempt: its opening jobs, after the end of an earlier one that still lives.
        `epoch` is the decode node's."""
        assert self.phase != "over"
        split = placement.prefill is not None
        assert not split or not any(self.outputs), "what has begun to decode is not split"
        aborts = self._leave()
        now = self._clock()
        if self.current is not None and self.current.ended is None:  # its decode node drains
            self.current.end("drained", now, self.decode)
        self._end_wait(now)
        if len(self.attempts) == KEPT_ATTEMPTS:
            del self.attempts[1]
            self.left_out += 1
        self.attempt += 1
        self.current = Attempt(self.attempt, placement, epoch, basis, now)
        self.attempts.append(self.current)
        self.phase = "handoff" if split else "running"
        sends = [Send(placement.decode, self._run_job())]
        if placement.prefill is not None:
            sends.append(Send(placement.prefill, self._prefill_job()))
        return [*aborts, *sends]

    def no_first(self, reason: str) -> list[Action]:
        """Nobody else computes the prompt: the decode node is to do it."""
        assert self.phase == "handoff"
        attempt = self._current()
        self.phase = "running"
        attempt.give_up_prefill(self._clock())
        decode = attempt.placement.decode
        return [Send(decode, NoFirstTokens(self.request.id, self.attempt, reason))]

    # --- what nodes say ---------------------------------------------------------------------------

    def append_tokens(self, node: NodeId, delta: Delta) -> bool:
        """Take the next tokens in order, after which the request goes on: what most deltas are.
        False where it is anything else, for on_delta()."""
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
        have = self.outputs[delta.choice]
        if delta.offset != len(have):
            return False
        have.extend(delta.ids)
        self._progress = True
        self.token_at = self._clock()
        return True

    def on_delta(self, node: NodeId, delta: Delta) -> list[Action]:
        """Tokens from the decode node. It may send none before its FirstTokens or NoFirstTokens."""
        if self.phase != "running" or node != self.decode or delta.attempt != self.attempt:
            return []
        return self._accept(node, delta)

    def on_prefill_done(self, node: NodeId, done: PrefillDone) -> list[Action]:
        """First tokens: to the client, and to the decode node, which may go on; or the end."""
        if not self._from_prefill(node, done.attempt):
            return []
        if not self._answers_each_choice(done):
            return self.no_first(f"prefill node {node} did not answer each choice")
        attempt = self._current()
        decode = attempt.placement.decode
        self.phase = "running"
        actions = self._measure(node, done.stats)
        for delta in done.choices:
            actions += self._accept(node, delta)
        if not self.open:  # nothing is left for the decode node, which has the request parked
            return [*actions, Send(decode, self._abort())]
        attempt.handed_at = self._clock()
        first = FirstTokens(self.request.id, self.attempt, self._ids(), self._finished())
        return [*actions, Send(decode, first)]

    def on_failed(self, node: NodeId, failed: JobFailed) -> list[Action]:
        """A prefill job's failure costs time. The decode node's is the request's, unless another
        node may not have it."""
        if self._from_prefill(node, failed.attempt):
            return self.no_first(failed.error.message)
        if not self._serves(node) or failed.attempt != self.attempt:
            return []
        if failed.error.code == DRAINED:
            return self._replace("drained", node, aborted=False)
        if failed.error.retryable and (self.tokens or self._refusals < MAX_ATTEMPTS):
            self._refusals += 1
            return self._replace("refused", node, aborted=False)
        return self._fail(failed.error, gone=node)

    # --- nodes that go and come -------------------------------------------------------------------

    def on_lost(self, node: NodeId, cause: Loss, *, blamed: bool = True) -> list[Action]:
        """The node is given up. Its Abort is for the case that it still lives. Not `blamed` is a
        request that the node got after its last sign of life."""
        if self._from_prefill(node, self.attempt):
            self._strike(blamed)
            if self.on_probation:  # it is to have no node before its turn
                return self._replace(cause, node)
            return self._regroup(cause, node)
        if not self._serves(node):
            return []
        if not self._regroups():  # else its pair is lost in one event, which is one strike
            self._strike(blamed)
        return self._replace(cause, node)

    def on_leaving(self, node: NodeId) -> list[Action]:
        """A prefill node is to be empty: another is to do its job. Nothing for any other node."""
        return self._regroup("drained", node) if self._from_prefill(node, self.attempt) else []

    def on_rolled_out(self, node: NodeId) -> list[Action]:
        """The decode node is to be empty, and no other of its kind is to come."""
        return self._replace("drained", node) if self._serves(node) else []

    def on_resumed(self, node: NodeId) -> list[Action]:
        """The link is back and the node is the same engine: it gets its job again, in the same
        attempt, with what came of it so far. Nothing that was on its way is lost or doubled."""
        if self._from_prefill(node, self.attempt):
            return [Send(node, self._prefill_job())]
        return [Send(node, self._run_job())] if self._serves(node) else []

    def cancel(self, error: ErrorRecord | None = None) -> list[Action]:
        """The client left (no error), or the router ends the request with one."""
        if self.phase == "over":
            return []
        if error is not None:
            return self._fail(error)
        aborts = self._leave()
        self._finish("left")
        return [*aborts]

    # --- figures ----------------------------------------------------------------------------------

    @property
    def on_probation(self) -> bool:
        """One more strike and it is over."""
        return self.strikes >= MAX_STRIKES - 1 and not self._progress

    @property
    def decode(self) -> NodeId | None:
        """Of the current attempt."""
        return None if self.current is None else self.current.placement.decode

    @property
    def prefill(self) -> NodeId | None:
        """Who computes the prompt for another node; None once it is done, or the node is gone."""
        if self.phase != "handoff" or self._regroups():
            return None
        return self._current().placement.prefill

    @property
    def replaced_for(self) -> Cause | End | None:
        """Why there is another attempt than the first: how the one before ended."""
        return self.attempts[-2].ended if len(self.attempts) > 1 else None

    @property
    def stats(self) -> RequestStats | None:
        """Of the last attempt that has any: of whom had to have the prompt."""
        found = (attempt.measured[0][1] for attempt in reversed(self.attempts) if attempt.measured)
        return next(found, None)

    @property
    def waits_for(self) -> str:
        """Why it has no place; "" while it has one."""
        return self.waits[-1].why if self.current is None and self.waits else ""

    @property
    def tokens(self) -> int:
        """How many ids the client has."""
        return sum(map(len, self.outputs))

    @property
    def client_has_nothing(self) -> bool:
        """The client has nothing yet."""
        return not self.tokens and not self._prompt_sent

    @property
    def asks_prompt_logprobs(self) -> bool:
        """The client is still owed the prompt's logprobs."""
        return self.request.params.prompt_logprobs is not None and not self._prompt_sent

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody had to compute for this request (usage's cached_tokens). What
        exists only because an earlier attempt computed it is not among them."""
        return self._cached or 0

    # --- tokens -----------------------------------------------------------------------------------

    def _accept(self, node: NodeId, delta: Delta) -> list[Action]:
        if delta.choice not in self.open:
            return []
        have = self.outputs[delta.choice]
        known = len(have) - delta.offset
        if known > 0:
            if known >= len(delta.ids) and delta.finish is None:
                return []
            delta = _without(delta, known)
        if delta.offset != len(have):
            self._strike()
            return self._replace("gap", node)
        have.extend(delta.ids)
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
            self._finish("done")
            actions.append(Ended())
        return actions

    def _answers_each_choice(self, done: PrefillDone) -> bool:
        if sorted(delta.choice for delta in done.choices) != sorted(self.open):
            return False
        return all(
            delta.offset == len(self.outputs[delta.choice]) and delta.ids for delta in done.choices
        )

    def _measure(self, node: NodeId, stats: RequestStats) -> list[Action]:
        attempt = self._current()
        if self._cached is None:
            found = stats.cached_tokens + stats.host_tokens + stats.fetched_tokens
            if self.attempt > 1 or attempt.prefill_given_up_at is not None:
                # Some of it may be what a lost node computed for this request.
                findable = len(self.request.prompt_ids) - self.attempts[0].placement.uncached
                found = min(found, findable)
            self._cached = found
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
        aborts = self._leave(gone=None if aborted else node)
        self._current().end(cause, self._clock(), node)
        self.phase, self.current = "waiting", None
        self.wait(f"its attempt on {node} ended ({cause})")
        return [*aborts, Replace(cause, node)]

    def _regroup(self, cause: Cause, prefill: NodeId) -> list[Action]:
        self._current().end(cause, self._clock(), prefill)
        return [Send(prefill, self._abort()), Regroup(cause, prefill)]

    def _regroups(self) -> bool:
        """Its prefill node is gone, and what becomes of it is not decided yet."""
        return self.phase == "handoff" and self._current().ended is not None

    def _fail(self, error: ErrorRecord, gone: NodeId | None = None) -> list[Action]:
        aborts = self._leave(gone)
        self._finish("failed")
        return [*aborts, Failed(error)]

    def _finish(self, end: End) -> None:
        now = self._clock()
        self.phase, self.end = "over", end
        self._end_wait(now)
        if self.attempts and self.attempts[-1].ended is None:
            self.attempts[-1].end(end, now)

    def _end_wait(self, now: float) -> None:
        if self.waits and self.waits[-1].until is None:
            self.waits[-1].until = now

    def _current(self) -> Attempt:
        assert self.current is not None, "it waits for a place"
        return self.current

    def _leave(self, gone: NodeId | None = None) -> list[Send]:
        """Take the request from the nodes of the attempt; `gone` has dropped it by itself."""
        nodes = [node for node in (self.prefill, self.decode) if node not in (None, gone)]
        return [Send(node, self._abort()) for node in nodes if node is not None]

    def _run_job(self) -> RunJob:
        await_first = self.phase == "handoff"
        uncached = 0 if await_first else self._current().placement.uncached
        return RunJob(self._job(), await_first, self._finished(), uncached)

    def _prefill_job(self) -> PrefillJob:
        attempt = self._current()
        place = attempt.placement
        return PrefillJob(self._job(), place.decode, attempt.epoch, place.uncached)

    def _job(self) -> Request:
        params = self.request.params
        if self._prompt_sent:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(
            self.request, attempt=self.attempt, outputs=self._ids(), params=params
        )

    def _ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(ids) for ids in self.outputs)

    def _finished(self) -> tuple[int, ...]:
        return tuple(c for c in range(self.request.params.n) if c not in self.open)

    def _abort(self) -> Abort:
        return Abort(self.request.id, self.attempt)

    def _from_prefill(self, node: NodeId, attempt: int) -> bool:
        waiting = self.phase == "handoff" and node == self.prefill
        return waiting and attempt == self.attempt

    def _serves(self, node: NodeId) -> bool:
        return self.phase in ("handoff", "running") and node == self.decode


def _without(delta: Delta, known: int) -> Delta:
    """The delta without its first `known` ids. Text cannot be cut where ids can: a delta that has
    some, or ends before what is known, stays as it is, and so out of place."""
    if delta.text or known > len(delta.ids):
        return delta
    return msgspec.structs.replace(
        delta,
        offset=delta.offset + known,
        ids=delta.ids[known:],
        logprobs=delta.logprobs[known:],
    )

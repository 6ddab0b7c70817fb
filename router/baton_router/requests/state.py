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

A node that drains and is leaving is no loss. What decodes there is moved by placed(), and goes on
where it is until then; a node that ends hands back what it still has, and that is no refusal.
"""

from __future__ import annotations

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
)
from baton_protocol.request import Request
from baton_router.nodes.link import Loss
from baton_router.requests.actions import (
    Action,
    Cause,
    Emit,
    Ended,
    Failed,
    Measured,
    Regroup,
    Replace,
    Send,
)

Phase = Literal["waiting", "handoff", "running", "over"]

MAX_STRIKES = 3
# So many refusals that another node may not have ("busy", "draining") are followed by another try.
# A request whose client has tokens is tried until its deadline.
MAX_ATTEMPTS = 16


class RequestRecord:
    """`request` is what the client asked; `outputs[c]` are the ids it has of choice c.

    `attempt` counts placements, `decode` and `prefill` are the nodes of the current one. Of
    `request.attempt` nothing is kept: the first placement is attempt 1.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.attempt = 0
        self.phase: Phase = "waiting"
        self.decode: NodeId | None = None
        self.prefill: NodeId | None = None
        self.outputs: list[list[int]] = [list(ids) for ids in request.outputs]
        self.open = set(range(request.params.n))
        self.stats: RequestStats | None = (
            None  # of the last attempt: of whom had to have the prompt
        )
        self.strikes = 0
        self._losses = 0  # in a row without progress
        self._refusals = 0
        self._progress = False  # since the last loss
        self._decode_epoch = Epoch("")
        self._chunks = 0
        self._measured = 0  # the last attempt whose opening statistics came
        self._findable = 0
        self._uncached = 0
        self._cached: int | None = None
        self._prompt_told = False
        self._undisturbed = True  # what was found of the prompt, nobody computed for this request

    # --- places -----------------------------------------------------------------------------------

    def judge(self, chunks: int) -> list[Action]:
        """Before each placement: so many chunks of the prompt exist now. More than ever before is
        progress, which forgives strikes; too many strikes are the end."""
        if chunks > self._chunks:
            self._chunks = chunks
            self.strikes = self._losses = 0
        if self.strikes < MAX_STRIKES:
            return []
        told = RequestKillsNodes(
            f"{self.strikes} times in a row a node was lost while it served this request, "
            "without one new token; it is not tried again"
        )
        return self._fail(told.record())

    def placed(
        self, decode: NodeId, decode_epoch: Epoch, prefill: NodeId | None = None, findable: int = 0
    ) -> list[Action]:
        """The next attempt: its opening jobs, after the end of an earlier one that still lives.
        `findable` is how many tokens of the prompt need not be computed."""
        assert self.phase != "over"
        assert prefill is None or not any(self.outputs), "what has begun to decode is not split"
        aborts = self._leave()
        self.attempt += 1
        self._uncached = len(self.request.prompt_ids) - findable
        if self.attempt == 1:
            self._findable = findable
        else:
            self._undisturbed = False
        self.decode, self._decode_epoch, self.prefill = decode, decode_epoch, prefill
        self.phase = "running" if prefill is None else "handoff"
        sends = [Send(decode, self._run_job())]
        if prefill is not None:
            sends.append(Send(prefill, self._prefill_job()))
        return [*aborts, *sends]

    def no_first(self, reason: str) -> list[Action]:
        """Nobody else computes the prompt: the decode node is to do it."""
        assert self.phase == "handoff"
        assert self.decode is not None
        self.phase, self.prefill = "running", None
        self._undisturbed = False
        return [Send(self.decode, NoFirstTokens(self.request.id, self.attempt, reason))]

    # --- what nodes say ---------------------------------------------------------------------------

    def adds(self, node: NodeId, delta: Delta) -> bool:
        """Take the next tokens in order, after which the request goes on: what most deltas are.
        False where it is anything else, for on_delta()."""
        if (
            self.phase != "running"
            or node != self.decode
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
        assert self.decode is not None
        self.phase, self.prefill = "running", None
        actions = self._measure(done.stats)
        for delta in done.choices:
            actions += self._accept(node, delta)
        if not self.open:  # nothing is left for the decode node, which has the request parked
            return [*actions, Send(self.decode, self._abort())]
        first = FirstTokens(self.request.id, self.attempt, self._ids(), self._finished())
        return [*actions, Send(self.decode, first)]

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
            self.prefill = None
            return [Send(node, self._abort()), Regroup(cause, node)]
        if not self._serves(node):
            return []
        if not self._regroups:  # else its pair is lost in one event, which is one strike
            self._strike(blamed)
        return self._replace(cause, node)

    def on_leaving(self, node: NodeId) -> list[Action]:
        """A prefill node is to be empty: another is to do its job. Nothing for any other node."""
        if not self._from_prefill(node, self.attempt):
            return []
        self.prefill = None
        return [Send(node, self._abort()), Regroup("drained", node)]

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
        self.phase = "over"
        return [*self._leave()]

    # --- figures ----------------------------------------------------------------------------------

    @property
    def on_probation(self) -> bool:
        """One more strike and it is over."""
        return self.strikes >= MAX_STRIKES - 1 and not self._progress

    @property
    def _regroups(self) -> bool:
        """Its prefill node is gone, and what becomes of it is not decided yet."""
        return self.phase == "handoff" and self.prefill is None

    @property
    def tokens(self) -> int:
        """How many ids the client has."""
        return sum(map(len, self.outputs))

    @property
    def untold(self) -> bool:
        """The client has nothing yet."""
        return not self.tokens and not self._prompt_told

    @property
    def asks_prompt_logprobs(self) -> bool:
        """The client is still owed the prompt's logprobs."""
        return self.request.params.prompt_logprobs is not None and not self._prompt_told

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody had to compute for this request (usage's cached_tokens). What
        exists only because an earlier attempt computed it is not among them."""
        return self._cached or 0

    # --- tokens -----------------------------------------------------------------------------------

    def _accept(self, node: NodeId, delta: Delta) -> list[Action]:
        if delta.choice not in self.open:
            return []
        if delta.finish == "abort":
            self._strike()
            return self._replace("aborted", node)
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
        self._progress = self._progress or bool(delta.ids)
        if delta.prompt_logprobs:
            if self._prompt_told:
                delta = msgspec.structs.replace(delta, prompt_logprobs=())
            self._prompt_told = True
        actions: list[Action] = [Emit(delta)]
        if delta.stats is not None:
            actions += self._measure(delta.stats)
        if delta.finish is not None:
            self.open.discard(delta.choice)
        if not self.open:
            self.phase = "over"
            actions.append(Ended())
        return actions

    def _answers_each_choice(self, done: PrefillDone) -> bool:
        if sorted(delta.choice for delta in done.choices) != sorted(self.open):
            return False
        return all(
            delta.offset == len(self.outputs[delta.choice])
            and delta.ids
            and delta.finish != "abort"
            for delta in done.choices
        )

    def _measure(self, stats: RequestStats) -> list[Action]:
        if self._cached is None:
            found = stats.cached_tokens + stats.host_tokens + stats.fetched_tokens
            self._cached = found if self._undisturbed else min(found, self._findable)
        opening, self._measured = self._measured != self.attempt, self.attempt
        self.stats = stats if opening else self.stats
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
        self.phase = "waiting"
        return [*aborts, Replace(cause, node)]

    def _fail(self, error: ErrorRecord, gone: NodeId | None = None) -> list[Action]:
        aborts = self._leave(gone)
        self.phase = "over"
        return [*aborts, Failed(error)]

    def _leave(self, gone: NodeId | None = None) -> list[Send]:
        """Take the request from the nodes of the attempt; `gone` has dropped it by itself."""
        nodes = [node for node in (self.prefill, self.decode) if node not in (None, gone)]
        self.decode = self.prefill = None
        return [Send(node, self._abort()) for node in nodes if node is not None]

    def _run_job(self) -> RunJob:
        await_first = self.phase == "handoff"
        uncached = 0 if await_first else self._uncached
        return RunJob(self._job(), await_first, self._finished(), uncached)

    def _prefill_job(self) -> PrefillJob:
        assert self.decode is not None
        return PrefillJob(self._job(), self.decode, self._decode_epoch, self._uncached)

    def _job(self) -> Request:
        params = self.request.params
        if self._prompt_told:
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

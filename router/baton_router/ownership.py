"""Who owns a request: the router. One record per request, a state machine without sockets.

    in     what nodes say (deltas, PrefillDone, JobFailed), lost links, the client leaving
    out    actions: Emit to the client, Send to a node, Failed or Ended (one of them, once)

A request with a prefill partner begins in "handoff": the decode node waits for exactly one First,
NoFirst or Abort. Ids reach the client in order and once: overlap is dropped, a gap means that the
attempt is lost. Frames of another attempt, or of nodes that do not serve this one, are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from baton_protocol.errors import ErrorRecord, NodeLost
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import (
    Abort,
    Delta,
    First,
    JobFailed,
    NoFirst,
    PrefillDone,
    PrefillJob,
    RequestStats,
    RunJob,
    ToNode,
)
from baton_protocol.request import Request

Phase = Literal["handoff", "running", "over"]


@dataclass(frozen=True, slots=True)
class Emit:
    """New ids or text of one choice, for the client."""

    delta: Delta


@dataclass(frozen=True, slots=True)
class Send:
    node: NodeId
    frame: ToNode


@dataclass(frozen=True, slots=True)
class Failed:
    """The request is over; the client gets this error."""

    error: ErrorRecord


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is over; every choice finished."""


Action = Emit | Send | Failed | Ended


class RequestRecord:
    """One request in its current attempt. `outputs[c]` are the ids the client has of choice c."""

    def __init__(self, request: Request, decode: NodeId, prefill: NodeId | None = None) -> None:
        self.request = request
        self.decode = decode
        self.prefill = prefill
        self.phase: Phase = "running" if prefill is None else "handoff"
        self.outputs: list[list[int]] = [list(ids) for ids in request.outputs]
        self.open = set(range(request.params.n))
        self.stats: RequestStats | None = None

    def opening(self, decode_epoch: Epoch) -> list[Send]:
        """The jobs that start the attempt."""
        sends = [Send(self.decode, RunJob(self.request, await_first=self.prefill is not None))]
        if self.prefill is not None:
            job = PrefillJob(self.request, decode_node=self.decode, decode_epoch=decode_epoch)
            sends.append(Send(self.prefill, job))
        return sends

    def on_delta(self, node: NodeId, delta: Delta) -> list[Action]:
        """Tokens from the decode node. Before its First or NoFirst it has no business sending."""
        if self.phase != "running" or node != self.decode or delta.attempt != self.request.attempt:
            return []
        return self._accept(delta)

    def on_prefill_done(self, node: NodeId, done: PrefillDone) -> list[Action]:
        """First tokens: to the client, and to the decode node, which may go on; or the end."""
        if not self._from_prefill(node, done.attempt):
            return []
        if not self._answers_each_choice(done):
            return self._no_first(f"prefill node {node} did not answer each choice")
        self.stats = done.stats
        self.phase = "running"
        actions: list[Action] = []
        for delta in done.choices:
            actions += self._accept(delta)
        if self._is_over():  # nothing is left for the decode node, which has the request parked
            return [*actions, Send(self.decode, self._abort())]
        finished = tuple(c for c in range(self.request.params.n) if c not in self.open)
        outputs = tuple(tuple(ids) for ids in self.outputs)
        first = First(self.request.id, self.request.attempt, outputs, finished)
        return [*actions, Send(self.decode, first)]

    def on_failed(self, node: NodeId, failed: JobFailed) -> list[Action]:
        """A prefill job's failure costs time; the decode node's ends the request."""
        if self._from_prefill(node, failed.attempt):
            return self._no_first(failed.error.message)
        if self._is_over() or node != self.decode or failed.attempt != self.request.attempt:
            return []
        return self._fail(failed.error, abort_decode=False)

    def on_link_lost(self, node: NodeId) -> list[Action]:
        """The link broke. The Abort to a lost decode node waits for its link to come back."""
        if self._from_prefill(node, self.request.attempt):
            return self._no_first(f"the link to prefill node {node} broke")
        if self._is_over() or node != self.decode:
            return []
        return self._fail(_lost(f"decode node {node} was lost while it served the request"))

    def cancel(self, error: ErrorRecord | None = None) -> list[Action]:
        """The client left (no error), or the router ends the request with one."""
        if self._is_over():
            return []
        actions = self._fail(error or _lost("the client left"))
        return actions if error else [action for action in actions if isinstance(action, Send)]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody had to compute for this request (usage's cached_tokens)."""
        stats = self.stats
        return 0 if stats is None else stats.cached_tokens + stats.fetched_tokens

    def _answers_each_choice(self, done: PrefillDone) -> bool:
        if sorted(delta.choice for delta in done.choices) != sorted(self.open):
            return False
        return all(
            delta.offset == len(self.outputs[delta.choice])
            and delta.ids
            and delta.finish != "abort"
            for delta in done.choices
        )

    def _accept(self, delta: Delta) -> list[Action]:
        if delta.choice not in self.open:
            return []
        if delta.finish == "abort":
            return self._fail(_lost(f"node {self.decode} gave the request up"))
        have = self.outputs[delta.choice]
        known = len(have) - delta.offset
        if known < 0:
            return self._fail(
                _lost(f"choice {delta.choice} jumped from token {len(have)} to {delta.offset}")
            )
        if known > 0:
            if known >= len(delta.ids) and delta.finish is None:
                return []
            delta = msgspec.structs.replace(
                delta,
                offset=len(have),
                ids=delta.ids[known:],
                logprobs=delta.logprobs[known:],
            )
        have.extend(delta.ids)
        if delta.stats is not None and self.stats is None:
            self.stats = delta.stats
        if delta.finish is None:
            return [Emit(delta)]
        self.open.discard(delta.choice)
        if self.open:
            return [Emit(delta)]
        self.phase = "over"
        return [Emit(delta), Ended()]

    def _no_first(self, reason: str) -> list[Action]:
        self.phase = "running"
        return [Send(self.decode, NoFirst(self.request.id, self.request.attempt, reason))]

    def _fail(self, error: ErrorRecord, *, abort_decode: bool = True) -> list[Action]:
        actions: list[Action] = []
        if self.prefill is not None and self.phase == "handoff":
            actions.append(Send(self.prefill, self._abort()))
        if abort_decode:
            actions.append(Send(self.decode, self._abort()))
        self.phase = "over"
        return [*actions, Failed(error)]

    def _from_prefill(self, node: NodeId, attempt: int) -> bool:
        waiting = self.phase == "handoff" and node == self.prefill
        return waiting and attempt == self.request.attempt

    def _is_over(self) -> bool:
        return self.phase == "over"

    def _abort(self) -> Abort:
        return Abort(self.request.id, self.request.attempt)


def _lost(message: str) -> ErrorRecord:
    return NodeLost(f"{message}; send the request again").record()

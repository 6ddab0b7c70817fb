"""What the server knows of one request in one attempt.

In: the job, its tokens as the engine makes them. Out: the deltas that its router gets, now, and
those it missed when its link comes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton_node.ipc.messages import Token
from baton_node.server.detokenize import ChoiceText, context
from baton_node.server.links import RouterLink
from baton_node.server.unacked_deltas import UnackedDeltas, size_of
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta, JobFailed, PrefillDone, PrefillJob, RequestStats, RunJob
from baton_protocol.request import PositionLogprobs, Request
from baton_text.tokenizer import Tokenizer

Outputs = tuple[tuple[int, ...], ...]


@dataclass(slots=True, eq=False)
class RequestStream:
    """Made by open_live().

    `link` is None while its router is away. `until` (the table's clock) says when a request without
    a link is given up, and when one that has ended is forgotten. `last` is what ended it, where
    that was no delta.
    """

    request: Request
    prefill: bool
    router: str
    link: RouterLink | None
    awaits_first: bool
    open_choices: set[int]
    opened: float
    texts: list[ChoiceText] = field(default_factory=list)
    histories: list[UnackedDeltas] = field(default_factory=list)
    firsts: dict[int, Delta] = field(default_factory=dict)  # of a prefill job
    stats: RequestStats | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()  # not sent yet
    last: PrefillDone | JobFailed | None = None
    until: float = 0.0

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def attempt(self) -> int:
        return self.request.attempt

    @property
    def about(self) -> dict[str, object]:
        """For the log."""
        return {"request": self.id, "attempt": self.attempt}

    @property
    def bytes(self) -> int:
        """What it keeps of its deltas."""
        kept = sum(history.bytes for history in self.histories)
        return kept + sum(map(size_of, self.firsts.values()))

    def start(self, tokenizer: Tokenizer, outputs: Outputs) -> None:
        """Its texts begin behind these ids, which its router has with their text."""
        known = outputs or ((),) * self.request.params.n
        before = context(tokenizer, self.request)
        self.texts = [ChoiceText(tokenizer, self.request, ids, before) for ids in known]
        self.histories = [UnackedDeltas(len(ids)) for ids in known]

    def take(self, token: Token, limit: int) -> Delta:
        """The delta of one token of an open choice. It closes the choice that it ends; the last of
        all carries the statistics. `limit` is the most bytes that a choice may keep."""
        delta = self.texts[token.choice].push(token)
        more: dict[str, object] = {}
        if self.prompt_logprobs:
            more["prompt_logprobs"], self.prompt_logprobs = self.prompt_logprobs, ()
        if delta.finish is not None:
            self.open_choices.discard(delta.choice)
            if not self.open_choices and not self.prefill:
                more["stats"] = self.stats or RequestStats()
        if more:
            delta = msgspec.structs.replace(delta, **more)
        if self.prefill:
            self.firsts[delta.choice] = delta
        else:
            self.histories[delta.choice].add(delta, limit)
        return delta

    @property
    def answered(self) -> bool:
        """A prefill job is answered when every choice has its first token."""
        return self.prefill and len(self.firsts) == self.request.params.n

    def prefill_done(self) -> PrefillDone:
        choices = tuple(self.firsts[choice] for choice in sorted(self.firsts))
        return PrefillDone(self.id, self.attempt, choices, self.stats or RequestStats())

    def missed(self, job: RunJob) -> list[Delta] | None:
        """All behind what the router has, by the job it sent again; None if that is not kept."""
        outputs = job.request.outputs or ((),) * len(self.histories)
        if len(outputs) != len(self.histories):
            return None
        missed: list[Delta] = []
        for history, ids in zip(self.histories, outputs, strict=True):
            deltas = history.since(len(ids))
            if deltas is None:
                return None
            missed += deltas
        return missed


def open_live(
    job: PrefillJob | RunJob, link: RouterLink, tokenizer: Tokenizer, clock_s: float
) -> RequestStream:
    """A request that begins, here and now."""
    request = job.request
    finished, awaits_first = (
        (job.finished, job.await_first) if isinstance(job, RunJob) else ((), False)
    )
    live = RequestStream(
        request=request,
        prefill=isinstance(job, PrefillJob),
        router=link.router,
        link=link,
        awaits_first=awaits_first,
        open_choices=set(range(request.params.n)) - set(finished),
        opened=clock_s,
    )
    live.start(tokenizer, request.outputs)
    return live

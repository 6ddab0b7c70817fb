"""The server's state of one request in one attempt.

In: the job, and its tokens from the engine. Out: the deltas for its router, and after a broken link
those that the router missed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton_engine.interface import Complete, Drafts, TokenOut
from baton_node.server.delta_history import DeltaHistory, size_of
from baton_node.server.detokenize import ChoiceText, context
from baton_node.server.links import RouterLink
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta, JobFailed, PrefillDone, PrefillJob, RequestStats, RunJob
from baton_protocol.request import PositionLogprobs, Request
from baton_protocol.usage import TimeSpent
from baton_text.tokenizer import Tokenizer

Outputs = tuple[tuple[int, ...], ...]


@dataclass(slots=True, eq=False)
class RequestStream:
    """One request in one attempt. Create it with open_stream().

    `router` is the secret that identifies the router that owns the request; `link` is None while
    that router is disconnected. `awaits_first` is True until the router sends FirstTokens or
    NoFirstTokens. `open_choices` have not ended. `texts` and `histories` have one entry per choice.
    `last` is the final frame of a request that does not end with a delta.

    `opened` and `until` are in seconds of the table's clock. At `until` a running request without a
    link is aborted, and an ended request is forgotten.
    """

    request: Request
    prefill: bool
    router: str
    link: RouterLink | None
    awaits_first: bool
    open_choices: set[int]
    opened: float
    texts: list[ChoiceText] = field(default_factory=list)
    histories: list[DeltaHistory] = field(default_factory=list)
    firsts: dict[int, Delta] = field(default_factory=dict)  # first deltas of a prefill job
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
        """The request's fields in the log."""
        return {"request": self.id, "attempt": self.attempt}

    @property
    def bytes(self) -> int:
        """About how many bytes of memory its kept deltas take."""
        kept = sum(history.bytes for history in self.histories)
        return kept + sum(map(size_of, self.firsts.values()))

    def start_texts(self, tokenizer: Tokenizer, outputs: Outputs) -> None:
        """Start each choice's text and history after these ids, for which the router already has
        ids and text."""
        sent = outputs or ((),) * self.request.params.n
        before = context(tokenizer, self.request)
        self.texts = [ChoiceText(tokenizer, self.request, ids, before) for ids in sent]
        self.histories = [DeltaHistory(len(ids)) for ids in sent]

    def make_delta(self, token: TokenOut | Complete, limit: int) -> Delta:
        """Return the delta of one token of an open choice, and keep it.

        A delta with a finish reason closes its choice. The delta that closes the last choice
        carries the statistics, except in a prefill job. `limit` is in bytes of kept deltas of all
        choices.
        """
        choice = token.choice
        delta = self.texts[choice].push(token)
        if self.prompt_logprobs:
            delta = msgspec.structs.replace(delta, prompt_logprobs=self.prompt_logprobs)
            self.prompt_logprobs = ()
        if delta.finish is not None:
            self.open_choices.discard(choice)
            if not self.open_choices and not self.prefill:
                delta = msgspec.structs.replace(delta, stats=self.stats or RequestStats())
        if self.prefill:
            self.firsts[choice] = delta
        else:
            self.histories[choice].add_delta(delta, limit // len(self.histories))
        return delta

    def add_drafts(self, drafts: Drafts) -> None:
        """Count what a step found out about drafts of a choice."""
        stats = self.stats or RequestStats()
        self.stats = msgspec.structs.replace(
            stats,
            drafted_tokens=stats.drafted_tokens + drafts.drafted,
            accepted_drafts=stats.accepted_drafts + drafts.accepted,
            forced_drafts=stats.forced_drafts + drafts.accepted * drafts.forced,
        )

    def note_spent(self, time: TimeSpent) -> None:
        self.stats = msgspec.structs.replace(self.stats or RequestStats(), spent=time)

    @property
    def is_answered(self) -> bool:
        """True for a prefill job when each choice has its first token; with beam search, when the
        prompt is computed: the decode node begins the search."""
        params = self.request.params
        if params.use_beam_search:
            return self.prefill and self.stats is not None
        return self.prefill and len(self.firsts) == params.n

    def prefill_done(self) -> PrefillDone:
        choices = tuple(self.firsts[choice] for choice in sorted(self.firsts))
        return PrefillDone(self.id, self.attempt, choices, self.stats or RequestStats())

    def missed_deltas(self, job: RunJob) -> list[Delta] | None:
        """Return the deltas after the outputs in the job that the router sent again, or None if
        they are not kept any more or the job has another number of choices."""
        outputs = job.request.outputs or ((),) * len(self.histories)
        if len(outputs) != len(self.histories):
            return None
        missed: list[Delta] = []
        for history, ids in zip(self.histories, outputs, strict=True):
            deltas = history.deltas_since(len(ids))
            if deltas is None:
                return None
            missed += deltas
        return missed


def open_stream(
    job: PrefillJob | RunJob, link: RouterLink, tokenizer: Tokenizer, clock_s: float
) -> RequestStream:
    """Create the state of a new request. `clock_s` is the time now, in seconds of the table's
    clock."""
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
    live.start_texts(tokenizer, request.outputs)
    return live

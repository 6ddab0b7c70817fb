"""The server's table of requests: whose they are, and how their tokens go out.

In: jobs and words of routers, frames of the engine. Out: frames for the engine, and Deltas,
PrefillDone and JobFailed on the link the job came by. A request whose link was lost is aborted
after a grace period, unless a router sent the same job again meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from baton_node.frames import FinishChoice, Step, ToEngine
from baton_node.links import Link
from baton_node.textual import ChoiceText
from baton_protocol.ids import RequestId
from baton_protocol.link import (
    Abort,
    Delta,
    Deltas,
    First,
    JobFailed,
    NoFirst,
    PrefillDone,
    PrefillJob,
    RequestStats,
    RunJob,
)
from baton_protocol.request import Request
from baton_text.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class Live:
    """One request in one attempt, until its last token is sent."""

    request: Request
    prefill: bool
    link: Link | None
    texts: list[ChoiceText]
    open_choices: set[int]
    stats: RequestStats | None = None
    firsts: dict[int, Delta] = field(default_factory=dict)  # of a prefill job

    @property
    def attempt(self) -> int:
        return self.request.attempt


class Table:
    """`send` gives a frame to the engine."""

    def __init__(self, tokenizer: Tokenizer, send: Callable[[ToEngine], None]) -> None:
        self._tokenizer = tokenizer
        self._send = send
        self._live: dict[RequestId, Live] = {}

    def __len__(self) -> int:
        return len(self._live)

    # --- from routers ---------------------------------------------------------------------------

    def knows(self, job: PrefillJob | RunJob, link: Link) -> bool:
        """True for a job that is here already (then it goes out on this link from now on), or
        that is older than what is here."""
        live = self._live.get(job.request.id)
        if live is None or live.attempt < job.request.attempt:
            return False
        if live.attempt == job.request.attempt and live.prefill == isinstance(job, PrefillJob):
            live.link = link
        return True

    def open(self, job: PrefillJob | RunJob, link: Link) -> None:
        """A new request, or a newer attempt of one."""
        request = job.request
        self._live[request.id] = Live(
            request=request,
            prefill=isinstance(job, PrefillJob),
            link=link,
            texts=self._texts(request, request.outputs),
            open_choices=set(range(request.params.n)),
        )
        self._send(job)

    def first(self, word: First) -> None:
        """The texts start behind what the prefill node has shown."""
        live = self._get(word.request, word.attempt)
        if live is None or live.prefill:
            return
        if len(word.outputs) != live.request.params.n:
            reason = f"First brought {len(word.outputs)} outputs for n={live.request.params.n}"
            self._send(NoFirst(word.request, word.attempt, reason))
            return
        live.texts = self._texts(live.request, word.outputs)
        live.open_choices -= set(word.finished)
        self._send(word)
        self._close_if_done(live)

    def no_first(self, word: NoFirst) -> None:
        if self._get(word.request, word.attempt) is not None:
            self._send(word)

    def abort(self, word: Abort) -> None:
        """Forgotten here at once; the engine settles what is in flight."""
        if self._get(word.request, word.attempt) is not None:
            del self._live[word.request]
            self._send(word)

    # --- from the engine ------------------------------------------------------------------------

    def stepped(self, step: Step) -> None:
        """Send one step's tokens, all those of one link in one frame."""
        for request, attempt, stats in ((p.request, p.attempt, p.stats) for p in step.prompts):
            if (live := self._get(request, attempt)) is not None:
                live.stats = stats
        frames: dict[Link, list[Delta]] = {}
        for token in step.tokens:
            live = self._get(token.request, token.attempt)
            if live is None or token.choice not in live.open_choices:
                continue
            delta = live.texts[token.choice].push(token)
            if delta.finish is not None and token.finish is None:
                self._send(FinishChoice(token.request, token.attempt, token.choice))
            delta = self._account(live, delta)
            if live.prefill:
                self._answer(live, delta)
            elif live.link is not None:
                frames.setdefault(live.link, []).append(delta)
        for link, deltas in frames.items():
            link.send(Deltas(tuple(deltas)))

    def failed(self, frame: JobFailed) -> None:
        live = self._get(frame.request, frame.attempt)
        if live is None:
            return
        del self._live[frame.request]
        if live.link is not None:
            live.link.send(frame)

    def _account(self, live: Live, delta: Delta) -> Delta:
        """Note a choice's end; the request's last delta carries its statistics."""
        if delta.finish is None:
            return delta
        live.open_choices.discard(delta.choice)
        if live.open_choices or live.prefill:
            return delta
        self._close_if_done(live)
        return msgspec.structs.replace(delta, stats=live.stats or RequestStats())

    def _answer(self, live: Live, delta: Delta) -> None:
        """A prefill job is answered when every choice has its first token."""
        live.firsts[delta.choice] = delta
        if len(live.firsts) < live.request.params.n:
            return
        self._live.pop(live.request.id, None)
        if live.link is not None:
            choices = tuple(live.firsts[choice] for choice in sorted(live.firsts))
            stats = live.stats or RequestStats()
            live.link.send(PrefillDone(live.request.id, live.attempt, choices, stats))

    # --- links that are lost --------------------------------------------------------------------

    def orphan(self, link: Link) -> list[tuple[RequestId, int]]:
        """A link is gone: whose requests are without one now."""
        orphans = []
        for live in self._live.values():
            if live.link is link:
                live.link = None
                orphans.append((live.request.id, live.attempt))
        return orphans

    def abort_orphans(self, orphans: list[tuple[RequestId, int]]) -> int:
        """Abort those that nobody has come back for; return how many."""
        count = 0
        for request, attempt in orphans:
            live = self._get(request, attempt)
            if live is not None and live.link is None:
                self.abort(Abort(request, attempt))
                count += 1
        return count

    # --- helpers --------------------------------------------------------------------------------

    def _get(self, request: RequestId, attempt: int) -> Live | None:
        live = self._live.get(request)
        return live if live is not None and live.attempt == attempt else None

    def _texts(self, request: Request, outputs: tuple[tuple[int, ...], ...]) -> list[ChoiceText]:
        return [
            ChoiceText(self._tokenizer, request, outputs[choice] if outputs else ())
            for choice in range(request.params.n)
        ]

    def _close_if_done(self, live: Live) -> None:
        if not live.open_choices and self._live.get(live.request.id) is live:
            del self._live[live.request.id]

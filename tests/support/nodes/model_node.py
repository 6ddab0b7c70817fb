"""A node as the request's record sees it: no sockets, no time, and the only true tokens.

In: frames of the router, and which of its possible steps comes next. Out: frames on a link that may
break. Text is held back as a detokenizer does, so that it is right only if nothing is doubled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import NodeId, RequestId
from baton_protocol.link import (
    Abort,
    Delta,
    DrainNode,
    First,
    JobFailed,
    PrefillDone,
    PrefillJob,
    RequestStats,
    ResumeNode,
    Resync,
    RunJob,
    ToNode,
)

RID = RequestId("r")
Said = Delta | PrefillDone | JobFailed


def token(choice: int, position: int) -> int:
    return 100 * choice + position


def text_of(choice: int, ids: int, length: int) -> str:
    """The text of so many ids: every third one's is held back until the next, or the end."""
    shown = ids if ids == length or ids % 3 else max(0, ids - 1)
    return "".join(f"<{token(choice, position)}>" for position in range(shown))


@dataclass
class Job:
    """What a node does for one attempt. `have[c]`: ids of choice c that it need not say."""

    attempt: int
    prefill: bool
    awaits_first: bool
    have: list[int]
    open: set[int]


@dataclass
class ModelNode:
    """`said` is on its way to the router, `kept` are aborts that wait for its link. `lost`: the
    router has given it up since its link broke. `lengths` are those of the choices."""

    name: NodeId
    lengths: list[int]
    linked: bool = True
    lost: bool = False
    job: Job | None = None
    said: list[Said] = field(default_factory=list)
    kept: list[Abort] = field(default_factory=list)

    # --- its link ---------------------------------------------------------------------------------

    def receive(self, frame: ToNode) -> None:
        if not self.linked:
            self.kept += [frame] if isinstance(frame, Abort) else []
        elif isinstance(frame, RunJob | PrefillJob):
            ended = frame.finished if isinstance(frame, RunJob) else ()
            self.job = Job(
                frame.request.attempt,
                isinstance(frame, PrefillJob),
                isinstance(frame, RunJob) and frame.await_first,
                [len(ids) for ids in frame.request.outputs],
                set(range(len(self.lengths))) - set(ended),
            )
        elif isinstance(frame, DrainNode | ResumeNode | Resync):
            raise AssertionError("no request's record says that")
        elif self.job is not None and self.job.attempt == frame.attempt:
            if isinstance(frame, Abort):
                self.job = None
                return
            self.job.awaits_first = False
            if isinstance(frame, First):
                self.job.have = [len(ids) for ids in frame.outputs]
                self.job.open -= set(frame.finished)

    def cut(self) -> None:
        """What was on its way is gone."""
        self.lost = self.lost and not self.linked
        self.linked = False
        self.said.clear()

    def link_up(self) -> None:
        self.linked, self.lost = True, False
        kept, self.kept = self.kept, []
        for abort in kept:
            self.receive(abort)

    def die(self) -> None:
        self.job = None
        self.said.clear()

    def _say(self, frame: Said) -> None:
        if self.linked:
            self.said.append(frame)

    # --- its job ----------------------------------------------------------------------------------

    def step(self, pick: int, count: int) -> None:
        """Some tokens of one open choice, or the prefill job's answer."""
        job = self.job
        assert job is not None
        if job.prefill:
            firsts = tuple(self._delta(job, choice, 1) for choice in sorted(job.open))
            self._say(PrefillDone(RID, job.attempt, firsts, RequestStats(2)))
            self.job = None
        elif not job.awaits_first:
            choice = sorted(job.open)[pick % len(job.open)]
            delta = self._delta(job, choice, count)
            self._say(delta)
            job.have[choice] += len(delta.ids)
            if delta.finish is not None:
                job.open.discard(choice)
                self.job = job if job.open else None

    def fail(self, error: ErrorRecord) -> None:
        assert self.job is not None
        self._say(JobFailed(RID, self.job.attempt, error))
        self.job = None

    def give_up(self) -> None:
        """A delta that ends in "abort", or an answer without choices."""
        job, self.job = self.job, None
        assert job is not None
        if job.prefill:
            self._say(PrefillDone(RID, job.attempt, (), RequestStats(2)))
        elif not job.awaits_first:
            choice = min(job.open)
            self._say(Delta(RID, job.attempt, choice, job.have[choice], finish="abort"))

    def _delta(self, job: Job, choice: int, count: int) -> Delta:
        length, start = self.lengths[choice], job.have[choice]
        until = min(length, start + count)
        known = len(text_of(choice, start, length))
        return Delta(
            RID,
            job.attempt,
            choice,
            start,
            ids=tuple(token(choice, position) for position in range(start, until)),
            text=text_of(choice, until, length)[known:],
            finish="length" if until == length else None,
        )

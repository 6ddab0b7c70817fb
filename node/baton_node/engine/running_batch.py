"""The requests that the engine runs, from admission to their last token.

In: admitted jobs, the server's frames about them, the engine's steps. Out: Step and JobFailed
frames; computed chunks for publishing and write-behind. Write-behind gets a chunk of a request with
stop strings only when none can cut it off any more. Only the step loop's thread calls this module.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton_engine.interface import Complete, Filled, Reservation, StepResult, TokenOut
from baton_node.engine.job import Job, JobKey
from baton_node.engine.loop_context import LoopContext
from baton_node.engine.roles import Publishing, WritingBehind
from baton_node.ipc.messages import FinishChoice, Prompted, Step
from baton_protocol.errors import BatonError
from baton_protocol.ids import RequestId
from baton_protocol.link import JobFailed


class RunningBatch:
    """The admitted requests; len() is their number.

    `ended` counts requests that ended, whose blocks the engine has freed. `prompted` counts
    requests whose prompt was computed.
    """

    def __init__(
        self, context: LoopContext, publishing: Publishing, write_behind: WritingBehind
    ) -> None:
        self._context = context
        self._engine = context.engine
        self._socket = context.socket
        self._clock = context.clock
        self._publishing = publishing
        self._write_behind = write_behind
        self._chunk_tokens = context.layout.chunk_tokens
        self._jobs: dict[RequestId, Job] = {}
        self.ended = self.prompted = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def jobs(self) -> Iterable[Job]:
        return self._jobs.values()

    def has(self, key: JobKey) -> bool:
        job = self._jobs.get(key[0])
        return job is not None and job.key == key

    def admit(
        self,
        job: Job,
        reservation: Reservation | None,
        landed: tuple[tuple[int, int], ...],
        window_landed: tuple[tuple[int, int], ...] | None = None,
    ) -> None:
        """Submit a job to the engine, which computes what is not cached or fetched. For `landed`
        and `window_landed` see Engine.submit. If the engine refuses the job, release the
        reservation and fail the job."""
        job.times.admitted = self._clock()
        prefill = job.kind == "prefill"
        try:
            self._engine.submit(
                job.request,
                reservation=reservation,
                landed=landed,
                window_landed=window_landed,
                prefill_only=prefill,
                track=prefill,
                report_filled=not prefill and self._context.has_store,
                finished=tuple(sorted(job.finished)),
                matcher=job.matcher,
            )
        except BatonError as error:
            if reservation is not None:
                self._engine.release(reservation)
            self.fail(job, error)
            return
        self._jobs[job.request.id] = job
        self._context.counters.add(handoffs=job.handed_off)

    def fail(self, job: Job, error: BatonError) -> None:
        """End a job that cannot run, and send its error to the server."""
        self.close(job)
        self._socket.send(JobFailed(*job.key, error.record()))

    def close(self, job: Job) -> None:
        """The job computes no more. Puts in flight continue."""
        self._write_behind.close(job)
        self._publishing.close(job)

    def abort(self, key: JobKey) -> None:
        job = self._jobs.get(key[0])
        if job is not None and job.key == key:
            self._engine.abort(key[0])
            self._end(job)

    def finish_choice(self, frame: FinishChoice) -> None:
        job = self._jobs.get(frame.request)
        if job is None or job.request.attempt != frame.attempt:
            return
        self._engine.finish_choice(frame.request, frame.choice)
        self._close_choice(job, frame.choice)

    def drain(self) -> None:
        """The node drains: put the full chunks of all whole requests, and from now on each chunk
        that they fill."""
        self._write_behind.drain(True)
        for job in self._jobs.values():
            if job.kind == "run":
                for filled in self._engine.full_chunks(job.request.id):
                    self._filled(filled, job)
        self._write_behind.watch()

    def step(self) -> bool:
        """Run one engine step and handle its results. Return False if nothing could run."""
        began = self._clock()
        result = self._engine.step()
        now = self._clock()
        self._context.speeds.observe(now - began, result)
        for progress in result.progress:
            if job := self._jobs.get(progress.request):
                self._publishing.progressed(progress, job)
        for filled in result.filled:
            if job := self._jobs.get(filled.request):
                self._filled(filled, job)
        step = self._frame(result, now)
        if step.tokens or step.prompts or step.complete:
            self._socket.send(step)
        for failed in result.failed:
            if job := self._jobs.get(failed.request):
                self._socket.send(JobFailed(*job.key, failed.error.record()))
        for request in result.finished:
            if job := self._jobs.get(request):
                self._end(job)
        return bool(result.num_tokens or result.finished)

    def _frame(self, result: StepResult, now: float) -> Step:
        """Return the step's tokens and computed prompts, each with its attempt."""
        prompts = [
            Prompted(use.request, job.request.attempt, job.stats(use, now), use.logprobs)
            for use in result.prompts
            if (job := self._jobs.get(use.request)) is not None
        ]
        self.prompted += len(prompts)
        complete: list[Complete] = []
        for end in result.complete:
            if (job := self._jobs.get(end.request)) is not None:
                complete.append(end)
                self._close_choice(job, end.choice)
        tokens: list[TokenOut] = []
        for out in result.tokens:
            job = self._jobs.get(out.request)
            if job is None or out.choice not in job.open_choices:
                continue  # a stop string has ended the choice
            tokens.append(out)
            if out.finish is not None:
                self._close_choice(job, out.choice)
            elif job.request.params.stop:
                self._became_certain(out, job)
        return Step(tuple(tokens), tuple(prompts), tuple(complete))

    def _filled(self, filled: Filled, job: Job) -> None:
        end = (filled.index + 1) * self._chunk_tokens
        if not job.request.params.stop or end <= job.certain(filled.choice):
            self._write_behind.filled(filled, job)

    def _became_certain(self, out: TokenOut, job: Job) -> None:
        """A choice of a request with stop strings has a new token: pass on the chunk that no stop
        string can cut off any more, if there is one. Its blocks may have changed since it was
        filled, so ask the engine for them."""
        job.newest[out.choice] = out.offset
        end = job.certain(out.choice)
        if end % self._chunk_tokens or end <= job.given(out.choice):
            return
        if job.kind == "run" and self._context.has_store:
            for filled in self._engine.full_chunks(out.request):
                last = (filled.index + 1) * self._chunk_tokens == end
                if last and filled.choice == out.choice:
                    self._write_behind.filled(filled, job)

    def _close_choice(self, job: Job, choice: int) -> None:
        job.open_choices.discard(choice)
        if not job.open_choices:
            self._end(job)

    def _end(self, job: Job) -> None:
        """The request has ended, and the engine has forgotten it."""
        if self._jobs.get(job.request.id) is job:
            del self._jobs[job.request.id]
            self.ended += 1
        self.close(job)

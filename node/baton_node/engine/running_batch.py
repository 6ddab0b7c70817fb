"""The requests that the engine runs, from admission to their last token.

In: admitted jobs, the server's frames about them, the engine's steps. Out: Step and JobFailed
frames; computed chunks for publishing and write-behind. Write-behind gets a chunk of a request with
stop strings only when none can cut it off any more. Only the step loop's thread calls this module.
"""

from __future__ import annotations

from baton_engine.interface import Complete, Filled, Reservation, StepResult, TokenOut
from baton_node.engine.job import Job, JobKey
from baton_node.engine.loop_context import LoopContext
from baton_node.engine.roles import Publishing, WritingBehind
from baton_node.engine.time_ledger import time_spent
from baton_node.ipc.messages import Prompted, Spent, Step
from baton_protocol.errors import BatonError
from baton_protocol.link import JobFailed


class RunningBatch:
    """The jobs that the engine runs."""

    def __init__(
        self, context: LoopContext, publishing: Publishing, write_behind: WritingBehind
    ) -> None:
        self._context = context
        self._engine = context.engine
        self._socket = context.socket
        self._clock = context.clock
        self._jobs = context.jobs
        self._publishing = publishing
        self._write_behind = write_behind
        self._chunk_tokens = context.layout.chunk_tokens
        self._overlap = context.engine.overlap
        self._step_began = 0.0  # the newest call of step(), in seconds of the clock

    def admit_job(
        self,
        job: Job,
        reservation: Reservation | None,
        landed: tuple[tuple[int, int], ...],
        window_landed: tuple[tuple[int, int], ...] | None = None,
    ) -> None:
        """Submit a job to the engine, which computes what is not cached or fetched. For `landed`
        and `window_landed` see EngineCore.submit. If the engine refuses the job, release the
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
                report_filled=job.kept_in_store and self._context.has_store,
                finished=tuple(sorted(job.finished)),
                matcher=job.matcher,
                account=job.account,
            )
        except BatonError as error:
            if reservation is not None:
                self._engine.release(reservation)
            self.fail_job(job, error)
            return
        self._jobs.set_state(job, "running")
        self._context.counters.add(handoffs=job.handed_off)

    def fail_job(self, job: Job, error: BatonError) -> None:
        """End a job that cannot run, and send its error to the server."""
        self.end_job(job)
        self._socket.send(JobFailed(*job.key, error.record()))

    def end_job(self, job: Job) -> None:
        """The job computes no more, and the engine does not have it. Puts in flight continue."""
        self._jobs.set_state(job, "ended")
        self._write_behind.close_job(job)
        self._publishing.close_job(job)

    def finish_choice(self, job: Job, choice: int) -> None:
        """A stop string has ended a choice of a running job."""
        self._engine.finish_choice(job.request.id, choice)
        self._close_choice(job, choice)

    def start_draining(self) -> None:
        """The node drains: put the full chunks of all whole requests, and from now on each chunk
        that they fill."""
        self._write_behind.set_draining(True)
        for job in self._jobs:
            if job.state == "running" and job.kept_in_store:
                for filled in self._engine.full_chunks(job.request.id):
                    self._put_filled(filled, job)
        self._write_behind.watch_puts()

    def run_step(self) -> bool:
        """Run one engine step and handle its results. Return False if nothing could run."""
        began, earlier = self._clock(), self._step_began
        self._step_began = began
        result = self._engine.step()
        now = self._clock()
        self._context.speeds.observe(now - began, result)
        self._context.ledger.book_step(self._engine, result, now)
        for request in result.started:
            if job := self._jobs.find_running(request):
                # With overlap, the step that was read now was launched by the call before.
                job.times.started = max(earlier, job.times.admitted) if self._overlap else began
        for progress in result.progress:
            if job := self._jobs.find_running(progress.request):
                self._publishing.publish_progress(progress, job)
        for filled in result.filled:
            if job := self._jobs.find_running(filled.request):
                self._put_filled(filled, job)
        step = self._step_frame(result, now)
        if step.tokens or step.prompts or step.complete:
            self._socket.send(step)
        for failed in result.failed:
            if job := self._jobs.find_running(failed.request):
                self._socket.send(JobFailed(*job.key, failed.error.record()))
        for request in result.finished:
            if job := self._jobs.find_running(request):
                self.end_job(job)
        return bool(result.num_tokens or result.finished)

    def _step_frame(self, result: StepResult, now: float) -> Step:
        """Return the step's tokens and computed prompts, each with its attempt."""
        prompts = [
            Prompted(use.request, job.request.attempt, job.stats(use, now), use.logprobs)
            for use in result.prompts
            if (job := self._jobs.find_running(use.request)) is not None
        ]
        self._jobs.changes += len(prompts)
        spent: dict[JobKey, Spent] = {}
        complete: list[Complete] = []
        for end in result.complete:
            if (job := self._jobs.find_running(end.request)) is not None:
                complete.append(end)
                self._close_choice(job, end.choice)
        tokens: list[TokenOut] = []
        for out in result.tokens:
            job = self._jobs.find_running(out.request)
            if job is None or out.choice not in job.open_choices:
                continue  # a stop string has ended the choice
            tokens.append(out)
            if out.finish is not None or job.request.params.stop:
                spent[job.key] = Spent(*job.key, time_spent(job.account))
            if out.finish is not None:
                self._close_choice(job, out.choice)
            elif job.request.params.stop:
                self._put_certain(out, job)
        return Step(
            tuple(tokens),
            tuple(prompts),
            tuple(complete),
            tuple(result.drafts),
            tuple(spent.values()),
        )

    def _put_filled(self, filled: Filled, job: Job) -> None:
        end = (filled.index + 1) * self._chunk_tokens
        if not job.request.params.stop or end <= job.certain_tokens(filled.choice):
            self._write_behind.put_filled(filled, job)

    def _put_certain(self, out: TokenOut, job: Job) -> None:
        """A choice of a request with stop strings has a new token: pass on the chunk that no stop
        string can cut off any more, if there is one. Its blocks may have changed since it was
        filled, so ask the engine for them."""
        job.newest[out.choice] = out.offset
        end = job.certain_tokens(out.choice)
        if end % self._chunk_tokens or end <= job.known_tokens(out.choice):
            return
        if job.kind == "run" and self._context.has_store:
            for filled in self._engine.full_chunks(out.request):
                last = (filled.index + 1) * self._chunk_tokens == end
                if last and filled.choice == out.choice:
                    self._write_behind.put_filled(filled, job)

    def _close_choice(self, job: Job, choice: int) -> None:
        job.open_choices.discard(choice)
        if not job.open_choices:
            self.end_job(job)

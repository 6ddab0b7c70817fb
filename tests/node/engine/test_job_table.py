"""The table of jobs: one job per request, its states, and what load reports count."""

from __future__ import annotations

from baton_node.engine.job import Job, Times
from baton_node.engine.job_table import REMEMBERED, JobTable
from baton_protocol.ids import RequestId
from tests.support.nodes.processes import make_request
from tests.support.stores.kvstore import LAYOUT


def job_of(name: str, attempt: int = 1, choices: int = 1) -> Job:
    request = make_request(name, b"p", attempt, n=choices)
    return Job(
        request=request,
        kind="run",
        seq=attempt,
        layout=LAYOUT,
        chunks=[],
        full_blocks=0,
        times=Times(0.0),
        open_choices=set(range(choices)),
    )


def test_a_job_is_found_by_its_attempt_and_its_state() -> None:
    jobs, job = JobTable(), job_of("r", attempt=2)
    jobs.add_job(job, "parked")
    assert jobs.find(job.key) is jobs.find(job.key, "parked") is job
    assert jobs.find((RequestId("r"), 1)) is jobs.find(job.key, "compiling") is None
    assert jobs.find_running(job.request.id) is None
    jobs.set_state(job, "running")
    assert jobs.find_running(job.request.id) is job
    jobs.set_state(job, "ended")
    assert (jobs.find(job.key), len(jobs)) == (None, 0)


def test_a_job_that_ends_again_does_not_end_the_newer_attempt() -> None:
    jobs, old, new = JobTable(), job_of("r"), job_of("r", attempt=2)
    jobs.add_job(old, "running")
    jobs.set_state(old, "ended")
    jobs.add_job(new, "running")
    jobs.set_state(old, "ended")
    assert (list(jobs), jobs.freed) == ([new], 1)


def test_only_jobs_that_were_running_free_blocks_when_they_end() -> None:
    jobs = JobTable()
    for state in ("compiling", "parked", "running"):
        job = job_of(state)
        jobs.add_job(job, state)
        jobs.set_state(job, "ended")
    assert jobs.freed == 1


def test_the_newest_attempt_is_known_while_its_job_lives_and_for_a_while_after() -> None:
    jobs, living, ended = JobTable(), job_of("living", attempt=3), job_of("ended", attempt=5)
    jobs.add_job(living, "running")
    jobs.add_job(ended, "running")
    jobs.set_state(ended, "ended")
    assert jobs.newest_attempt(ended.request.id) == 5
    for number in range(REMEMBERED):
        job = job_of(f"r{number}")
        jobs.add_job(job, "parked")
        jobs.set_state(job, "ended")
    newest = [jobs.newest_attempt(RequestId(name)) for name in ("living", "ended", "unknown")]
    assert newest == [3, -1, -1]


def test_the_jobs_that_do_not_run_yet_are_counted_by_sequences_and_tokens() -> None:
    jobs = JobTable()
    compiling, parked, running = job_of("c", choices=2), job_of("p", choices=3), job_of("r")
    compiling.uncached = parked.uncached = 7  # parked jobs are counted by the Fetcher
    jobs.add_job(compiling, "compiling")
    jobs.add_job(parked, "parked")
    jobs.add_job(running, "running")
    assert (jobs.waiting_sequences, jobs.compiling_tokens) == (5, 7)

"""Runs many clients on a cluster while a breaker injects faults, and compares every answer.

In: a cluster, an undisturbed pool's answers. Out: Tally. The first wrong answer ends the run.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

from baton_protocol.ids import RequestId
from tests.support.clients.http import Json, hang_up
from tests.support.clients.mix import ClientCall, Mix, Result
from tests.support.clients.streams import StreamedAnswer, ask
from tests.support.faults.breaker import Breaker
from tests.support.pools.processes import Cluster

AROUND_S = 12.0  # faults up to this long before a wrong answer are described
PATIENCE_S = 240.0  # from one event of a stream to the next
PENALIZED_SHARE = 0.2
PENALTIES: Json = {
    **{"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    "logit_bias": {"69": 2, "101": -100},
}


@dataclass(frozen=True)
class KnownAnswer:
    """A request and its correct answer."""

    call: ClientCall
    answer: Result


@dataclass
class Tally:
    requests: int = 0
    left: int = 0  # the client hung up early
    tokens: int = 0
    worst_pause_s: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.requests} requests ({self.left} left early), {self.tokens} tokens, "
            f"worst pause {self.worst_pause_s:.1f} s"
        )


class Wrong(AssertionError):
    """An answer differs from the undisturbed one."""


class Clients:
    """`count` clients, each of which sends one request after another while the context lasts.

    `kinds` holds the same requests for each kind of node that may answer, with that kind's correct
    answers; `answers_by_kind` counts the answers per kind. `wrong` describes the first wrong
    answer.
    """

    def __init__(
        self,
        cluster: Cluster,
        kinds: Sequence[Sequence[KnownAnswer]],
        seed: int,
        count: int,
    ) -> None:
        self._cluster = cluster
        self._kinds = kinds
        self._seed = seed
        self._count = count
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(count)
        self._clients: list[Future[None]] = []
        self.tally = Tally()
        self.answers_by_kind = [0] * len(kinds)
        self.wrong: list[str] = []

    def __enter__(self) -> Clients:
        self._clients = [
            self._threads.submit(self._client, number) for number in range(self._count)
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._threads.shutdown()
        if error is None:
            for client in self._clients:
                client.result()
            if self.wrong:
                raise Wrong(self.wrong[0])

    def run_for(self, duration_s: float, breaker: Breaker) -> None:
        """Wait for `duration_s`, or until an answer is wrong or the breaker fails."""
        until = time.monotonic() + duration_s
        while time.monotonic() < until and not self.wrong and breaker.failure is None:
            time.sleep(0.05)

    def await_answers(self, kind: int = 0, count: int = 1) -> None:
        """Wait for `count` more answers of a kind, or for a wrong answer."""
        enough = self.answers_by_kind[kind] + count
        self._cluster.wait(lambda: self.wrong or self.answers_by_kind[kind] >= enough, "answer")

    def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        while not self._stop.is_set() and not self.wrong:
            index = rng.randrange(len(self._kinds[0]))
            call = self._kinds[0][index].call
            answer = send_call(self._cluster.url, call)
            problems = [problem_with(answer, known[index]) for known in self._kinds]
            with self._lock:
                self._record(answer, call)
                if all(problems):
                    self._last = answer
                    self.wrong.append("\nor\n".join(problems))
                else:
                    self.answers_by_kind[problems.index("")] += 1

    def _record(self, answer: StreamedAnswer, call: ClientCall) -> None:
        tally = self.tally
        tally.requests += 1
        tally.left += call.leave is not None
        tally.tokens += sum(len(choice.ids) for choice in answer.result.choices.values())
        tally.worst_pause_s = max(tally.worst_pause_s, answer.worst_pause_s)
        tally.statuses[answer.status] += 1

    def describe_failure(self, breaker: Breaker) -> str:
        """Describe the faults around the first wrong answer, and its request's placements."""
        began, ended = self._last.at[0], self._last.at[-1]
        events = [*breaker.timeline, (began, "request sent"), (ended, "ended")]
        placed = self._cluster.witness.of(RequestId(self._last.request))
        events += [
            (job.at, f"attempt {job.attempt}: {job.role} job to {job.node}") for job in placed
        ]
        return "\n".join(
            f"{at - breaker.began:8.2f}  {what}"
            for at, what in sorted(events)
            if began - AROUND_S <= at <= ended + 1.0
        )


def send_call(url: str, call: ClientCall) -> StreamedAnswer:
    """Send one request as its client does: streamed or not, perhaps hanging up early."""
    body: Json = dict(call.body)
    if call.stream or call.leave is not None:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    counts: Counter[str] = Counter()

    def should_stay(answer: StreamedAnswer) -> bool:
        counts["events"] += 1
        return call.leave is None or counts["events"] < call.leave

    if call.leave == 0:
        hang_up(url, call.path, body, after_s=0.01)
        return StreamedAnswer()
    return ask(url, call.path, body, should_stay, PATIENCE_S)


def problem_with(answer: StreamedAnswer, known: KnownAnswer) -> str:
    """Describe what is wrong with an answer, "" if it is correct."""
    label = f"request {answer.request} {known.call}\ngot {answer}\nexpected {known.answer}"
    if answer.error is not None or (answer.status != 200 and known.call.leave != 0):
        return f"{answer.status} {answer.error}: {label}"
    if known.call.leave is not None:
        try:
            answer.result.check_begins(known.answer)
        except AssertionError:
            return f"not the beginning: {label}"
        return ""
    if not answer.whole:
        return f"no end: {label}"
    return "" if answer.result == known.answer else f"not the answer: {label}"


def known_answers(
    undisturbed: str,
    seed: int,
    count: int,
) -> list[KnownAnswer]:
    """Draw `count` requests of the mix, and pair each with the undisturbed pool's answer."""
    rng = random.Random(seed)
    mix = Mix(rng)
    calls = [mix.request() for _ in range(count)]
    for call in calls:
        if rng.random() < PENALIZED_SHARE:
            call.body.update(PENALTIES)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda call: ask(undisturbed, call.path, call.body), calls))
    for call, answer in zip(calls, answers, strict=True):
        assert answer.status == 200, (call, answer)
    return [
        KnownAnswer(*pair)
        for pair in zip(calls, (answer.result for answer in answers), strict=True)
    ]

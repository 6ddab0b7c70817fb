"""Runs many clients on a cluster while a breaker injects faults, and compares every answer.

In: a cluster, a calm pool's answers. Out: Tally. The first wrong answer ends the run.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

from baton_protocol.ids import RequestId
from tests.support.clients.http import Json, hang_up
from tests.support.clients.mix import ClientCall, Mix, Result
from tests.support.clients.streams import StreamedAnswer, ask
from tests.support.faults.breaker import Breaker
from tests.support.pools.processes import Cluster

AROUND_S = 12.0
PATIENCE_S = 240.0  # from one event of a stream to the next
PENALIZED_SHARE = 0.2
PENALTIES: Json = {
    **{"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    "logit_bias": {"69": 2, "101": -100},
}


@dataclass(frozen=True)
class Known:
    """A request and its correct answer."""

    asked: ClientCall
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
    answers; `by` counts the answers per kind. `as_good` may accept a different answer. `wrong`
    describes the first wrong answer.
    """

    def __init__(
        self,
        cluster: Cluster,
        kinds: Sequence[Sequence[Known]],
        seed: int,
        count: int,
        as_good: Callable[[StreamedAnswer, Known], bool] = lambda told, known: False,
    ) -> None:
        self._as_good = as_good
        self._cluster = cluster
        self._kinds = kinds
        self._seed = seed
        self._count = count
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(count)
        self._clients: list[Future[None]] = []
        self.tally = Tally()
        self.by = [0] * len(kinds)
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

    def go_on(self, duration_s: float, breaker: Breaker) -> None:
        """Wait for `duration_s`, or until an answer is wrong or the breaker fails."""
        until = time.monotonic() + duration_s
        while time.monotonic() < until and not self.wrong and breaker.failure is None:
            time.sleep(0.05)

    def await_answers(self, kind: int = 0, count: int = 1) -> None:
        """Wait for `count` more answers of a kind, or for a wrong answer."""
        enough = self.by[kind] + count
        self._cluster.wait(lambda: self.wrong or self.by[kind] >= enough, "answer")

    def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        while not self._stop.is_set() and not self.wrong:
            which = rng.randrange(len(self._kinds[0]))
            asked = self._kinds[0][which].asked
            told = ask_as(self._cluster.url, asked)
            problems = [self._problem(told, known[which]) for known in self._kinds]
            with self._lock:
                self._count_in(told, asked)
                if all(problems):
                    self._last = told
                    self.wrong.append("\nor\n".join(problems))
                else:
                    self.by[problems.index("")] += 1

    def _problem(self, told: StreamedAnswer, known: Known) -> str:
        problem = problem_with(told, known)
        return "" if problem and self._as_good(told, known) else problem

    def _count_in(self, told: StreamedAnswer, asked: ClientCall) -> None:
        tally = self.tally
        tally.requests += 1
        tally.left += asked.leave is not None
        tally.tokens += sum(len(choice.ids) for choice in told.result.choices.values())
        tally.worst_pause_s = max(tally.worst_pause_s, told.worst_pause_s)
        tally.statuses[told.status] += 1

    def story(self, breaker: Breaker) -> str:
        """Describe the faults around the first wrong answer, and its request's placements."""
        began, ended = self._last.at[0], self._last.at[-1]
        seen = [*breaker.timeline, (began, "asked"), (ended, "ended")]
        placed = self._cluster.witness.of(RequestId(self._last.request))
        seen += [(one.at, f"attempt {one.attempt}: {one.role} job to {one.node}") for one in placed]
        return "\n".join(
            f"{at - breaker.began:8.2f}  {what}"
            for at, what in sorted(seen)
            if began - AROUND_S <= at <= ended + 1.0
        )


def ask_as(url: str, asked: ClientCall) -> StreamedAnswer:
    """Send one request as its client does: streamed or not, perhaps hanging up early."""
    body: Json = dict(asked.body)
    if asked.stream or asked.leave is not None:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    heard: Counter[str] = Counter()

    def stays(told: StreamedAnswer) -> bool:
        heard["events"] += 1
        return asked.leave is None or heard["events"] < asked.leave

    if asked.leave == 0:
        hang_up(url, asked.path, body, after_s=0.01)
        return StreamedAnswer()
    return ask(url, asked.path, body, stays, PATIENCE_S)


def problem_with(told: StreamedAnswer, known: Known) -> str:
    """Describe what is wrong with an answer, "" if it is correct."""
    label = f"request {told.request} {known.asked}\ngot {told}\nwanted {known.answer}"
    if told.error is not None or (told.status != 200 and known.asked.leave != 0):
        return f"{told.status} {told.error}: {label}"
    if known.asked.leave is not None:
        try:
            told.result.check_begins(known.answer)
        except AssertionError:
            return f"not the beginning: {label}"
        return ""
    if not told.whole:
        return f"no end: {label}"
    return "" if told.result == known.answer else f"not the answer: {label}"


def known_answers(
    calm: str, seed: int, count: int, wanted: Callable[[ClientCall], bool] = lambda asked: True
) -> list[Known]:
    """Draw `count` requests of the mix, keep those that are `wanted`, and pair each with the calm
    pool's answer."""
    rng = random.Random(seed)
    mix = Mix(rng)
    asked = [one for _ in range(count) if wanted(one := mix.request())]
    for one in asked:
        if rng.random() < PENALIZED_SHARE:
            one.body.update(PENALTIES)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda one: ask(calm, one.path, one.body), asked))
    for one, answer in zip(asked, answers, strict=True):
        assert answer.status == 200, (one, answer)
    return [Known(*pair) for pair in zip(asked, (told.result for told in answers), strict=True)]

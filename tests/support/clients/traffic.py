"""Clients that keep a pool busy with mixed requests until they are stopped.

In: a pool's URL, a seed. Out: Done, and the first wrong answer. The clients send three kinds of
requests: the random mix (new prompts, shared prefixes, several choices, streams, clients that
leave); conversations, in which each turn's prompt repeats all earlier turns; and a refrain, a few
requests that are repeated and whose answers must not change.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from tests.support.clients.mix import COMPLETIONS, END_ID, FIRST_ID, ClientCall, Mix
from tests.support.clients.streams import StreamedAnswer
from tests.support.faults.chaos_run import KnownAnswer, problem_with, send_call

TALK_SHARE, REFRAIN_SHARE = 0.25, 0.2
MOST_TURNS, LONGEST_TALK = 5, 550
REFRAIN = 12
# Limit for all clients together: the state that a pool keeps for a while grows with the rate. A
# conversation counts once, and its turns follow each other directly, so this is about 10
# requests/s.
CALLS_PER_S = 6.0


@dataclass
class Done:
    requests: int = 0
    left: int = 0  # the client hung up
    turns: int = 0  # turns of conversations after the first
    repeated: int = 0
    tokens: int = 0
    cached: int = 0  # prompt tokens that came from a cache

    def __str__(self) -> str:
        return (
            f"{self.requests} requests ({self.left} left early, {self.turns} further turns, "
            f"{self.repeated} repeated), {self.tokens} tokens generated, {self.cached} cached"
        )


class Traffic:
    """`with Traffic(url, seed, clients) as traffic:` sends requests until the block ends; `check()`
    raises for a wrong answer. With `exact`, repeated answers of the refrain must equal the first.
    """

    def __init__(self, url: str, seed: int, clients: int, *, exact: bool) -> None:
        self.done = Done()
        self._url = url
        self._exact = exact
        self._mix = Mix(random.Random(f"mix {seed}"))
        self._refrain = [self._complete_call() for _ in range(REFRAIN)]
        self._answers: dict[int, KnownAnswer] = {}
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._wrong: list[str] = []
        self._threads = [
            threading.Thread(target=self._client, args=(random.Random(f"{seed}/{number}"),))
            for number in range(clients)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        assert self._wrong == [], self._wrong[0]

    def run_for(self, duration_s: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Let the clients run for `duration_s`, or until `enough()`. Raise AssertionError for a
        wrong answer."""
        deadline = time.monotonic() + duration_s
        while time.monotonic() < deadline and not enough():
            self.check()
            time.sleep(0.2)

    # --- one client -------------------------------------------------------------------------------

    def _client(self, rng: random.Random) -> None:
        due = time.monotonic()
        rate = CALLS_PER_S / len(self._threads)
        while True:
            due = max(due + rng.expovariate(rate), time.monotonic())
            if self._ending.wait(due - time.monotonic()):
                return
            try:
                self._send_something(rng)
            except Exception as error:  # otherwise lost in this thread
                self._wrong.append(f"a client failed: {error!r}")
            if self._wrong:
                return

    def _send_something(self, rng: random.Random) -> None:
        kind = rng.random()
        if kind < TALK_SHARE:
            self._talk(rng)
        elif kind < TALK_SHARE + REFRAIN_SHARE:
            self._repeat(rng.randrange(REFRAIN))
        else:
            with self._lock:
                call = self._mix.request()
            self._send(call)

    def _send(self, call: ClientCall) -> StreamedAnswer:
        answer = send_call(self._url, call)
        done, result = self.done, answer.result
        with self._lock:
            done.requests += 1
            done.left += call.leave is not None
            done.tokens += sum(len(choice.ids) for choice in result.choices.values())
            done.cached += answer.cached or 0
        if call.leave is None and (answer.status != 200 or answer.error or not answer.whole):
            self._wrong.append(f"{call}\ngot {answer}")
        return answer

    def _talk(self, rng: random.Random) -> None:
        """Hold a conversation; each turn's prompt repeats all earlier prompts and answers."""
        ids: list[int] = []
        for turn in range(rng.randint(2, MOST_TURNS)):
            ids += [rng.randrange(FIRST_ID, END_ID) for _ in range(rng.randint(10, 120))]
            if len(ids) > LONGEST_TALK or self._ending.is_set():
                return
            fields = {"max_tokens": rng.randint(1, 40), "ignore_eos": True, "temperature": 0}
            body = {"prompt": list(ids), "return_token_ids": True, **fields}
            answer = self._send(ClientCall(COMPLETIONS, body, stream=rng.random() < 0.5))
            if self._wrong:
                return
            ids += answer.result.choices[0].ids
            self.done.turns += turn > 0

    def _repeat(self, number: int) -> None:
        call = self._refrain[number]
        answer = self._send(call)
        known = self._answers.setdefault(number, KnownAnswer(call, answer.result))
        self.done.repeated += 1
        if self._exact and (problem := problem_with(answer, known)):
            self._wrong.append(problem)

    def _complete_call(self) -> ClientCall:
        """A request of the mix whose client does not hang up early."""
        while (call := self._mix.request()).leave is not None:
            pass
        return call

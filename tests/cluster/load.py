"""Clients that stream from a pool while its nodes come and go; each answer is checked.

In: a pool's address, and the shape of the requests that each client sends one after another. Out:
Tally: the numbers of streams and errors, and the longest waits. No prompt is sent twice, so the
nodes compute each one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from threading import Event

from tests.support.clients.http import Json
from tests.support.clients.mix import Result
from tests.support.clients.streams import StreamedAnswer, ask
from tests.support.kubernetes.streams import PROMPT_TOKENS, STREAM_S, Question, completion

CHECKING_CLIENTS = 8
AFTER_ERROR_S = 0.2
# Clients end after this time, even if their test hangs.
LONGEST_S = 1800.0
KINDS: tuple[Json, ...] = ({"temperature": 0}, {"temperature": 1.0, "seed": 3})


@dataclass(frozen=True)
class Shape:
    """A load's shape: the number of `clients`, and each request's `prompt` and output `tokens`.
    Every other request is greedy."""

    clients: int = 6
    prompt: int = PROMPT_TOKENS
    tokens: int = 160

    def question(self, number: int) -> Question:
        """The request with this number: equal numbers give equal requests."""
        fields = {"max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        kind = KINDS[number % 2]
        return completion(number, prompt_tokens=self.prompt, **fields, **kind)


@dataclass
class Answer:
    """`first_s` is the time to the first token, `pause_s` the longest wait between two events with
    tokens. Comment lines of the stream do not count."""

    question: Question
    streamed: StreamedAnswer = field(default_factory=StreamedAnswer)
    first_s: float = 0.0
    pause_s: float = 0.0

    @property
    def code(self) -> str:
        """The code of the error that ended the stream; "" if the answer is complete."""
        if self.streamed.error is not None:
            return str(self.streamed.error.get("code") or self.streamed.error.get("type"))
        return "" if self.streamed.status == 200 and self.streamed.whole else "cut"


@dataclass(frozen=True, kw_only=True)
class Tally:
    """A load's totals: `errors` by code, and the longest `first_s` and `pause_s`."""

    streams: int
    tokens: int
    first_s: float
    pause_s: float
    errors: Mapping[str, int]

    def __str__(self) -> str:
        errors = ", ".join(f"{count} {code}" for code, count in self.errors.items()) or "0 errors"
        return (
            f"{self.streams} streams, {self.tokens} tokens, {errors}; slowest first token "
            f"{self.first_s:.1f} s, slowest pause {self.pause_s:.1f} s"
        )


class Load:
    """`with Load(url, 1000) as load:` sends requests until the block ends, then waits for the last
    answers. Loads whose first numbers are far apart share no prompts."""

    def __init__(self, url: str, first: int, shape: Shape | None = None) -> None:
        self._url = url
        self._shape = shape or Shape()
        self._first = first
        self._received = [0] * self._shape.clients
        self._answers: list[Answer] = []
        self._stop = Event()
        self._threads = ThreadPoolExecutor(self._shape.clients)
        self._until = 0.0

    def __enter__(self) -> Load:
        self._until = time.monotonic() + LONGEST_S
        self._clients = [
            self._threads.submit(self._client, number) for number in range(self._shape.clients)
        ]
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop.set()
        self._threads.shutdown()
        if error is not None:
            error.add_note(f"errors that the clients got: {self.errors()}")

    def wait_tokens(self, least: int = 1) -> None:
        """Wait until every client has received `least` more tokens."""
        start, until = list(self._received), time.monotonic() + STREAM_S
        while not all(
            now - before >= least for before, now in zip(start, self._received, strict=True)
        ):
            assert time.monotonic() < until, f"tokens by client: {start}, later {self._received}"
            self.check_running()
            time.sleep(0.02)

    def check_running(self) -> None:
        """Raise AssertionError if a client has ended."""
        assert not any(client.done() for client in self._clients), (
            "a client has ended before its time"
        )

    def requests(self) -> list[str]:
        """The ids of all answered requests."""
        return [answer.streamed.request for answer in self._answers if answer.streamed.request]

    def errors(self) -> list[Json]:
        """The errors that ended answers so far."""
        return [
            answer.streamed.error or {"code": answer.code}
            for answer in self._answers
            if answer.code
        ]

    def check(
        self,
        references: Sequence[str],
        expected_errors: Collection[str] = (),
    ) -> Tally:
        """Check all answers after the load's end. Each must equal an answer of one of the pools at
        `references`, or begin one and end with one of `expected_errors`."""
        for one in self._clients:
            one.result()
        with ThreadPoolExecutor(CHECKING_CLIENTS) as threads:
            checks = threads.map(
                lambda one: check_answer(one, references, expected_errors), self._answers
            )
            assert list(checks), "no client has sent a request"
        return Tally(
            streams=len(self._answers),
            tokens=sum(_tokens(answer.streamed.result) for answer in self._answers),
            first_s=max(one.first_s for one in self._answers),
            pause_s=max(one.pause_s for one in self._answers),
            errors=Counter(one.code for one in self._answers if one.code),
        )

    def _client(self, number: int) -> None:
        for request_number in count(self._first + number, self._shape.clients):
            if self._stop.is_set() or time.monotonic() > self._until:
                return
            answer = Answer(self._shape.question(request_number))
            self._send(answer, number)
            self._answers.append(answer)
            if answer.code:
                self._stop.wait(AFTER_ERROR_S)

    def _send(self, answer: Answer, number: int) -> None:
        sent = last = time.monotonic()
        tokens = 0

        def on_event(streamed: StreamedAnswer) -> bool:
            nonlocal last, tokens
            now, received = time.monotonic(), _tokens(streamed.result)
            if received == tokens:
                return True
            if not tokens:
                answer.first_s = now - sent
            else:
                answer.pause_s = max(answer.pause_s, now - last)
            self._received[number] += received - tokens
            last, tokens = now, received
            return True

        question = answer.question
        answer.streamed = ask(self._url, question.path, question.body, on_event, STREAM_S)


def _expected_result(url: str, question: Question) -> Result:
    answer = ask(url, question.path, {**question.body, "stream": False})
    assert answer.status == 200, answer
    return answer.result


def check_answer(
    answer: Answer, references: Sequence[str], expected_errors: Collection[str]
) -> None:
    """Check one answer, as Load.check does with each."""
    streamed = answer.streamed
    label = f"request {streamed.request}: {streamed.status} {streamed.error}, {streamed.result}"
    assert answer.code in ("", *expected_errors), f"{answer.code}: {label}"
    expected = []
    for url in references:
        expected.append(_expected_result(url, answer.question))
        if _fits(answer, expected[-1]):
            return
    raise AssertionError(f"{label}, not {expected}")


def _fits(answer: Answer, expected: Result) -> bool:
    result = answer.streamed.result
    if answer.code:
        return _is_beginning(result, expected)
    return result.choices == expected.choices


def _is_beginning(result: Result, whole: Result) -> bool:
    try:
        result.check_begins(whole)
    except AssertionError:
        return False
    return True


def _tokens(result: Result) -> int:
    return sum(len(choice.ids) for choice in result.choices.values())

"""Clients on a pool while its nodes come and go; each of their answers is compared.

In: a pool's address, and what each client asks for, one stream after another. Out: Tally: what was
asked, what failed, and the longest waits. No prompt is asked twice, so that all are computed anew.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from threading import Event

from tests.support.clients.http import Json
from tests.support.clients.mix import Result
from tests.support.clients.streams import StreamedAnswer, ask
from tests.support.kubernetes.streams import PROMPT_TOKENS, STREAM_S, Question, completion

CALM_CLIENTS = 8
AFTER_ERROR_S = 0.2
# Whatever a test waits for in vain, its clients end.
LONGEST_S = 1800.0
KINDS: tuple[Json, ...] = ({"temperature": 0}, {"temperature": 1.0, "seed": 3})


@dataclass(frozen=True)
class Shape:
    """`clients` at once; each of their requests has so many tokens. Half of them are greedy, or
    all."""

    clients: int = 6
    prompt: int = PROMPT_TOKENS
    tokens: int = 160
    greedy: bool = False

    def question(self, number: int) -> Question:
        """The same for the same number."""
        fields = {"max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        kind = KINDS[0 if self.greedy else number % 2]
        return completion(number, prompt_tokens=self.prompt, **fields, **kind)


@dataclass
class Answer:
    """`first_s` is until the first token, `pause_s` the longest wait between two events that bring
    some: comment lines are no sign of progress."""

    question: Question
    told: StreamedAnswer = field(default_factory=StreamedAnswer)
    first_s: float = 0.0
    pause_s: float = 0.0

    @property
    def code(self) -> str:
        """Of the error that it ended with; "" where it is whole."""
        if self.told.error is not None:
            return str(self.told.error.get("code") or self.told.error.get("type"))
        return "" if self.told.status == 200 and self.told.whole else "cut"


@dataclass(frozen=True, kw_only=True)
class Tally:
    """`errors` by code, `first_s` and `pause_s` the longest ones."""

    streams: int
    tokens: int
    first_s: float
    pause_s: float
    errors: Mapping[str, int]

    def __str__(self) -> str:
        errors = ", ".join(f"{many} {code}" for code, many in self.errors.items()) or "0 errors"
        return (
            f"{self.streams} streams, {self.tokens} tokens, {errors}; slowest first token "
            f"{self.first_s:.1f} s, slowest pause {self.pause_s:.1f} s"
        )


AsGood = Callable[[Question, Result, Result], bool]


def never(question: Question, right: Result, told: Result) -> bool:
    return False


class Load:
    """`with Load(url, 1000) as load:` asks until it is left, which waits for the last answers.
    Loads with numbers that are far apart share no prompts."""

    def __init__(self, url: str, first: int, shape: Shape | None = None) -> None:
        self._url = url
        self._shape = shape or Shape()
        self._first = first
        self._heard = [0] * self._shape.clients
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
        """Until every client has got so many more."""
        begun, until = list(self._heard), time.monotonic() + STREAM_S
        while not all(
            now - before >= least for before, now in zip(begun, self._heard, strict=True)
        ):
            assert time.monotonic() < until, f"tokens by client: {begun}, later {self._heard}"
            self.check_runs()
            time.sleep(0.02)

    def check_runs(self) -> None:
        """Raise AssertionError where a client asks no more."""
        assert not any(one.done() for one in self._clients), "a client has ended before its time"

    def requests(self) -> list[str]:
        """The ids of all that were answered."""
        return [one.told.request for one in self._answers if one.told.request]

    def errors(self) -> list[Json]:
        """What the answers up to now ended with, where they did not end well."""
        return [one.told.error or {"code": one.code} for one in self._answers if one.code]

    def check(
        self, calm: Sequence[str], stated: Collection[str] = (), as_good: AsGood = never
    ) -> Tally:
        """After its end: each answer must be one of those that the pools at these addresses give,
        or the beginning of one and then an error with a stated code; `as_good` may accept another.
        Raise AssertionError."""
        for one in self._clients:
            one.result()
        with ThreadPoolExecutor(CALM_CLIENTS) as threads:
            checks = threads.map(
                lambda one: check_answer(one, calm, stated, as_good), self._answers
            )
            assert list(checks), "nobody has asked for anything"
        return Tally(
            streams=len(self._answers),
            tokens=sum(_tokens(one.told.result) for one in self._answers),
            first_s=max(one.first_s for one in self._answers),
            pause_s=max(one.pause_s for one in self._answers),
            errors=Counter(one.code for one in self._answers if one.code),
        )

    def _client(self, number: int) -> None:
        for one in count(self._first + number, self._shape.clients):
            if self._stop.is_set() or time.monotonic() > self._until:
                return
            answer = Answer(self._shape.question(one))
            self._ask(answer, number)
            self._answers.append(answer)
            if answer.code:
                self._stop.wait(AFTER_ERROR_S)

    def _ask(self, answer: Answer, number: int) -> None:
        asked = last = time.monotonic()
        tokens = 0

        def heard(told: StreamedAnswer) -> bool:
            nonlocal last, tokens
            now, come = time.monotonic(), _tokens(told.result)
            if come == tokens:
                return True
            if not tokens:
                answer.first_s = now - asked
            else:
                answer.pause_s = max(answer.pause_s, now - last)
            self._heard[number] += come - tokens
            last, tokens = now, come
            return True

        question = answer.question
        answer.told = ask(self._url, question.path, question.body, heard, STREAM_S)


def _right(url: str, question: Question) -> Result:
    told = ask(url, question.path, {**question.body, "stream": False})
    assert told.status == 200, told
    return told.result


def check_answer(
    answer: Answer, calm: Sequence[str], stated: Collection[str], as_good: AsGood
) -> None:
    """As Load.check does it with each."""
    told = answer.told
    label = f"request {told.request}: {told.status} {told.error}, {told.result}"
    assert answer.code in ("", *stated), f"{answer.code}: {label}"
    rights = []
    for url in calm:
        rights.append(_right(url, answer.question))
        if _fits(answer, rights[-1], as_good):
            return
    raise AssertionError(f"{label}, not {rights}")


def _fits(answer: Answer, right: Result, as_good: AsGood) -> bool:
    result = answer.told.result
    if answer.code:
        return _begins(result, right)
    return result.choices == right.choices or as_good(answer.question, right, result)


def _begins(result: Result, whole: Result) -> bool:
    try:
        result.check_begins(whole)
    except AssertionError:
        return False
    return True


def _tokens(result: Result) -> int:
    return sum(len(said.ids) for said in result.choices.values())

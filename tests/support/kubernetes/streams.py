"""Sends the same questions to a pool on a cluster and to `baton up`, with or without faults.

In: a URL and questions whose answers depend only on the question. Out: the official client's
answers, or concurrent streams and their answers; and the answers of `baton up`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai

from tests.support.clients.http import Json
from tests.support.clients.mix import (
    CHAT,
    COMPLETIONS,
    END_ID,
    FIRST_ID,
    ChoiceResult,
    Result,
    result_of,
)
from tests.support.clients.streams import StreamedAnswer, ask
from tests.support.pools.baton_up import Pool

CLIENT_S = 240.0
STREAM_S = 240.0
# In every tokenizer of these tests, longer than the 128 tokens below which the router does not hand
# off.
LONG_TEXT = "the prefill node computes the prompt and the decode node generates the answer; " * 8
PROMPT_TOKENS = 200
# Fields that the official client has no parameters for.
EXTRA = ("return_token_ids", "ignore_eos")


@dataclass(frozen=True)
class Question:
    path: str
    body: Json


def completion(number: int, *, prompt_tokens: int = PROMPT_TOKENS, **fields: Any) -> Question:
    """A completion whose prompt depends on `number`, of ids that every tokenizer has."""
    rng = random.Random(number)
    prompt = [rng.randrange(FIRST_ID, END_ID) for _ in range(prompt_tokens)]
    return Question(COMPLETIONS, {"prompt": prompt, "return_token_ids": True, **fields})


def chat(text: str, **fields: Any) -> Question:
    messages = [{"role": "user", "content": f"{text}: {LONG_TEXT}"}]
    return Question(CHAT, {"messages": messages, "return_token_ids": True, **fields})


def few_questions() -> list[Question]:
    """Chat and completions, whole and streamed, greedy and seeded, one choice and two."""
    greedy: Json = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    seeded: Json = {"temperature": 1.0, "seed": 11, "max_tokens": 24}
    return [
        completion(1, **greedy),
        completion(2, **seeded, n=2, stream=True),
        chat("once", **greedy, stream=True),
        chat("twice", **seeded),
    ]


def long_streams(count: int, tokens: int, first: int = 0) -> list[Question]:
    """Streams of `tokens` tokens each, half of them greedy. Their prompts are numbered from
    `first`; prompts of other numbers share no cached prefix with them."""
    kinds: list[Json] = [{"temperature": 0}, {"temperature": 1.0, "seed": 3}]
    fields: Json = {"max_tokens": tokens, "ignore_eos": True, "stream": True}
    return [completion(first + i, **fields, **kinds[i % 2]) for i in range(count)]


# --- without a fault ------------------------------------------------------------------------------


def answers_of(url: str, questions: Sequence[Question]) -> list[dict[int, ChoiceResult]]:
    """A plain client's answers to the questions, sent one after the other."""
    return [_choices_of(ask(url, one.path, one.body, timeout_s=STREAM_S)) for one in questions]


def answers_of_baton_up(
    flags: Sequence[str], questions: Sequence[Question]
) -> list[dict[int, ChoiceResult]]:
    with Pool(flags) as pool:
        return answers_of(pool.url, questions)


@dataclass(frozen=True)
class ClientAnswer:
    choices: dict[int, ChoiceResult]
    placement: str


def ask_by_openai(url: str, question: Question) -> ClientAnswer:
    """Send a question with the official client, which must parse the whole answer."""
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=CLIENT_S
    ) as client:
        raw: Any = client.chat.completions if question.path == CHAT else client.completions
        extra = {name: question.body[name] for name in EXTRA if name in question.body}
        known = {name: value for name, value in question.body.items() if name not in EXTRA}
        [model] = [one.id for one in client.models.list()]
        answer = raw.with_raw_response.create(model=model, extra_body=extra, **known)
        parsed = answer.parse()
        bodies = parsed if question.body.get("stream") else [parsed]
        result = result_of(body.model_dump() for body in bodies)
        return ClientAnswer(result.choices, answer.headers["x-baton-placement"])


# --- with a fault ---------------------------------------------------------------------------------


class Streams:
    """`with Streams(url, questions) as running:` sends all concurrently; leaving waits for all."""

    def __init__(self, url: str, questions: Sequence[Question]) -> None:
        self._url = url
        self._questions = list(questions)
        self._token_counts = [0] * len(self._questions)
        self._answers: list[Future[StreamedAnswer]] = []
        self._threads = ThreadPoolExecutor(len(self._questions))

    def __enter__(self) -> Streams:
        self._answers = [self._threads.submit(self._ask, i) for i in range(len(self._questions))]
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def _ask(self, index: int) -> StreamedAnswer:
        def on_event(answer: StreamedAnswer) -> bool:
            self._token_counts[index] = _tokens(answer.result)
            return True

        question = self._questions[index]
        return ask(self._url, question.path, question.body, on_event, STREAM_S)

    def wait_tokens(self, least: int) -> None:
        """Wait until each stream has had `least` tokens; early ones may have ended by then."""
        self._wait(lambda: min(self._token_counts) >= least, f"each have {least} tokens")

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + STREAM_S
        while not done():
            problems = [one.result().error for one in self._answers if one.done()]
            assert not any(problems), problems
            assert time.monotonic() < deadline, f"streams did not {what}: {self._token_counts}"
            time.sleep(0.02)

    def running(self) -> bool:
        return not all(one.done() for one in self._answers)

    def answers(self) -> list[dict[int, ChoiceResult]]:
        """Return all answers; raise AssertionError for an incomplete one."""
        return [_choices_of(one.result()) for one in self._answers]

    def requests(self) -> list[str]:
        """The requests' ids, as in the router's log."""
        return [one.result().request for one in self._answers]

    def worst_pause_s(self) -> float:
        return max(one.result().worst_pause_s for one in self._answers)


def _tokens(result: Result) -> int:
    return sum(len(choice.ids) for choice in result.choices.values())


def _choices_of(answer: StreamedAnswer) -> dict[int, ChoiceResult]:
    assert answer.status == 200, answer
    assert answer.error is None, answer.error
    assert answer.whole, f"the stream broke off after {_tokens(answer.result)} tokens"
    return answer.result.choices

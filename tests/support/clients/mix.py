"""A random mix of requests for soak tests on the simulated engine, and comparable results.

In: a seeded random generator. Out: request bodies of all kinds whose answers depend only on the
body (greedy, or with a seed), and Result: the part of an answer that must be the same for every
pool and every way of delivery.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.support.clients.http import Json

LONGEST_PROMPT = 600
MOST_TOKENS = 48
# The ids that the sim engine's byte tokenizer decodes to printable ASCII.
FIRST_ID, END_ID = 32, 127
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class ClientCall:
    """One request. `leave` is the number of events after which the client hangs up (0: before the
    first), or None."""

    path: str
    body: Json
    stream: bool
    leave: int | None = None


@dataclass
class ChoiceResult:
    """The comparable part of one choice. `calls` are names and arguments of tool calls; their ids
    differ between requests and do not compare."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list, compare=False)
    finish: str | None = None
    stop: str | int | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None

    def add_calls(self, calls: Iterable[Json]) -> None:
        """Add the calls of an answer, or the pieces of calls of one event."""
        for call in calls:
            if "id" in call:
                assert call.get("index", len(self.calls)) == len(self.calls), call
                self.calls.append((call["function"]["name"], ""))
                self.call_ids.append(call["id"])
            name, arguments = self.calls[-1]
            assert call.get("index", len(self.calls) - 1) == len(self.calls) - 1, call
            self.calls[-1] = name, arguments + call["function"]["arguments"]


@dataclass
class Result:
    choices: dict[int, ChoiceResult] = field(default_factory=dict)
    usage: tuple[int, int, int] | None = None

    def add(self, body: Json) -> None:
        """Add an answer, or one event of a stream."""
        for choice in body["choices"]:
            result = self.choices.setdefault(choice["index"], ChoiceResult())
            message = choice.get("message") or choice.get("delta")
            text = choice.get("text") if message is None else message.get("content")
            result.text += text or ""
            if message is not None:
                result.reasoning += message.get("reasoning") or ""
                result.add_calls(message.get("tool_calls") or [])
            result.ids += choice.get("token_ids") or []
            result.logprobs += _positions(choice.get("logprobs"))
            result.prompt_logprobs = choice.get("prompt_logprobs", result.prompt_logprobs)
            if choice["finish_reason"] is not None:
                assert result.finish is None, f"choice {choice['index']} finished twice"
                result.finish, result.stop = choice["finish_reason"], choice.get("stop_reason")
        if usage := body.get("usage"):
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            self.usage = (usage[names[0]], usage[names[1]], usage[names[2]])

    def check_begins(self, whole: Result) -> None:
        """Raise AssertionError unless this result is a prefix of `whole`."""
        for index, result in self.choices.items():
            full = whole.choices[index]
            assert result.ids == full.ids[: len(result.ids)], f"choice {index}: {result} of {full}"
            assert full.text.startswith(result.text), f"choice {index}: {result} of {full}"


def result_of(bodies: Iterable[Json]) -> Result:
    result = Result()
    for body in bodies:
        result.add(body)
    return result


def _positions(logprobs: Json | None) -> list[Any]:
    """The log-probabilities of each position, in either endpoint's format."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[name] for name in names), strict=True))


class Mix:
    """Draws random requests. 40 % of the prompts begin with one of four shared prefixes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._prefixes = [self._ids(length) for length in (40, 160, 352, 520)]

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(FIRST_ID, END_ID) for _ in range(count)]

    def _prompt(self) -> list[int]:
        rng = self._rng
        if rng.random() < 0.4:
            prefix = rng.choice(self._prefixes)
            return [*prefix, *self._ids(rng.randint(1, LONGEST_PROMPT - len(prefix)))]
        longest = rng.choice((1, 17, 33, 200, LONGEST_PROMPT))
        return self._ids(rng.randint(1, longest))

    def _sampling(self) -> Json:
        rng = self._rng
        fields: Json = {"max_tokens": rng.choice((1, 2, rng.randint(1, MOST_TOKENS), MOST_TOKENS))}
        if rng.random() < 0.4:
            fields["temperature"] = 0
        else:
            fields |= {"temperature": 1.0, "seed": rng.getrandbits(32)}
        if rng.random() < 0.4:
            fields["n"] = rng.randint(2, 4)
        if rng.random() < 0.3:
            stops = [bytes(self._ids(rng.randint(1, 2))).decode() for _ in range(rng.randint(1, 4))]
            fields |= {"stop": stops, "include_stop_str_in_output": rng.random() < 0.5}
        if rng.random() < 0.3:
            fields["stop_token_ids"] = self._ids(rng.randint(1, 4))
        if rng.random() < 0.3:
            fields["min_tokens"] = rng.randint(0, fields["max_tokens"])
        if rng.random() < 0.3:
            fields["ignore_eos"] = True
        return fields

    def request(self) -> ClientCall:
        rng = self._rng
        body = {**self._sampling(), "return_token_ids": True}
        logprobs = rng.random() < 0.3
        if rng.random() < 0.2:
            path = CHAT
            text = bytes(self._prompt()).decode()
            body["messages"] = [{"role": "user", "content": text}]
            if logprobs:
                body |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
        else:
            path = COMPLETIONS
            prompt = self._prompt()
            body["prompt"] = bytes(prompt).decode() if rng.random() < 0.5 else prompt
            if logprobs:
                body["logprobs"] = rng.randint(1, 5)
        stream = rng.random() < 0.6
        leave = None
        if rng.random() < 0.25:
            leave = rng.randint(0, 8)
            body["max_tokens"] = MOST_TOKENS
        return ClientCall(path, body, stream, leave)

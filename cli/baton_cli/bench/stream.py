"""Reads a streamed answer (server-sent events) and records when tokens arrived.

In: bytes as they arrive, and the time. Out: a RequestOutcome. Does no I/O and reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

DONE = b"[DONE]"


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of one request; times are in seconds.

    start    since the run began
    ttft     from `start` to the first chunk with tokens
    gaps     between two consecutive chunks with tokens
    latency  from `start` to the last chunk of a choice
    cached   prompt tokens that the server took from a cache, None if it does not report them
    error    a short reason, "" on success
    """

    start: float
    requested_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    error: str = ""
    cached: int | None = None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def speaks(self) -> bool:
        """Whether the choice carries tokens. A chat's opening chunk, which only names the role,
        does not."""
        delta = self.delta
        return bool(
            self.text
            or self.token_ids
            or (
                delta
                and (
                    delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
                )
            )
        )


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class SseReader:
    """Splits a byte stream into the payloads of its events. Pieces may end anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the payloads of the events that `piece` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        payloads = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                payloads.append(b"\n".join(self._data))
                self._data = []
        return payloads


class AnswerReader:
    """Fills one RequestOutcome from a stream's bytes. `begun` and feed()'s times share a clock."""

    def __init__(self, outcome: RequestOutcome, begun: float) -> None:
        self._outcome = outcome
        self._begun = begun
        self._events = SseReader()
        self._decode = msgspec.json.Decoder(_Chunk).decode
        self._counted = 0  # token ids, and 1 for each choice without ids
        self._usage: _Usage | None = None
        self._done = False

    def feed(self, piece: bytes, now: float) -> int:
        """Read a piece, and return how many tokens it completed: token ids, and 1 for each choice
        without ids. Raise msgspec.MsgspecError for an event that is not a chunk."""
        before = self._counted
        for payload in self._events.feed(piece):
            if payload == DONE:
                self._done = True
            else:
                self._chunk(self._decode(payload), now - self._begun)
        return self._counted - before

    def close(self) -> None:
        """End the stream: set the token counts, and an error if the answer is incomplete."""
        usage, outcome = self._usage, self._outcome
        outcome.output_tokens = usage.completion_tokens if usage else self._counted
        if usage and usage.prompt_tokens:
            outcome.prompt_tokens = usage.prompt_tokens
        if usage and usage.prompt_tokens_details:
            outcome.cached = usage.prompt_tokens_details.cached_tokens
        if not (outcome.error or self._done):
            outcome.error = "the stream ended without [DONE]"
        if not (outcome.error or outcome.output_tokens):
            outcome.error = "no token"

    def _chunk(self, chunk: _Chunk, now: float) -> None:
        outcome = self._outcome
        if chunk.error is not None:
            outcome.error = f"in the stream: {error_word(chunk.error)}"
        self._usage = chunk.usage or self._usage
        if not chunk.choices:
            return
        spoke = any(choice.speaks() for choice in chunk.choices)
        ended = any(choice.finish_reason for choice in chunk.choices)
        if spoke or (ended and not outcome.ttft):
            if outcome.ttft:
                outcome.gaps.append(now - outcome.latency)
            else:
                outcome.ttft = now
            self._counted += sum(len(choice.token_ids or (0,)) for choice in chunk.choices)
        if spoke or ended:
            outcome.latency = now


def error_word(error: Any) -> str:
    """Shorten a server's error to a code or type, so that equal errors count together."""
    detail = error.get("error", error) if isinstance(error, dict) else error
    if isinstance(detail, dict):
        details = (detail.get(key) for key in ("code", "type", "message"))
        return next((str(text) for text in details if text), "no reason")[:80]
    return str(detail)[:80]

"""The turns of a chat, and one answer as it arrives.

In: questions; the events of POST /v1/chat/completions. Out: the messages of the next request, and
the answer's text piece by piece.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from baton_cli.errors import CommandError
from baton_cli.terminal.remote_router import EventStream, Json, RemoteRouter

PATH = "/v1/chat/completions"
DONE = b"[DONE]"
# The model's reasoning comes before its answer, and is no part of it.
PieceKind = Literal["reasoning", "answer"]


class Turn(NamedTuple):
    question: str
    answer: str


class Conversation:
    """What the next request repeats. An answer that was stopped counts as far as it came."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[Turn] = []

    def messages(self, question: str) -> list[dict[str, str]]:
        system = [_message("system", self.system)] if self.system else []
        before = [
            message
            for turn in self.turns
            for message in (_message("user", turn.question), _message("assistant", turn.answer))
        ]
        return [*system, *before, _message("user", question)]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class Piece(NamedTuple):
    kind: PieceKind
    text: str


class StreamedAnswer:
    """One answer. `text` is what has arrived of it, `tokens` counts it once it is complete, and
    `finish` is then the reason for its end."""

    def __init__(self, stream: EventStream) -> None:
        self.request_id = stream.header("x-baton-request-id")
        self.placement = stream.header("x-baton-placement")
        self.text = ""
        self.tokens = 0
        self.finish = ""
        self._stream = stream

    def pieces(self) -> Iterator[Piece]:
        """Raise CommandError with the router's message, or if the answer is incomplete."""
        for data in self._stream:
            if data == DONE:
                return
            try:
                event = json.loads(data)
                yield from self._read(event)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CommandError(f"the answer has an event that is none: {error!r}") from error
        raise CommandError("the answer's stream ended before it was complete; ask again")

    def close(self) -> None:
        """Close the connection, which ends the request."""
        self._stream.close()

    def _read(self, event: Any) -> Iterator[Piece]:
        if "error" in event:
            raise CommandError(str(event["error"]["message"]))
        for choice in event.get("choices") or ():
            delta = choice["delta"]
            self.finish = choice.get("finish_reason") or self.finish
            if reasoning := delta.get("reasoning_content"):
                yield Piece("reasoning", reasoning)
            if content := delta.get("content"):
                self.text += content
                yield Piece("answer", content)
        if usage := event.get("usage"):
            self.tokens = usage["completion_tokens"]


def ask(
    router: RemoteRouter, messages: list[dict[str, str]], max_tokens: int | None, model: str = ""
) -> StreamedAnswer:
    """Send a chat request. The caller closes the answer. Raise CommandError."""
    body: Json = {
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if model:
        body["model"] = model
    return StreamedAnswer(router.stream(PATH, body))

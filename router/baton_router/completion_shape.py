"""The JSON of /v1/completions' answers: `text_completion` objects.

In: deltas, or the choices they have come to. Out: bytes. With `echo` a choice's text (in a stream,
its first chunk's) begins with the prompt, and its logprobs with the prompt's. With
`return_token_ids` each choice (in a stream, its first chunk) has the `prompt_token_ids`, and each
choice or chunk its `token_ids`; with `prompt_logprobs` each choice has those: as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs
from baton_router.calls import (
    EventWriter,
    Gathered,
    Head,
    Json,
    Options,
    PromptIds,
    Usage,
    finish_members,
    prompt_positions,
)
from baton_router.logprobs import completion_logprobs, prompt_logprobs

Positions = Sequence[PositionLogprobs]


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is shown: its text, and its first token's, which has no probability."""

    text: str
    first: str


@dataclass(frozen=True, slots=True)
class ShownPrompts:
    """The call's prompts; `echoes` is None where they are not shown."""

    ids: PromptIds
    echoes: Sequence[Echo] | None = None


class CompletionShape:
    """One answer's JSON; remembers, per choice, how many characters its stream has shown."""

    def __init__(
        self,
        head: Head,
        options: Options,
        sampling: Json,
        prompts: ShownPrompts,
        prompt_logprobs: int | None,
    ) -> None:
        self._head = head
        self._n: int = sampling.get("n", 1)
        self._logprobs: int | None = sampling.get("logprobs")
        self._prompt_logprobs = prompt_logprobs
        self._ids = options.return_token_ids
        self._prompts = prompts
        self._plain = self._logprobs is None and prompts.echoes is None
        self._scores: dict[int, Positions] = {}  # by prompt
        self._offsets: dict[int, int] = {}
        counts = [len(ids) for ids in prompts.ids for _ in range(self._n)]
        self._writer = EventWriter(head, "text_completion", options, counts)

    def event(self, index: int, delta: Delta) -> bytes:
        self._writer.count(index, delta)
        if delta.prompt_logprobs:
            self._scores[index // self._n] = delta.prompt_logprobs
        begins = index not in self._offsets
        if self._plain and not self._ids:
            return self._writer.text_event(index, delta)
        if self._plain and not begins:
            ids_member = b',"token_ids":' + msgspec.json.encode(delta.ids)
            return self._writer.text_event(index, delta, ids_member)
        echo = self._echo(index) if begins else None
        shown = delta.text or delta.finish or echo
        if not (shown or self._ids or self._logprobs is not None):
            return b""
        offset = self._offsets.setdefault(index, 0)
        text = delta.text if echo is None else echo.text + delta.text
        parts = [b'{"index":%d,"text":' % index, msgspec.json.encode(text), b',"logprobs":']
        if self._logprobs is None:
            parts.append(b"null")
        else:
            scores = self._scores.get(index // self._n, ())
            told = self._told(echo, scores, delta.logprobs, self._logprobs, offset)
            self._offsets[index] = offset + sum(map(len, told["tokens"]))
            parts.append(msgspec.json.encode(told))
        if self._ids:
            if begins:
                ids = self._prompts.ids[index // self._n]
                parts += [b',"prompt_token_ids":', msgspec.json.encode(ids)]
            parts += [b',"token_ids":', msgspec.json.encode(delta.ids)]
        parts.append(finish_members(delta))
        return self._writer.event(index, b"".join(parts))

    def usage_event(self, usage: Usage) -> bytes:
        return self._writer.usage_event(usage)

    def answer(self, choices: Sequence[Gathered], usage: Usage) -> bytes:
        told: list[Json] = []
        for start in range(0, len(choices), self._n):
            mine = choices[start : start + self._n]
            scores = prompt_positions(mine)
            told += [self._choice(start + i, choice, scores) for i, choice in enumerate(mine)]
        body: Json = {
            "id": self._head.id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": told,
            "usage": usage.json(),
            "system_fingerprint": self._head.fingerprint,
        }
        return msgspec.json.encode(body)

    def _choice(self, index: int, choice: Gathered, scores: Positions) -> Json:
        echo = self._echo(index)
        told: Json = {
            "index": index,
            "text": choice.text if echo is None else echo.text + choice.text,
            "logprobs": None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop,
        }
        if self._logprobs is not None:
            told["logprobs"] = self._told(echo, scores, choice.logprobs, self._logprobs, 0)
        if self._prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(scores, self._prompt_logprobs)
        if self._ids:
            told["prompt_token_ids"] = self._prompts.ids[index // self._n]
            told["token_ids"] = choice.ids
        return told

    def _echo(self, index: int) -> Echo | None:
        echoes = self._prompts.echoes
        return echoes[index // self._n] if echoes is not None else None

    @staticmethod
    def _told(
        echo: Echo | None, scores: Positions, positions: Positions, top: int, offset: int
    ) -> Json:
        if echo is None:
            return completion_logprobs(positions, top, offset)
        return completion_logprobs([*scores, *positions], top, offset, echo.first)

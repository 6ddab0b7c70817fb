"""POST /v1/completions: the body's fields, and the JSON of its answers.

In: a JSON body whose prompt is a text, a list of texts, token ids or a list of those; each prompt
is a request of its own, and choices are numbered prompt * n + choice. Out: `text_completion`
objects. With `return_token_ids` each choice (in a stream, its first chunk) has the
`prompt_token_ids`, and each choice or chunk its `token_ids`, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton_protocol.errors import InvalidRequest
from baton_protocol.link import Delta
from baton_protocol.sampling import MAX_LOGPROBS
from baton_router.calls import (
    EventWriter,
    Gathered,
    Head,
    Json,
    Options,
    Prompt,
    TextPrompt,
    Usage,
    finish_members,
)
from baton_router.fields import Fields, wrong
from baton_router.logprobs import completion_logprobs, text_length
from baton_router.models import PoolModel
from baton_router.parameters import refuse_unsupported, sampling_fields

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
_ALLOWED = "it must be a string, a list of strings, token ids or a list of token id lists"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    options: Options
    sampling: Json
    given: tuple[Prompt, ...]
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS

    @classmethod
    def parse(cls, data: bytes) -> CompletionCall:
        """Raise InvalidRequest naming the first wrong field."""
        fields = Fields.parse(data)
        refuse_unsupported(fields)
        sampling = sampling_fields(fields)
        logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
        if logprobs is not None:
            sampling["logprobs"] = logprobs
        special = fields.boolean("add_special_tokens", True)
        return cls(
            options=Options.read(fields),
            sampling=sampling,
            given=_prompts(fields.raw("prompt"), special),
        )

    def prompts(self, model: PoolModel) -> list[Prompt]:
        return list(self.given)

    def shape(self, head: Head, prompt_ids: Sequence[Sequence[int]]) -> CompletionShape:
        return CompletionShape(self, head, prompt_ids)


class CompletionShape:
    """One answer's JSON; remembers, per choice, how much its stream has shown."""

    def __init__(
        self, call: CompletionCall, head: Head, prompt_ids: Sequence[Sequence[int]]
    ) -> None:
        self._head = head
        self._n: int = call.sampling.get("n", 1)
        self._ids = call.options.return_token_ids
        self._logprobs: int | None = call.sampling.get("logprobs")
        self._prompt_ids = prompt_ids
        self._offsets: dict[int, int] = {}
        self._writer = EventWriter(head, "text_completion", call.options.include_usage)

    def event(self, index: int, delta: Delta) -> bytes:
        if not (delta.text or delta.finish or self._ids or self._logprobs is not None):
            return b""
        begun = index in self._offsets
        offset = self._offsets.setdefault(index, 0)
        parts = [b'{"index":%d,"text":' % index, msgspec.json.encode(delta.text), b',"logprobs":']
        if self._logprobs is None:
            parts.append(b"null")
        else:
            told = completion_logprobs(delta.logprobs, self._logprobs, offset)
            self._offsets[index] = offset + text_length(delta.logprobs)
            parts.append(msgspec.json.encode(told))
        if self._ids:
            if not begun:
                ids = self._prompt_ids[index // self._n]
                parts += [b',"prompt_token_ids":', msgspec.json.encode(ids)]
            parts += [b',"token_ids":', msgspec.json.encode(delta.ids)]
        parts.append(finish_members(delta))
        return self._writer.event(b"".join(parts))

    def usage_event(self, usage: Usage) -> bytes:
        return self._writer.usage_event(usage)

    def answer(self, choices: Sequence[Gathered], usage: Usage) -> bytes:
        body: Json = {
            "id": self._head.id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage.json(),
            "system_fingerprint": self._head.fingerprint,
        }
        return msgspec.json.encode(body)

    def _choice(self, index: int, choice: Gathered) -> Json:
        told: Json = {
            "index": index,
            "text": choice.text,
            "logprobs": None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop,
        }
        if self._logprobs is not None:
            told["logprobs"] = completion_logprobs(choice.logprobs, self._logprobs, 0)
        if self._ids:
            told["prompt_token_ids"] = self._prompt_ids[index // self._n]
            told["token_ids"] = choice.ids
        return told


def _prompts(value: Any, special: bool) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (TextPrompt(value, special),)
    if not isinstance(value, list) or not value:
        raise wrong("prompt", value, _ALLOWED)
    if _is_ids(value):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt holds {len(value)} prompts; at most {MAX_PROMPTS}", param="prompt"
        )
    if all(isinstance(item, str) for item in value):
        return tuple(TextPrompt(item, special) for item in value)
    if all(isinstance(item, list) and _is_ids(item) for item in value):
        return tuple(tuple(item) for item in value)
    raise wrong("prompt", value, _ALLOWED)


def _is_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)

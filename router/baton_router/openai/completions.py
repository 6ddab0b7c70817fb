"""POST /v1/completions: the body's fields.

In: a JSON body whose prompt is a text, a list of texts, token ids or a list of those; each prompt
is a request of its own, and choices are numbered prompt * n + choice. Out: the call, which makes
the `CompletionShape` of its answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton_protocol.errors import InvalidRequest
from baton_protocol.sampling import MAX_LOGPROBS
from baton_router.nodes.model_artifacts import PoolModel
from baton_router.openai.body_reader import TRUE, Fields, integers, needs, wrong
from baton_router.openai.completion_response import CompletionShape
from baton_router.openai.echo import Echo
from baton_router.openai.endpoint import (
    Head,
    Json,
    Options,
    Prompt,
    PromptIds,
    TextPrompt,
    Truncation,
)
from baton_router.openai.sampling_params import (
    MAX_TOKENS_NAMES,
    bad_words,
    limit_field,
    sampling_fields,
)
from baton_router.openai.unsupported import check_unserved
from baton_text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
PROMPT = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        _SEVERAL | {"items": {"type": "string"}},
        _SEVERAL | {"items": _IDS},
    ]
}
_ALLOWED = "it must be a string, a list of strings, token ids or a list of token id lists"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """`prompt_logprobs` is what the client asked for by that name; `echo` may need them too."""

    options: Options
    sampling: Json
    bad_words: tuple[str, ...]
    given: list[Prompt]
    echo: bool
    prompt_logprobs: int | None
    truncation: Truncation | None
    names: Mapping[str, str]
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS
    continues_prompt: bool = True

    @classmethod
    def parse(cls, data: bytes | bytearray) -> CompletionCall:
        """Raise InvalidRequest naming the first wrong field; MalformedBody."""
        return cls.read(Fields.parse(data))

    @classmethod
    def read(cls, fields: Fields) -> CompletionCall:
        check_unserved(fields, "completions")
        echo = fields.boolean("echo", False)
        # Nothing to generate is a question about the prompt alone; nodes generate one token.
        sampling = sampling_fields(fields, least_tokens=0 if echo else 1)
        for name in MAX_TOKENS_NAMES:
            fields.rule(needs(name, {"const": 0}, "echo", TRUE))
        generates = sampling.get("max_tokens") != 0
        if not generates:
            sampling["max_tokens"] = 1
        names = {"max_tokens": limit_field(fields)}
        asked = sampling.get("prompt_logprobs")
        logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
        if logprobs is not None:
            sampling["logprobs"] = logprobs
            if echo and (asked is None or asked < logprobs):
                sampling["prompt_logprobs"] = logprobs
                names["prompt_logprobs"] = "logprobs"
        special = fields.boolean("add_special_tokens", True)
        return cls(
            options=Options.read(fields, generates=generates),
            sampling=sampling,
            bad_words=bad_words(fields),
            given=_prompts(fields.raw("prompt", PROMPT, required=True), special),
            echo=echo,
            prompt_logprobs=asked,
            truncation=Truncation.read(fields),
            names=names,
        )

    @property
    def rendered(self) -> int:
        return 0

    def forget_prompts(self) -> None:
        if not self.echo:
            self.given.clear()

    def prompts(self, model: PoolModel) -> list[Prompt]:
        return list(self.given)

    def shape(self, head: Head, prompts: PromptIds, tokenizer: Tokenizer) -> CompletionShape:
        echoes = None
        if self.echo:
            answered = self.options.generates
            pairs = zip(self.given, prompts, strict=True)
            echoes = [
                Echo(ids if self._may_be_cut(ids) else given, ids, tokenizer, answered=answered)
                for given, ids in pairs
            ]
        return CompletionShape(
            head,
            self.options,
            self.sampling,
            prompts,
            tokenizer,
            echoes=echoes,
            prompt_logprobs=self.prompt_logprobs,
        )

    def _may_be_cut(self, ids: tuple[int, ...]) -> bool:
        return self.truncation is not None and self.truncation.may_have_cut(ids)


def _prompts(value: Any, special: bool) -> list[Prompt]:
    if isinstance(value, str):
        return [TextPrompt(value, special)]
    if not isinstance(value, list) or not value:
        raise wrong("prompt", value, _ALLOWED)
    ids = integers(value)
    if ids is not None:
        return [tuple(ids)]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt holds {len(value)} prompts; at most {MAX_PROMPTS}", param="prompt"
        )
    if all(isinstance(item, str) for item in value):
        return [TextPrompt(item, special) for item in value]
    lists = [integers(item) if isinstance(item, list) else None for item in value]
    if None in lists:
        raise wrong("prompt", value, _ALLOWED)
    return [tuple(one) for one in lists if one is not None]

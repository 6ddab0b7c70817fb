"""What the two endpoints have in common, so that one handler serves both.

Call         a parsed body: which prompts, which sampling fields, how to answer
Shape        turns deltas into the endpoint's JSON: events of a stream, or one answer
ChoiceOutput what a choice has come to when it is answered in one piece
StreamUsage  what each event of a stream says of usage
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from baton_protocol.errors import InvalidRequest
from baton_protocol.link import Delta, FinishReason
from baton_protocol.request import PositionLogprobs
from baton_router.nodes.model_artifacts import PoolModel
from baton_router.openai.answers import CommonFields, Usage
from baton_router.openai.body_reader import TRUE, Fields, Schema, wrong
from baton_router.openai.request_fields import MEMBERS
from baton_router.openai.unsupported import only_accepted
from baton_text.tokenizer import Tokenizer

Json = dict[str, Any]
PromptIds = Sequence[tuple[int, ...]]  # of each prompt
STREAM_OPTIONS = MEMBERS["chat", "stream_options"]  # on both endpoints
# One rule, since tools expand each rule with all others, and give up over too many.
_STREAMS: Schema = {
    "if": {"properties": {"stream": TRUE}, "required": ["stream"]},
    "then": {"properties": {"prompt_logprobs": {"type": "null"}}},
    "else": {
        "properties": {
            "stream_options": {"anyOf": [{"type": "null"}, {"type": "object", "maxProperties": 0}]}
        }
    },
}
SIDES = ("left", "right")
AS_FITS = -1


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special_tokens: bool


Prompt = TextPrompt | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Truncation:
    """How many tokens of each prompt are kept, its last ones or its first ones. None: as many as
    the model's context has beside `max_tokens`; 0, of which no prompt is left, is refused later."""

    tokens: int | None
    keeps_last: bool

    @classmethod
    def read(cls, fields: Fields) -> Truncation | None:
        tokens = fields.integer("truncate_prompt_tokens", AS_FITS)
        side = fields.raw("truncation_side", {"enum": [None, *SIDES]})
        if side is not None and side not in SIDES:
            raise wrong("truncation_side", side, f"use one of {', '.join(SIDES)}")
        if tokens is None:
            return None
        return cls(None if tokens == AS_FITS else tokens, side != "right")

    def may_have_cut(self, ids: Sequence[int]) -> bool:
        """Whether these may be less than the whole prompt."""
        return self.tokens is None or len(ids) >= self.tokens


@dataclass(slots=True)
class ChoiceOutput:
    """One choice, delta by delta."""

    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.ids.extend(delta.ids)
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        if delta.finish is not None:
            self.finish, self.stop = delta.finish, delta.stop

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finish_reason(self) -> FinishReason:
        assert self.finish is not None, "an answer in one piece is written when its choices ended"
        return self.finish


def prompt_positions(choices: Sequence[ChoiceOutput]) -> tuple[PositionLogprobs, ...]:
    """Of one request: they came with its first delta, whichever choice's that was."""
    return next((one.prompt_logprobs for one in choices if one.prompt_logprobs), ())


class Shape(Protocol):
    """`index` counts all choices of a call: prompt * n + choice."""

    def event(self, index: int, delta: Delta) -> bytes:
        """SSE bytes of one delta; empty where there is nothing to show yet."""
        ...

    def usage_event(self, usage: Usage) -> bytes: ...

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes: ...


class Call(Protocol):
    """A parsed body. `default_max_tokens` None: as many as the context leaves. `bad_words` are
    texts; the other sampling fields are as SamplingParams has them."""

    @property
    def options(self) -> Options: ...

    @property
    def sampling(self) -> Json: ...

    @property
    def bad_words(self) -> tuple[str, ...]: ...

    @property
    def default_max_tokens(self) -> int | None: ...

    @property
    def truncation(self) -> Truncation | None:
        """None: a prompt that is too long is refused."""
        ...

    @property
    def continues_prompt(self) -> bool:
        """Request.continues_prompt"""
        ...

    @property
    def names(self) -> Mapping[str, str]:
        """What the client calls a field of SamplingParams, or the prompt, where it differs."""
        ...

    @property
    def rendered(self) -> int:
        """Characters that a chat template has to render, about."""
        ...

    def prompts(self, model: PoolModel) -> list[Prompt]: ...

    def forget_prompts(self) -> None:
        """They are ids now: let texts go that the answer does not repeat."""
        ...

    def shape(self, common: CommonFields, prompts: PromptIds, tokenizer: Tokenizer) -> Shape: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to answer, the same on both endpoints. `token_id_names`: in log-probabilities tokens are
    called `token_id:7`. `generates` is False where only the prompt is asked about."""

    model: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    token_id_names: bool = False
    generates: bool = True

    @classmethod
    def read(cls, fields: Fields, *, generates: bool = True) -> Options:
        stream = fields.boolean("stream", False)
        more = fields.nested("stream_options", STREAM_OPTIONS)
        fields.rule(_STREAMS)
        if more and not stream:  # as vLLM: an empty one asks for nothing
            raise InvalidRequest(
                "stream_options is only allowed when stream is true", param="stream_options"
            )
        options = Fields({}) if more is None else more
        only_accepted(options, STREAM_OPTIONS.fields["include_obfuscation"])
        include_usage = options.boolean("include_usage", False)
        continuous = options.boolean("continuous_usage_stats", False)
        return cls(
            model=fields.text("model"),
            stream=stream,
            include_usage=include_usage,
            continuous_usage=include_usage and continuous,
            return_token_ids=fields.boolean("return_token_ids", False),
            token_id_names=fields.boolean("return_tokens_as_token_ids", False),
            generates=generates,
        )


class StreamUsage:
    """What each event of a stream says of usage: that of its choice so far where it is
    `continuous`, else the `default`. `prompt_tokens` are those of each choice's prompt."""

    def __init__(self, options: Options, prompt_tokens: Sequence[int]) -> None:
        self.default: UnsetType | None = None if options.include_usage else UNSET
        self.continuous = options.continuous_usage
        self._prompt_tokens = prompt_tokens
        self._generated = [0] * len(prompt_tokens)

    def count(self, index: int, delta: Delta) -> None:
        """Count each delta, also one that makes no event."""
        self._generated[index] += len(delta.ids)

    def so_far(self, index: int) -> Usage:
        """Of this choice."""
        return Usage.of(self._prompt_tokens[index], self._generated[index])

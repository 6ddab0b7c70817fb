"""What both endpoints share, so that one handler serves both.

Call         a parsed body: prompts, sampling fields, and how to answer
Shape        turns deltas into the endpoint's JSON: events of a stream, or one answer
ChoiceOutput collects the deltas of one choice for an answer in one piece
StreamUsage  the usage in each event of a stream

The router refuses a field that would change the answer in a way it does not support, unless the
value asks for nothing. It accepts a field without effect (`user`, `metadata`, `store`, ...) if the
value follows OpenAI's rules. `body_reader` lists these fields and the reasons.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from baton_protocol.errors import InvalidRequest, PromptTooLong, exact
from baton_protocol.link import Delta, FinishReason
from baton_protocol.request import PositionLogprobs
from baton_protocol.sampling import (
    BIAS_RANGE,
    MAX_BAD_WORDS,
    MAX_BIASED,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PROMPT_CANDIDATES,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_TEMPERATURE,
    PENALTY_RANGE,
    REPETITION_RANGE,
    SamplingParams,
)
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.answer_parsing import AnswerParsing
from baton_router.openai.answers import CommonFields, Usage
from baton_router.openai.body_reader import (
    ANY,
    MEMBERS,
    NOT_FALSE,
    TRUE,
    Body,
    Field,
    Fields,
    Schema,
    needs,
    wrong,
)
from baton_router.openai.structured_output import RequestedGrammar
from baton_text.tokenizer import Tokenizer

MAX_METADATA = 16
_METADATA = {"additionalProperties": {"type": "string"}, "maxProperties": MAX_METADATA}
# Ignored fields; their values are checked all the same.
_TEXTS = (
    *("user", "safety_identifier", "session_id"),
    *("prompt_cache_key", "prompt_cache_retention", "mm_payload"),
)
_OBJECTS = ("prompt_cache_options", "cache_control", "media_io_kwargs", "mm_processor_kwargs")
_LIMITED = {
    body: {field.name: field for field in members.fields.values() if field.accepts is not None}
    for (body, path), members in MEMBERS.items()
    if not path
}


def check_unserved(fields: Fields, body: Body) -> None:
    """Raise InvalidRequest for the first field that is unknown, unsupported with its value, or
    against OpenAI's rules."""
    fields.only(MEMBERS[body, ""])
    limited = _LIMITED[body]
    if fields.given(limited):
        for field in limited.values():
            only_accepted(fields, field)
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    fields.rule({"description": "best_of is what n is"})
    if best_of is not None and best_of != n:
        raise wrong("best_of", best_of, f"this server supports n only, which is {n}; leave it out")
    _check_ignored(fields)


def only_accepted(fields: Fields, field: Field) -> None:
    """Raise InvalidRequest if the field has a value outside `field.accepts`."""
    accepted = field.accepts or ()
    name = field.name.rpartition(".")[2]
    value = fields.raw(name, {"enum": [None, *accepted]})
    if value is not None and not any(_same(value, one) for one in accepted):
        raise wrong(field.name, value, field.complaint)


def _same(value: Any, other: Any) -> bool:
    """Equality as in JSON, where true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _check_ignored(fields: Fields) -> None:
    for name in _TEXTS:
        fields.text(name)
    for name in _OBJECTS:
        fields.mapping(name)
    fields.boolean("store", False)
    fields.integer("stream_interval", 1)
    pairs = fields.mapping("metadata", _METADATA) or {}
    if len(pairs) > MAX_METADATA:
        raise InvalidRequest(
            f"metadata holds {len(pairs)} pairs; at most {MAX_METADATA}", param="metadata"
        )
    for name, value in pairs.items():
        if not isinstance(value, str):
            raise wrong("metadata", {name: value}, "each value must be a string")


MAX_STOPS = 16
MAX_TOKENS_NAMES = ("max_completion_tokens", "max_tokens")
MAX_TOP_K = (1 << 31) - 1  # engines store it in 32 bits; no vocabulary is larger
MAX_WORDS = MAX_BAD_WORDS // 2  # each word may become two id sequences
# generation_config.json may hold other fields; only these become defaults of a request.
DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_ID = re.compile(r"0|[1-9][0-9]{0,17}")
LOGIT_BIAS = {
    "patternProperties": {
        f"^({_ID.pattern})$": {"type": "number", "minimum": -BIAS_RANGE, "maximum": BIAS_RANGE}
    },
    "additionalProperties": False,
    "maxProperties": MAX_BIASED,
}


def limit_field(fields: Fields) -> str:
    """The name of the field that limits the answer: the newer max_completion_tokens if given, else
    max_tokens."""
    newer, older = MAX_TOKENS_NAMES
    return newer if fields.raw(newer, ANY) is not None else older


def sampling_fields(fields: Fields, least_tokens: int = 1) -> dict[str, Any]:
    """Read the sampling fields that both endpoints share, as far as the client sent them.

    In: the body's fields. Out: keyword arguments for SamplingParams; `complete` adds the model's
    defaults and limits. `least_tokens` is the lower bound of the answer's length. Raise
    InvalidRequest with field, value and range.
    """
    limits = {name: fields.integer(name, least_tokens) for name in MAX_TOKENS_NAMES}
    text = {"type": "string"}
    some = {"anyOf": [text, {"type": "array", "items": text, "minItems": 1}]}
    fields.rule(needs("stop", some, "detokenize", NOT_FALSE, absent=True))
    fields.rule({"description": "min_tokens is at most what max_tokens is, or is by default"})
    read = {
        "n": fields.integer("n", 1, MAX_CHOICES),
        "temperature": fields.number("temperature", 0.0, MAX_TEMPERATURE),
        "top_k": fields.integer("top_k", -1, MAX_TOP_K),
        "top_p": fields.number("top_p", 0.0, 1.0),
        "min_p": fields.number("min_p", 0.0, 1.0),
        "seed": fields.integer("seed"),
        "max_tokens": limits[limit_field(fields)],
        "min_tokens": fields.integer("min_tokens", 0),
        "stop": fields.texts("stop", MAX_STOPS, MAX_STOP_CHARS),
        "stop_token_ids": fields.ids("stop_token_ids", MAX_STOP_IDS),
        "include_stop_str_in_output": fields.boolean("include_stop_str_in_output", False),
        "ignore_eos": fields.boolean("ignore_eos", False),
        "skip_special_tokens": fields.boolean("skip_special_tokens", True),
        "detokenize": _detokenize(fields),
        "prompt_logprobs": _prompt_logprobs(fields),
        "frequency_penalty": fields.number("frequency_penalty", -PENALTY_RANGE, PENALTY_RANGE),
        "presence_penalty": fields.number("presence_penalty", -PENALTY_RANGE, PENALTY_RANGE),
        "repetition_penalty": fields.number("repetition_penalty", *REPETITION_RANGE),
        "logit_bias": _logit_bias(fields),
        "allowed_token_ids": fields.ids("allowed_token_ids", MAX_BIASED, least=1),
    }
    return _likeliest({name: value for name, value in read.items() if value is not None})


def _likeliest(sampling: Json) -> Json:
    """The same sampling without `top_p` 0, of which only the likeliest token is left: that is what
    temperature 0 gives, whatever the other fields are."""
    if sampling.get("top_p") != 0:
        return sampling
    return sampling | {"top_p": 1.0, "temperature": 0.0}


def bad_words(fields: Fields) -> tuple[str, ...]:
    """The banned texts; they become ids once the model is known."""
    return fields.texts("bad_words", MAX_WORDS, MAX_STOP_CHARS) or ()


def check_scores(sampling: Mapping[str, Any], prompt_tokens: int, names: Mapping[str, str]) -> None:
    """Refuse prompt logprobs that would fill the router's memory, as each choice repeats those of
    its prompt. `prompt_tokens` counts all prompts of the call."""
    scores, n = sampling.get("prompt_logprobs"), sampling.get("n", 1)
    if scores is not None and prompt_tokens * (1 + scores) * n > MAX_PROMPT_CANDIDATES:
        field = names.get("prompt_logprobs", "prompt_logprobs")
        raise InvalidRequest(
            f"{field} is {scores} for {prompt_tokens} tokens of prompt and n {n}; "
            f"(1 + {field}) x tokens x n may be at most {MAX_PROMPT_CANDIDATES}",
            param=field,
        )


def check_alone(sampling: Mapping[str, Any], default_max_tokens: int | None) -> None:
    """Refuse what `complete` would refuse for any prompt and any model."""
    limit = sys.maxsize if default_max_tokens is None else default_max_tokens
    SamplingParams(**{"max_tokens": limit, **sampling}).check()


def complete(
    sampling: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    prompt_tokens: int,
    max_model_len: int,
    default_max_tokens: int | None,
    names: Mapping[str, str],
) -> SamplingParams:
    """The parameters of one prompt; the seed stays as the client sent it.

    `defaults` are the model's own. `default_max_tokens` None means all that the context leaves.
    `names` maps a field to the client's name for it in errors. Raise InvalidRequest for an empty
    prompt, and PromptTooLong if prompt and `max_tokens` do not fit `max_model_len` tokens.
    """
    prompt_field = names.get("prompt", "prompt")
    limit_field = names.get("max_tokens", "max_tokens")
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens; send at least one", param=prompt_field)
    room = max_model_len - prompt_tokens
    limit = f"this model's maximum context length is {max_model_len} tokens"
    if room < 1:
        raise PromptTooLong(
            f"{limit}, but the prompt has {prompt_tokens}; at least one token must be left to "
            f"generate. Shorten {prompt_field}",
            param=prompt_field,
        )
    wanted = sampling.get("max_tokens")
    if wanted is not None and wanted > room:
        raise PromptTooLong(
            f"{limit}, but {prompt_tokens} tokens of prompt and {limit_field} {wanted} make "
            f"{prompt_tokens + wanted}; ask for at most {room}",
            param=limit_field,
        )
    given = {name: defaults[name] for name in DEFAULTED if name in defaults} | dict(sampling)
    if wanted is None:
        given["max_tokens"] = room if default_max_tokens is None else min(default_max_tokens, room)
    params = SamplingParams(**_likeliest(given))
    params.check()
    return params


def _detokenize(fields: Fields) -> bool:
    wanted = fields.boolean("detokenize", True)
    fields.rule(needs("detokenize", {"const": False}, "return_token_ids", TRUE))
    if not wanted and not fields.boolean("return_token_ids", False):
        raise wrong("detokenize", wanted, "without text there are ids: set return_token_ids too")
    return wanted


def _prompt_logprobs(fields: Fields) -> int | None:
    """The API document states the rule about streams in _STREAMS."""
    wanted = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if wanted is not None and fields.boolean("stream", False):
        raise wrong("prompt_logprobs", wanted, "a stream does not have them; leave out one of both")
    return wanted


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...] | None:
    given = fields.mapping("logit_bias", LOGIT_BIAS)
    if given is None:
        return None
    if len(given) > MAX_BIASED:
        message = f"logit_bias holds {len(given)} ids; at most {MAX_BIASED}"
        raise InvalidRequest(message, param="logit_bias")
    pairs = []
    for name, bias in given.items():
        if _ID.fullmatch(name) is None:
            raise wrong("logit_bias", {name: bias}, "its names must be token ids")
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not -BIAS_RANGE <= bias <= BIAS_RANGE:
            allowed = f"its values must be numbers in [{exact(-BIAS_RANGE)}, {exact(BIAS_RANGE)}]"
            raise wrong("logit_bias", {name: bias}, allowed)
        pairs.append((int(name), float(bias)))
    return tuple(pairs)


Json = dict[str, Any]
PromptIds = Sequence[tuple[int, ...]]  # per prompt
STREAM_OPTIONS = MEMBERS["chat", "stream_options"]  # the same on both endpoints
# One rule instead of several: schema tools expand each rule with all others and give up on many.
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
    """How many tokens of each prompt are kept, from its end or its start. `tokens` None: as many as
    fit beside `max_tokens`. 0 leaves no prompt and is refused later."""

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
        """Whether `ids` may be a truncated prompt."""
        return self.tokens is None or len(ids) >= self.tokens


@dataclass(slots=True)
class ChoiceOutput:
    """Collects one choice, delta by delta."""

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
    """The prompt logprobs of one request, which came with the first delta of any of its choices."""
    return next((one.prompt_logprobs for one in choices if one.prompt_logprobs), ())


class Shape(Protocol):
    """Writes the JSON of one call. `index` numbers all choices of the call: prompt * n + choice."""

    def event(self, index: int, delta: Delta) -> bytes:
        """The SSE bytes of one delta; empty if it shows nothing yet."""
        ...

    def usage_event(self, usage: Usage) -> bytes: ...

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes: ...


class Call(Protocol):
    """A parsed body. `bad_words` are texts; `sampling` holds the other fields as SamplingParams has
    them. `default_max_tokens` None: as many as the context leaves."""

    @property
    def options(self) -> Options: ...

    @property
    def sampling(self) -> Json: ...

    @property
    def bad_words(self) -> tuple[str, ...]: ...

    @property
    def grammar(self) -> RequestedGrammar | None:
        """The grammar that each answer must match, if any."""
        ...

    @property
    def special_tokens_requested(self) -> bool:
        """Whether the client itself said if its text has special tokens."""
        ...

    @property
    def default_max_tokens(self) -> int | None: ...

    @property
    def truncation(self) -> Truncation | None:
        """None: refuse a prompt that is too long."""
        ...

    @property
    def continues_prompt(self) -> bool:
        """The value for Request.continues_prompt."""
        ...

    @property
    def names(self) -> Mapping[str, str]:
        """The client's names of SamplingParams fields and of the prompt, where they differ."""
        ...

    @property
    def rendered(self) -> int:
        """Approximate number of characters that the chat template renders."""
        ...

    def prompts(self, model: PoolModel) -> list[Prompt]: ...

    def parsing(self, model: PoolModel, prompts: Sequence[Prompt]) -> AnswerParsing | None:
        """How to parse the answers to these prompts; None if they are plain text."""
        ...

    def forget_prompts(self) -> None:
        """The prompts are ids now: free the texts that the answer does not repeat."""
        ...

    def shape(
        self,
        common: CommonFields,
        prompts: PromptIds,
        tokenizer: Tokenizer,
        parsing: AnswerParsing | None = None,
    ) -> Shape: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to answer, the same on both endpoints. `token_id_names`: logprobs name tokens
    `token_id:7`. `generates` is False if the call only asks about its prompt."""

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
        if more and not stream:  # as in vLLM, an empty object asks for nothing
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
    """The usage in each event of a stream: if `continuous`, that of its choice so far, else
    `default`. `prompt_tokens` holds the number of prompt tokens of each choice."""

    def __init__(self, options: Options, prompt_tokens: Sequence[int]) -> None:
        self.default: UnsetType | None = None if options.include_usage else UNSET
        self.continuous = options.continuous_usage
        self._prompt_tokens = prompt_tokens
        self._generated = [0] * len(prompt_tokens)

    def count(self, index: int, delta: Delta) -> None:
        """Count a delta, even one without an event."""
        self._generated[index] += len(delta.ids)

    def so_far(self, index: int) -> Usage:
        """Usage of this choice so far."""
        return Usage.of(self._prompt_tokens[index], self._generated[index])

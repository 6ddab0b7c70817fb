"""From the body's sampling fields to SamplingParams.

In: the fields as a client sent them, then what only the model can judge: its length and its own
defaults. Out: complete parameters of one prompt, or an error that names field, value and range.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from baton_protocol.errors import InvalidRequest, PromptTooLong
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
from baton_router.openai.body_reader import ANY, NOT_FALSE, TRUE, Fields, needs, wrong

MAX_STOPS = 16
MAX_TOKENS_NAMES = ("max_completion_tokens", "max_tokens")
MAX_TOP_K = (1 << 31) - 1  # engines keep it in 32 bits; no vocabulary is larger
MAX_WORDS = MAX_BAD_WORDS // 2  # each may become two sequences of ids
# generation_config.json may hold more than sampling; only these are defaults of a request.
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
    """Which field limits the answer: max_completion_tokens, where it is given, is the newer name
    of max_tokens."""
    newer, older = MAX_TOKENS_NAMES
    return newer if fields.raw(newer, ANY) is not None else older


def sampling_fields(fields: Fields, least_tokens: int = 1) -> dict[str, Any]:
    """The sampling fields both endpoints share, as far as the client sent them."""
    limits = {name: fields.integer(name, least_tokens) for name in MAX_TOKENS_NAMES}
    text = {"type": "string"}
    some = {"anyOf": [text, {"type": "array", "items": text, "minItems": 1}]}
    fields.rule(needs("stop", some, "detokenize", NOT_FALSE, absent=True))
    fields.rule({"description": "min_tokens is at most what max_tokens is, or is by default"})
    read = {
        "n": fields.integer("n", 1, MAX_CHOICES),
        "temperature": fields.number("temperature", 0.0, MAX_TEMPERATURE),
        "top_k": fields.integer("top_k", -1, MAX_TOP_K),
        "top_p": fields.number("top_p", high=1.0, above=0.0),
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
    return {name: value for name, value in read.items() if value is not None}


def bad_words(fields: Fields) -> tuple[str, ...]:
    """Texts; they become ids once the model is known."""
    return fields.texts("bad_words", MAX_WORDS, MAX_STOP_CHARS) or ()


def check_scores(asked: Mapping[str, Any], prompt_tokens: int, names: Mapping[str, str]) -> None:
    """Refuse an answer whose prompts' logprobs would fill the router's memory: each choice repeats
    those of its prompt. `prompt_tokens` are those of all prompts of the call."""
    scores, n = asked.get("prompt_logprobs"), asked.get("n", 1)
    if scores is not None and prompt_tokens * (1 + scores) * n > MAX_PROMPT_CANDIDATES:
        field = names.get("prompt_logprobs", "prompt_logprobs")
        raise InvalidRequest(
            f"{field} is {scores} for {prompt_tokens} tokens of prompt and n {n}; "
            f"(1 + {field}) x tokens x n may be at most {MAX_PROMPT_CANDIDATES}",
            param=field,
        )


def check_alone(asked: Mapping[str, Any], default_max_tokens: int | None) -> None:
    """Refuse what `complete` would refuse for any prompt and any model."""
    limit = sys.maxsize if default_max_tokens is None else default_max_tokens
    SamplingParams(**{"max_tokens": limit, **asked}).check()


def complete(
    asked: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    prompt_tokens: int,
    max_model_len: int,
    default_max_tokens: int | None,
    names: Mapping[str, str],
) -> SamplingParams:
    """Parameters of one prompt, the seed left as the client sent it.

    `defaults` are the model's own; `default_max_tokens` None means all that the context leaves.
    Errors call a field what `names` says, where it does. Raise PromptTooLong where prompt and
    `max_tokens` do not fit `max_model_len` tokens.
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
    wanted = asked.get("max_tokens")
    if wanted is not None and wanted > room:
        raise PromptTooLong(
            f"{limit}, but {prompt_tokens} tokens of prompt and {limit_field} {wanted} make "
            f"{prompt_tokens + wanted}; ask for at most {room}",
            param=limit_field,
        )
    given = {name: defaults[name] for name in DEFAULTED if name in defaults} | dict(asked)
    if wanted is None:
        given["max_tokens"] = room if default_max_tokens is None else min(default_max_tokens, room)
    params = SamplingParams(**given)
    params.check()
    return params


def _detokenize(fields: Fields) -> bool:
    wanted = fields.boolean("detokenize", True)
    fields.rule(needs("detokenize", {"const": False}, "return_token_ids", TRUE))
    if not wanted and not fields.boolean("return_token_ids", False):
        raise wrong("detokenize", wanted, "without text there are ids: set return_token_ids too")
    return wanted


def _prompt_logprobs(fields: Fields) -> int | None:
    """The rule about streams is with those that `endpoint` has about them."""
    wanted = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if wanted is not None and fields.boolean("stream", False):
        raise wrong("prompt_logprobs", wanted, "a stream does not have them; leave out one of both")
    return wanted


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...] | None:
    given = fields.mapping("logit_bias", LOGIT_BIAS)
    if given is None:
        return None
    if len(given) > MAX_BIASED:
        told = f"logit_bias holds {len(given)} ids; at most {MAX_BIASED}"
        raise InvalidRequest(told, param="logit_bias")
    pairs = []
    for name, bias in given.items():
        if _ID.fullmatch(name) is None:
            raise wrong("logit_bias", {name: bias}, "its names must be token ids")
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not -BIAS_RANGE <= bias <= BIAS_RANGE:
            allowed = f"its values must be numbers in [{-BIAS_RANGE:g}, {BIAS_RANGE:g}]"
            raise wrong("logit_bias", {name: bias}, allowed)
        pairs.append((int(name), float(bias)))
    return tuple(pairs)

"""From the body's sampling fields to SamplingParams, and the fields we refuse by name.

A field that OpenAI or vLLM knows and that would change the answer is refused while we do not obey
it; fields that change nothing (`user`, `metadata`, ...) and names nobody knows are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton_protocol.errors import InvalidRequest, PromptTooLong
from baton_protocol.sampling import MAX_CHOICES, SamplingParams
from baton_router.fields import Fields, wrong

MAX_STOPS = 16
MAX_TOP_K = (1 << 31) - 1  # engines keep it in 32 bits; no vocabulary is larger
# generation_config.json may hold more than sampling; only these are defaults of a request.
DEFAULTED = ("temperature", "top_k", "top_p", "min_p")


def _empty(value: Any) -> bool:
    return value in (None, False, "", [], {})


def _zero(value: Any) -> bool:
    return not isinstance(value, bool) and value in (None, 0)


def _one(value: Any) -> bool:
    return not isinstance(value, bool) and value in (None, 1)


def _plain_text(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


# Field -> whether its value asks for nothing beyond what we do.
_REFUSED: dict[str, Callable[[Any], bool]] = {
    "tools": _empty,
    "tool_choice": lambda value: value in (None, "none", "auto"),
    "functions": _empty,
    "function_call": lambda value: value in (None, "none", "auto"),
    "response_format": _plain_text,
    "frequency_penalty": _zero,
    "presence_penalty": _zero,
    "repetition_penalty": _one,
    "length_penalty": _one,
    "logit_bias": _empty,
    "suffix": _empty,
    "echo": _empty,
    "audio": _empty,
    "modalities": lambda value: value in (None, ["text"]),
    "prediction": _empty,
    "reasoning_effort": _empty,
    "verbosity": lambda value: value in (None, "medium"),
    "web_search_options": lambda value: value is None,
    "use_beam_search": _empty,
    "bad_words": _empty,
    "allowed_token_ids": lambda value: value is None,
    "prompt_logprobs": lambda value: value is None,
    "truncate_prompt_tokens": lambda value: value is None,
    "structured_outputs": _empty,
    "guided_json": _empty,
    "guided_regex": _empty,
    "guided_choice": _empty,
    "guided_grammar": _empty,
    "logits_processors": _empty,
    "documents": _empty,
    "chat_template": _empty,
    "continue_final_message": _empty,
}


def refuse_unsupported(fields: Fields) -> None:
    """Raise InvalidRequest naming the first field that asks for what we do not do."""
    for name, harmless in _REFUSED.items():
        value = fields.raw(name)
        if value is not None and not harmless(value):
            raise wrong(name, value, "this server does not support it; leave it out")
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != (fields.integer("n") or 1):
        raise wrong("best_of", best_of, "this server does not support it; leave it out")


def sampling_fields(fields: Fields) -> dict[str, Any]:
    """The sampling fields both endpoints share, as far as the client sent them.
    max_completion_tokens goes before max_tokens, whose newer name it is."""
    read = {
        "n": fields.integer("n", 1, MAX_CHOICES),
        "temperature": fields.number("temperature"),
        "top_k": fields.integer("top_k", -1, MAX_TOP_K),
        "top_p": fields.number("top_p"),
        "min_p": fields.number("min_p"),
        "seed": fields.integer("seed"),
        "max_tokens": fields.integer("max_tokens", 1),
        "min_tokens": fields.integer("min_tokens", 0),
        "stop": fields.texts("stop", MAX_STOPS),
        "stop_token_ids": fields.integers("stop_token_ids"),
        "include_stop_str_in_output": fields.boolean("include_stop_str_in_output", False),
        "ignore_eos": fields.boolean("ignore_eos", False),
        "skip_special_tokens": fields.boolean("skip_special_tokens", True),
    }
    newer = fields.integer("max_completion_tokens", 1)
    if newer is not None:
        read["max_tokens"] = newer
    return {name: value for name, value in read.items() if value is not None}


def complete(
    asked: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    prompt_tokens: int,
    max_model_len: int,
    default_max_tokens: int | None,
) -> SamplingParams:
    """Parameters of one prompt, the seed left as the client sent it.

    `defaults` are the model's own; `default_max_tokens` None means all that the context leaves.
    Raise PromptTooLong where prompt and `max_tokens` do not fit `max_model_len` tokens.
    """
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens; send at least one", param="prompt")
    room = max_model_len - prompt_tokens
    limit = f"this model's maximum context length is {max_model_len} tokens"
    if room < 1:
        raise PromptTooLong(
            f"{limit}, but the prompt has {prompt_tokens}; at least one token must be left to "
            "generate. Shorten the prompt",
            param="prompt",
        )
    wanted = asked.get("max_tokens")
    if wanted is not None and wanted > room:
        raise PromptTooLong(
            f"{limit}, but {prompt_tokens} tokens of prompt and max_tokens {wanted} make "
            f"{prompt_tokens + wanted}; ask for at most {room}",
            param="max_tokens",
        )
    given = {name: defaults[name] for name in DEFAULTED if name in defaults} | dict(asked)
    if wanted is None:
        given["max_tokens"] = room if default_max_tokens is None else min(default_max_tokens, room)
    params = SamplingParams(**given)
    params.check()
    return params

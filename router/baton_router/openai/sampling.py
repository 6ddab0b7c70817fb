"""From a body's fields to the sampling parameters of a prompt.

In: the fields, the model's defaults and its limits. Out: SamplingParams, or an error that names the
client's own field.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from baton_protocol.errors import InvalidRequest, PromptTooLong
from baton_protocol.sampling import (
    MAX_PROMPT_CANDIDATES,
    SamplingParams,
    check_message,
    logprobs_within,
)
from baton_router.openai.fields.generation import GenerationFields, SamplingFields
from baton_router.openai.fields.table import FieldTable

Json = dict[str, Any]
# generation_config.json may hold other fields; only these become defaults of a request.
DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Parameters that are their field's value. Each dialect has its own `logprobs`, bad words become ids
# once the model is known, and so does a grammar.
PARAMETERS = set(SamplingParams.__struct_fields__) - {"logprobs", "bad_words", "structured"}
_DEFAULTS = {
    name: field.absent
    for name, field in GenerationFields.FIELDS.items()
    if name in PARAMETERS and field.absent is not None
}


def limit_field(fields: GenerationFields) -> str:
    """The name of the field that limits the answer: the newer max_completion_tokens if given, else
    max_tokens."""
    return "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"


def sampling_values(fields: GenerationFields) -> Json:
    """Keyword arguments for SamplingParams, as far as the fields give them; `complete` adds the
    model's defaults and limits."""
    limit = getattr(fields, limit_field(fields))
    return shared_values(fields) | ({} if limit is None else {"max_tokens": limit})


def shared_values(fields: SamplingFields) -> Json:
    """The same of the fields that each dialect has; without the limit of the answer."""
    return parameters_in(fields, {"extra_args": fields.vllm_xargs} if fields.vllm_xargs else {})


def parameters_in(fields: FieldTable, more: Json) -> Json:
    """The fields that are parameters by their own names, with `more`."""
    given = {name: value for name, value in vars(fields).items() if name in PARAMETERS}
    return with_defaults(given | more)


def with_defaults(given: Json) -> Json:
    """The given parameters, with the defaults of those that are not the model's."""
    return _likeliest(_DEFAULTS | given)


def _likeliest(sampling: Json) -> Json:
    """The same sampling without `top_p` 0, of which only the likeliest token is left: that is what
    temperature 0 gives, whatever the other fields are."""
    if sampling.get("top_p") != 0:
        return sampling
    return sampling | {"top_p": 1.0, "temperature": 0.0}


def with_counts(
    sampling: Mapping[str, Any], most: int, vocab_size: int, names: Mapping[str, str]
) -> Mapping[str, Any]:
    """The sampling with the numbers of logprobs that -1 stands for. Raise InvalidRequest for more
    than `most`, the limit of the nodes."""
    counts = {
        name: logprobs_within(names.get(name, name), sampling[name], most, vocab_size)
        for name in ("logprobs", "prompt_logprobs")
        if sampling.get(name) is not None
    }
    return {**sampling, **counts}


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
    tokens_field = names.get("max_tokens", "max_tokens")
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
            f"{limit}, but {prompt_tokens} tokens of prompt and {tokens_field} {wanted} make "
            f"{prompt_tokens + wanted}; ask for at most {room}",
            param=tokens_field,
        )
    applied = () if sampling.get("use_beam_search") else DEFAULTED  # a beam search draws nothing
    given = {name: defaults[name] for name in applied if name in defaults} | dict(sampling)
    if wanted is None:
        given["max_tokens"] = room if default_max_tokens is None else min(default_max_tokens, room)
    params = SamplingParams(**_likeliest(given))
    params.check()
    check_message(params)
    return params

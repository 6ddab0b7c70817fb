"""The fields of POST /inference/v1/generate, with vLLM's names: ids, and sampling parameters in an
object of their own. It reads what the render routes answer."""

from __future__ import annotations

from typing import Any

from baton_protocol.errors import InvalidRequest
from baton_protocol.sampling import ALL_LOGPROBS, MOST_LOGPROBS
from baton_router.openai.fields.errors import wrong
from baton_router.openai.fields.generation import LOGPROBS_LIMIT, GenerationFields
from baton_router.openai.fields.kinds import (
    ValueKind,
    boolean,
    choice,
    ids,
    integer,
    mapping,
    object_at,
    text,
)
from baton_router.openai.fields.table import (
    TRUE,
    FieldTable,
    check_names,
    flag,
    ignored,
    needs,
    optional,
    read_values,
    refused,
    required,
    rule,
    schema_of,
    stated,
)
from baton_router.openai.fields.tokens import MAX_IDS
from baton_router.openai.fields.unserved import UnservedFields

MAX_ID_CHARS = 128
ONE_RESTRICTION = "allowed_token_ids and structured_outputs are not both there"
GENERATE_AGREES = (
    "sampling_params has no prompt_logprobs with stream, and no detokenize false with output_mode"
    " text"
)
_ON_CALLERS_SIDE = "for a caller in the engine's process"
_FROM_FIRST = "a grammar applies from the first token on"


class SamplingFields(FieldTable):
    """The members of `sampling_params`."""

    n = GenerationFields.n
    temperature = GenerationFields.temperature
    top_p = GenerationFields.top_p
    top_k = GenerationFields.top_k
    min_p = GenerationFields.min_p
    seed = GenerationFields.seed
    frequency_penalty = GenerationFields.frequency_penalty
    presence_penalty = GenerationFields.presence_penalty
    repetition_penalty = GenerationFields.repetition_penalty
    logit_bias = GenerationFields.logit_bias
    allowed_token_ids = GenerationFields.allowed_token_ids
    bad_words = GenerationFields.bad_words
    structured_outputs = GenerationFields.structured_outputs
    extra_args = optional(
        GenerationFields.vllm_xargs.kind, "what `vllm_xargs` is in a chat or a completion"
    )
    max_tokens = optional(integer(1), "all generated tokens count", "what fits")
    min_tokens = GenerationFields.min_tokens
    stop = GenerationFields.stop
    stop_token_ids = GenerationFields.stop_token_ids
    include_stop_str_in_output = GenerationFields.include_stop_str_in_output
    ignore_eos = GenerationFields.ignore_eos
    logprobs = optional(
        integer(ALL_LOGPROBS, MOST_LOGPROBS),
        f"of each generated token and of this number of likely tokens; {LOGPROBS_LIMIT}",
        "off",
    )
    prompt_logprobs = GenerationFields.prompt_logprobs
    logprob_token_ids = GenerationFields.logprob_token_ids
    skip_special_tokens = GenerationFields.skip_special_tokens
    detokenize = flag(True, "false: no text, so no `stop` and no `output_mode` text")
    skip_reading_prefix_cache = GenerationFields.skip_reading_prefix_cache

    output_kind = ignored(integer(0, 2), _ON_CALLERS_SIDE)
    stream_interval = UnservedFields.stream_interval
    flat_logprobs = refused(_ON_CALLERS_SIDE)
    skip_clone = ignored(boolean(), _ON_CALLERS_SIDE)
    output_text_buffer_length = ignored(integer(0), _ON_CALLERS_SIDE)
    spaces_between_special_tokens = UnservedFields.spaces_between_special_tokens
    prompt_logprob_token_ids = refused("a prompt has the logprobs of its likeliest tokens")
    prompt_logprob_start = refused("a prompt has logprobs from its second token on")
    repetition_detection = UnservedFields.repetition_detection
    routed_experts_prompt_start = UnservedFields.routed_experts_prompt_start
    watermarking = UnservedFields.watermarking
    logits_processors = UnservedFields.logits_processors

    min_tokens_agree = GenerationFields.min_tokens_agree
    stop_needs_text = GenerationFields.stop_needs_text
    restrictions_agree = stated({"description": ONE_RESTRICTION})


def _read_sampling(at: str, value: Any) -> SamplingFields:
    given = object_at(at, value)
    check_names(SamplingFields, given, at)
    return read_values(SamplingFields, given, at)


class GenerateFields(FieldTable, route="/inference/v1/generate"):
    """Ids in, ids out."""

    token_ids = required(ids(MAX_IDS, least=1), "the prompt")
    sampling_params = optional(
        ValueKind(_read_sampling, schema_of(SamplingFields), SamplingFields),
        "how tokens are sampled, and what the answer has",
    )
    model = GenerationFields.model
    request_id = optional(
        text(MAX_ID_CHARS), "the answer's `request_id` ends with it", "`x-baton-request-id`"
    )
    output_mode = optional(
        choice("tokens", "text"),
        "`text` adds `text`, and `token` and `bytes` to each of the `logprobs`",
        "`tokens`",
    )
    stream = GenerationFields.stream
    stream_options = GenerationFields.stream_options
    return_token_ids = flag(False, "the answer, or a stream's first event, has `prompt_token_ids`")
    return_tokens_as_token_ids = flag(
        False, "with `output_mode` text, `token` is the token's id: `token_id:7`"
    )
    priority = GenerationFields.priority

    prompt = ignored(text(), "the ids are the prompt; the render routes answer with their text")
    cache_salt = UnservedFields.cache_salt
    kv_transfer_params = UnservedFields.kv_transfer_params
    ec_transfer_params = UnservedFields.ec_transfer_params
    features = refused("a prompt has no media")
    content_parts = refused("a prompt has no media")
    token_offsets = refused("the text of a prompt is not read")
    reasoning_ended = refused(_FROM_FIRST, accepts=(True,))
    reasoning_parser_kwargs = ignored(mapping(), _FROM_FIRST)

    streams = stated(
        needs("stream_options", {"type": "object", "minProperties": 1}, "stream", TRUE),
    )

    @rule("stream_options")
    def check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed when stream is true", param="stream_options"
            )

    @rule("sampling_params", schemas=[{"description": GENERATE_AGREES}])
    def check_sampling(self) -> None:
        sampling = self.sampling_params
        assert sampling is not None, "a rule is checked if its field is given"
        if self.stream and sampling.prompt_logprobs is not None:
            raise wrong(
                "sampling_params.prompt_logprobs",
                sampling.prompt_logprobs,
                "a stream does not have them; leave out one of both",
            )
        if self.output_mode == "text" and not sampling.detokenize:
            raise wrong(
                "sampling_params.detokenize", False, "output_mode is text; leave out one of both"
            )

"""Fields that change no answer: those that are accepted without an effect, and those that are
refused, with the reason. The router refuses a field that would change the answer in a way it does
not support, unless the value asks for nothing."""

from __future__ import annotations

from typing import Any

from baton_protocol.errors import InvalidRequest
from baton_router.openai.fields.errors import wrong
from baton_router.openai.fields.kinds import (
    Json,
    ValueKind,
    boolean,
    integer,
    mapping,
    object_at,
    only,
    text,
)
from baton_router.openai.fields.table import FieldTable, ignored, refused, unsupported

MAX_METADATA = 16
WHITESPACE = "whitespace between JSON tokens is always bounded"
BACKEND = "there is one backend"
TEXT_ONLY = "models read and write text only"
CACHED = "a hint; every prefix is cached anyway"
_ROUTED = "a hint; the router knows where prefixes are cached"
_KEPT = "a hint; every prefix is cached while there is room"
_CLIENTS_OWN = "for the client's own use"
_NO_MEDIA = "messages have no media"
_SEPARATED = "reasoning is always separated from the answer if the model's form of it is known"
_NOT_ANSWERED = "answers do not contain it"
_NO_CODE = "clients cannot send code"
_NO_PLUG_INS = "logits processors of other packages get `vllm_xargs`"
_ROUTER_DECIDES = "the router decides about hand-offs"
_BY_HEADER = "name a request by the header `x-request-id`"
_NO_ADAPTERS = "there are no adapters"
# The API key determines whose KV a request may use.
_BY_KEY = "a request cannot set it: the API key determines it"


def _read_metadata(at: str, value: Any) -> Json:
    pairs = object_at(at, value)
    if len(pairs) > MAX_METADATA:
        raise InvalidRequest(f"{at} holds {len(pairs)} pairs; at most {MAX_METADATA}", param=at)
    for name, item in pairs.items():
        if not isinstance(item, str):
            raise wrong(at, {name: item}, "each value must be a string")
    return pairs


METADATA = ValueKind(
    _read_metadata,
    {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "maxProperties": MAX_METADATA,
    },
)


class UnservedFields(FieldTable):
    """Fields of generations that change no answer."""

    user = ignored(text(), _CLIENTS_OWN)
    metadata = ignored(METADATA, _CLIENTS_OWN)
    safety_identifier = ignored(text(), _CLIENTS_OWN)
    session_id = ignored(text(), _ROUTED)
    prompt_cache_key = ignored(text(), _ROUTED)
    prompt_cache_retention = ignored(text(), _KEPT)
    prompt_cache_options = ignored(mapping(), _KEPT)
    cache_control = ignored(mapping(), CACHED)
    store = ignored(boolean(False), "no answer is stored, so none can be retrieved later")
    service_tier = ignored(
        only(("auto", "default"), unsupported("there is one tier")), "there is one tier"
    )
    stream_interval = ignored(integer(1), "an event is sent as soon as it has a token")
    media_io_kwargs = ignored(mapping(), _NO_MEDIA)
    mm_processor_kwargs = ignored(mapping(), _NO_MEDIA)
    mm_payload = ignored(text(), _NO_MEDIA)

    functions = refused("use `tools` of /v1/chat/completions")
    function_call = refused("use `tool_choice` of /v1/chat/completions", accepts=("none", "auto"))
    guided_decoding_backend = refused(BACKEND)
    guided_whitespace_pattern = refused(WHITESPACE)
    json_schema = refused("use `structured_outputs`")
    regex = refused("use `structured_outputs`")
    ebnf = refused("use `structured_outputs`")
    stream_reasoning = refused(_SEPARATED, accepts=(True,))
    separate_reasoning = refused(_SEPARATED, accepts=(True,))
    audio = refused(TEXT_ONLY)
    modalities = refused(TEXT_ONLY, accepts=(["text"],))
    suffix = refused("no model fills in a middle")
    chat_template = refused("a template is a program; only the model's own is run")
    prediction = refused("predictions are not used")
    verbosity = refused("there are no levels of verbosity", accepts=("medium",))
    web_search_options = refused("there is no web search", accepts=())
    moderation = refused("there is no moderation", accepts=())
    prompt_embeds = refused("prompts are text or ids")
    prompt_token_ids = refused("send ids as `prompt` of /v1/completions")
    return_prompt_text = refused(_NOT_ANSWERED)
    return_token_offsets = refused(_NOT_ANSWERED)
    return_hidden_states = refused(_NOT_ANSWERED)
    return_mm_kwargs = refused(_NOT_ANSWERED)
    routed_experts_prompt_start = refused(_NOT_ANSWERED, accepts=(0,))
    logits_processors = refused(_NO_CODE)
    custom_logit_processor = refused(_NO_CODE)
    custom_params = refused(_NO_PLUG_INS)
    repetition_detection = refused("repetitions are not detected")
    watermarking = refused("answers are not watermarked")
    kv_transfer_params = refused(_ROUTER_DECIDES)
    ec_transfer_params = refused(_ROUTER_DECIDES)
    request_id = refused(_BY_HEADER)
    rid = refused(_BY_HEADER)
    no_stop_trim = refused("use `include_stop_str_in_output`")
    stop_regex = refused("stops are texts and ids")
    spaces_between_special_tokens = refused(
        "special tokens are in the text unchanged", accepts=(True,)
    )
    cache_salt = refused(_BY_KEY, complaint=f"{_BY_KEY}; leave it out")
    salt = refused(_BY_KEY, complaint=f"{_BY_KEY}; leave it out")
    extra_key = refused(_BY_KEY, complaint=f"{_BY_KEY}; leave it out")
    tenant = refused(_BY_KEY, complaint=f"{_BY_KEY}; leave it out")
    adapter = refused(_NO_ADAPTERS)
    adapter_digest = refused(_NO_ADAPTERS)
    lora_path = refused(_NO_ADAPTERS)

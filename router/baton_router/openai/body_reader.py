"""Reads a JSON object field by field, so that each error names field, value and range.

A typed decoder would be shorter, but it answers "Expected `int` - at `$.max_tokens`", which names
neither the value sent nor the values allowed. Null counts as absent, as in OpenAI's API. The API
document takes its bounds from the readers' arguments (`body_schema`), so each bound is written
once.

The table of fields (Field, Members) lists the names that a body may hold, what the server does with
each, and why. Any other name is refused with the closest known one, except in OPEN objects, where a
client sends back what it or another server added. An unsupported field is refused if its value asks
for something (`endpoint`). docs/api.md and GET /openapi.json list the fields
(`field_docs`, `body_schema`). Bounds are not in the table; they are given where a field is read. A
row's name is its path: `stream_options.include_usage`, `messages[].content[].text`.
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any, Literal

import msgspec

from baton_protocol.errors import InvalidRequest, MalformedBody, TooLarge, exact

Body = Literal["chat", "completions", "drain", "resume"]
Does = Literal["obeyed", "ignored", "refused"]
ROUTES: Mapping[Body, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "drain": "/nodes/{node}/drain",
    "resume": "/nodes/{node}/resume",
}
CHAT: tuple[Body, ...] = ("chat",)
COMPLETIONS: tuple[Body, ...] = ("completions",)
BOTH: tuple[Body, ...] = ("chat", "completions")
DRAIN: tuple[Body, ...] = ("drain",)

Values = tuple[Any, ...]
EMPTY: Values = (False, 0, "", [], {})
# Objects that clients take from earlier answers or share with other servers: a name that is not in
# the table is ignored there.
OPEN = (
    *("messages[]", "messages[].content[]"),
    *("tools[]", "tools[].function", "tool_choice", "tool_choice.function"),
)
ALIKE = 0.7  # similarity, 0 to 1, from which a name counts as a misspelt field
SHOWN = 60  # characters of an unknown name that an error compares and repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of one or more bodies.

    `accepts` are the values that pass beside null (None: the reader decides). `complaint` is the
    error for any other value. `default` is empty if the reader knows it or if there is none.
    `remark` is the text for users.
    """

    name: str
    bodies: tuple[Body, ...]
    does: Does
    remark: str
    default: str = ""
    accepts: Values | None = None
    complaint: str = ""

    @property
    def plain_remark(self) -> str:
        """The remark without links."""
        return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", self.remark)


@dataclass(frozen=True, slots=True)
class Members:
    """The fields of one JSON object: a body (`path` is empty) or an object inside one."""

    body: Body
    path: str
    fields: Mapping[str, Field]

    @property
    def open(self) -> bool:
        """Whether other names are ignored."""
        return self.path in OPEN

    def check(self, given: Mapping[str, Any], at: str = "") -> None:
        """Raise InvalidRequest for an unknown name, unless its value is null; in an open object for
        a refused one, unless its value asks for nothing. `at` is the object's path in the client's
        body."""
        if self.open:
            self._check_refused(given, at)
            return
        if given.keys() <= self.fields.keys():
            return
        for name, value in given.items():
            if name not in self.fields and value is not None:
                raise self._unknown(name, at)

    def _check_refused(self, given: Mapping[str, Any], at: str) -> None:
        for name, value in given.items():
            field = self.fields.get(name)
            if field is None or field.does != "refused" or value is None:
                continue
            if value not in (field.accepts or ()):
                raise wrong(f"{at}.{name}", value, field.complaint)

    def obeyed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The members of an object that the server does something with."""
        return {
            name: value
            for name, value in given.items()
            if name in self.fields and self.fields[name].does == "obeyed"
        }

    def _unknown(self, name: str, at: str) -> InvalidRequest:
        shown = name if len(name) <= SHOWN else name[:SHOWN] + "..."
        param = f"{at}.{shown}" if at else shown
        route = ROUTES[self.body]
        elsewhere = [
            ROUTES[body]
            for (body, path), others in MEMBERS.items()
            if path == self.path and body != self.body and name in others.fields
        ]
        message = f"{param!r} is not a field of {route}"
        if elsewhere:
            message += f" but of {' and '.join(elsewhere)}; leave it out"
        elif close := get_close_matches(name[:SHOWN], self._meant(), n=1, cutoff=ALIKE):
            message += f"; did you mean {close[0]!r}?"
        else:
            message += "; leave it out"
        return InvalidRequest(message, param=param, code="unknown_parameter")

    def _meant(self) -> Iterable[str]:
        """The names to suggest: all fields that are not refused."""
        return [name for name, field in self.fields.items() if field.does != "refused"]


def _unsupported(remark: str) -> str:
    return f"this server does not support it: {remark}; leave it out"


def _obeyed(name: str, bodies: tuple[Body, ...], remark: str, default: str = "") -> Field:
    return Field(name=name, bodies=bodies, does="obeyed", remark=remark, default=default)


def _ignored(
    name: str, remark: str, accepts: Values | None = None, bodies: tuple[Body, ...] = BOTH
) -> Field:
    return Field(
        name=name,
        bodies=bodies,
        does="ignored",
        remark=remark,
        accepts=accepts,
        complaint=_unsupported(remark),
    )


def _refused(
    remark: str,
    *names: str,
    accepts: Values = EMPTY,
    complaint: str = "",
    bodies: tuple[Body, ...] = BOTH,
) -> Iterable[Field]:
    for name in names:
        yield Field(
            name=name,
            bodies=bodies,
            does="refused",
            remark=remark,
            accepts=accepts,
            complaint=complaint or _unsupported(remark),
        )


def _the_keys(*names: str) -> Iterable[Field]:
    """Fields that a request must not set, because its API key determines whose KV it may use."""
    remark = "a request cannot set it: the API key determines it"
    return _refused(remark, *names, complaint=f"{remark}; leave it out")


_CACHED = "a hint; every prefix is cached anyway"
_MEDIA = "models read and write text only"
_BEGUN = ("messages[].prefix", "messages[].partial")
_INPUTS = tuple(f"messages[].{name}" for name in ("audio", "images", "videos", "files"))
_INPUT = (
    _obeyed("model", BOTH, "another name is a 404 that lists the known ones", "the pool's"),
    _obeyed("messages", CHAT, "the conversation; required"),
    _obeyed(
        "messages[].role",
        CHAT,
        "`system`, `developer`, `user`, `assistant`, or another role of the template"
        " ([below](#roles))",
    ),
    _obeyed("messages[].content", CHAT, "a text, or parts whose texts are joined by newlines"),
    _obeyed(
        "messages[].content[].type",
        CHAT,
        "`text`, `refusal`, or reasoning ([below](#what-a-client-may-send-back))",
    ),
    _obeyed("messages[].content[].text", CHAT, "the part's text"),
    _obeyed("messages[].content[].refusal", CHAT, "the text of a part of type `refusal`"),
    *(
        _ignored(f"messages[].{name}", _CACHED, bodies=CHAT)
        for name in (
            *("content[].cache_control", "content[].prompt_cache_breakpoint", "cache_control"),
        )
    ),
    *(
        _obeyed(f"messages[].{name}", CHAT, "passed to the model's template unchanged")
        for name in (
            *("name", "tool_call_id", "function_call"),
            *("reasoning_content", "reasoning", "thinking", "tool_plan", "refusal", "annotations"),
        )
    ),
    *_refused("use `continue_final_message`", *_BEGUN, bodies=CHAT),
    *_refused(_MEDIA, *_INPUTS, bodies=CHAT),
    _obeyed(
        "messages[].tool_calls",
        CHAT,
        "the calls of an assistant's message; the template receives their arguments as an object"
        " ([more](tools.md#answering-a-call))",
    ),
    _obeyed(
        "prompt",
        COMPLETIONS,
        "each prompt is answered separately; required",
    ),
    _obeyed("chat_template_kwargs", CHAT, "variables for the chat template, which may ignore them"),
    _obeyed("documents", CHAT, "passed to the model's template, which may ignore them"),
    _obeyed("add_generation_prompt", CHAT, "end the prompt where the assistant's message begins"),
    _obeyed(
        "continue_final_message",
        CHAT,
        "end the prompt where the last message ends; the answer continues it"
        " ([below](#continuing-a-message))",
    ),
    _obeyed(
        "truncate_prompt_tokens",
        BOTH,
        "keep at most this number of tokens of each prompt; -1: what fits ([below](#long-prompts))",
        "all",
    ),
    _obeyed(
        "truncation_side", BOTH, "`left` keeps the last tokens, `right` the first ones", "`left`"
    ),
    _obeyed("add_special_tokens", BOTH, "add the tokenizer's own tokens (BOS) to the text"),
)
_SAMPLING = (
    _obeyed("temperature", BOTH, "0 is greedy", "the model's, else 1"),
    _obeyed(
        "top_p",
        BOTH,
        "1 is off; 0 leaves the likeliest token, as temperature 0 does",
        "the model's, else 1",
    ),
    _obeyed("top_k", BOTH, "-1 and 0 are off", "the model's, else -1"),
    _obeyed("min_p", BOTH, "0 is off", "the model's, else 0"),
    _obeyed(
        "seed",
        BOTH,
        "key of the random numbers, the same on every node ([the same tokens](#the-same-tokens))",
        "random",
    ),
    _obeyed(
        "n",
        BOTH,
        "choices; prompts times `n` are at most [2,048](operations/limits.md#admission)",
        "1",
    ),
    _obeyed("best_of", BOTH, "may only repeat `n`", "`n`"),
    _obeyed(
        "frequency_penalty",
        BOTH,
        "subtracted from an id's logit for each time it was generated",
        "0",
    ),
    _obeyed(
        "presence_penalty", BOTH, "subtracted once from an id's logit if it was generated", "0"
    ),
    _obeyed(
        "repetition_penalty",
        BOTH,
        "divides positive logits of ids in prompt and answer, multiplies negative ones",
        "the model's, else 1",
    ),
    _obeyed("logit_bias", BOTH, "added to the logits of these ids"),
    _obeyed("allowed_token_ids", BOTH, "only these ids are generated", "all"),
    _obeyed(
        "bad_words",
        BOTH,
        "never generated, neither at the start of a text nor after a space; each at most 64 tokens",
    ),
)
_BACKEND = "there is one backend"
_FORMAT = "what the answer must match ([structured output](structured-output.md))"
_WHITESPACE = "whitespace between JSON tokens is always bounded"
_STRUCTURED = (
    _obeyed("response_format", BOTH, _FORMAT, "`text`"),
    _obeyed(
        "response_format.type", BOTH, "`text`, `json_object`, `json_schema` or `structural_tag`"
    ),
    _obeyed("response_format.json_schema", BOTH, "of type `json_schema`"),
    _obeyed("response_format.json_schema.schema", BOTH, "the JSON schema; required"),
    _ignored("response_format.json_schema.name", "a text for the client's own use"),
    _ignored("response_format.json_schema.description", "a text for the client's own use"),
    _ignored("response_format.json_schema.strict", "true or false; each schema is enforced"),
    _obeyed(
        "response_format.structures", BOTH, "of type `structural_tag`: `begin`, `schema`, `end`"
    ),
    _obeyed("response_format.triggers", BOTH, "of type `structural_tag`: each begins a structure"),
    _obeyed("structured_outputs", BOTH, "the same, with exactly one of these kinds"),
    _obeyed("structured_outputs.json", BOTH, "a JSON schema: an object, or its text"),
    _obeyed("structured_outputs.json_object", BOTH, "true: any JSON object"),
    _obeyed("structured_outputs.regex", BOTH, "what the whole answer matches"),
    _obeyed("structured_outputs.choice", BOTH, "a list of texts, one of which is the answer"),
    _obeyed("structured_outputs.grammar", BOTH, "a grammar in Lark or EBNF"),
    _obeyed(
        "structured_outputs.structural_tag", BOTH, "`structures` and `triggers`, or their text"
    ),
    _ignored("structured_outputs.disable_fallback", f"true or false; {_BACKEND}"),
    *_refused(
        _WHITESPACE,
        "structured_outputs.disable_any_whitespace",
        "structured_outputs.whitespace_pattern",
        accepts=(False,),
    ),
    *_refused(
        "write it in the schema",
        "structured_outputs.disable_additional_properties",
        accepts=(False,),
    ),
    _obeyed("guided_json", BOTH, "the older name of `structured_outputs.json`"),
    _obeyed("guided_regex", BOTH, "the older name of `structured_outputs.regex`"),
    _obeyed("guided_choice", BOTH, "the older name of `structured_outputs.choice`"),
    _obeyed("guided_grammar", BOTH, "the older name of `structured_outputs.grammar`"),
)
_CALLS = (
    _obeyed("tools", CHAT, "functions that the model may call ([tools](tools.md))"),
    *(
        _ignored(f"tools[].{name}", _CACHED, bodies=CHAT)
        for name in ("cache_control", "function.cache_control")
    ),
    *_refused(
        "use `function.parameters`",
        *(f"tools[].{name}" for name in ("input_schema", "function.input_schema")),
        bodies=CHAT,
    ),
    _obeyed("tools[].type", CHAT, "only `function`; required"),
    _obeyed("tools[].function", CHAT, "required"),
    _obeyed("tools[].function.name", CHAT, "up to 64 letters, digits, `_`, `.`, `-`; required"),
    _obeyed("tools[].function.description", CHAT, "passed to the model's template"),
    _obeyed("tools[].function.parameters", CHAT, "the JSON schema of its arguments", "none"),
    _obeyed(
        "tools[].function.strict",
        CHAT,
        "true: its arguments match `parameters` in each call ([more](tools.md#strict))",
        "false",
    ),
    _obeyed(
        "tool_choice",
        CHAT,
        "`none`, `auto`, `required`, or the function to call; only with `tools`",
        "`auto` with `tools`",
    ),
    _obeyed("tool_choice.type", CHAT, "only `function`; required"),
    _obeyed("tool_choice.function", CHAT, "required"),
    _obeyed("tool_choice.function.name", CHAT, "one of `tools`; required"),
    *(
        _ignored(f"tool_choice.function.{name}", "the tool's own counts", bodies=CHAT)
        for name in ("description", "parameters", "strict")
    ),
    _obeyed("parallel_tool_calls", CHAT, "false: at most one call; only with `tools`"),
    _obeyed(
        "reasoning_effort",
        CHAT,
        "passed to the model's template, which may ignore it; `none` also sets"
        " `enable_thinking` to false there ([reasoning](tools.md#reasoning))",
    ),
    _obeyed("include_reasoning", CHAT, "false: reasoning is left out of the answer"),
    _obeyed(
        "thinking_token_budget",
        CHAT,
        "maximum tokens of reasoning, -1 for no bound; only for models whose reasoning the router"
        " can separate",
        "no bound",
    ),
)
_ENDS = (
    _obeyed(
        "max_tokens",
        BOTH,
        "all generated tokens count; 0 with `echo` generates none",
        "chat: what fits; completions: 16",
    ),
    _obeyed("max_completion_tokens", BOTH, "the newer name of `max_tokens`", "`max_tokens`"),
    _obeyed(
        "min_tokens",
        BOTH,
        "at most `max_tokens`; neither EOS nor `stop` ends the answer earlier",
        "0",
    ),
    _obeyed(
        "stop",
        BOTH,
        "the text ends before the first one that occurs; `stop_reason` names it",
    ),
    _obeyed("stop_token_ids", BOTH, "the same for ids"),
    _obeyed("include_stop_str_in_output", BOTH, "the text ends after the stop instead"),
    _obeyed("ignore_eos", BOTH, "continue after EOS"),
)
_OUTPUT = (
    _obeyed("stream", BOTH, "server-sent events"),
    _obeyed("stream_options", BOTH, "only with `stream`"),
    _obeyed("stream_options.include_usage", BOTH, "usage in a last event"),
    _obeyed(
        "stream_options.continuous_usage_stats",
        BOTH,
        "with `include_usage`, in every event: usage of its choice so far",
    ),
    Field(
        name="stream_options.include_obfuscation",
        bodies=BOTH,
        does="refused",
        remark="events are not padded to hide their length",
        accepts=(False,),
        complaint="this server does not pad events; leave it out",
    ),
    _obeyed("logprobs", CHAT, "of each generated token"),
    _obeyed(
        "logprobs",
        COMPLETIONS,
        "of each generated token and of this number of likely tokens",
        "off",
    ),
    _obeyed("top_logprobs", CHAT, "number of likely tokens, with `logprobs`", "0"),
    _obeyed(
        "prompt_logprobs", BOTH, "the same for the prompt's tokens, by id; not with `stream`", "off"
    ),
    _obeyed(
        "echo", CHAT, "the text begins with the last message's text if that is the assistant's"
    ),
    _obeyed("echo", COMPLETIONS, "text and `logprobs` begin with the prompt's"),
    _obeyed(
        "skip_special_tokens",
        BOTH,
        "leave EOS and other special tokens out of generated text, but not out of `echo`",
    ),
    _obeyed("return_token_ids", BOTH, "fills `prompt_token_ids` and `token_ids`, else null"),
    _obeyed(
        "return_tokens_as_token_ids", BOTH, "`logprobs` name tokens by their ids: `token_id:7`"
    ),
    _obeyed(
        "detokenize",
        BOTH,
        "false: no text; needs `return_token_ids`, excludes `stop`, and costs less",
    ),
)
_ACCEPTED = (
    _ignored("user", "for the client's own use"),
    _ignored("metadata", "for the client's own use"),
    _ignored("safety_identifier", "for the client's own use"),
    _ignored("session_id", "a hint; the router knows where prefixes are cached"),
    _ignored("prompt_cache_key", "a hint; the router knows where prefixes are cached"),
    _ignored("prompt_cache_retention", "a hint; every prefix is cached while there is room"),
    _ignored("prompt_cache_options", "a hint; every prefix is cached while there is room"),
    _ignored("cache_control", _CACHED),
    _ignored("store", "no answer is stored, so none can be retrieved later"),
    _ignored("service_tier", "there is one tier", ("auto", "default")),
    _ignored("stream_interval", "an event is sent as soon as it has a token"),
    _ignored("media_io_kwargs", "messages have no media"),
    _ignored("mm_processor_kwargs", "messages have no media"),
    _ignored("mm_payload", "messages have no media"),
)
_SEPARATED = "reasoning is always separated from the answer if the model's form of it is known"
_BEAMS = "there is no beam search"
_UNSUPPORTED = (
    *_refused("use `tools` of /v1/chat/completions", "functions"),
    *_refused(
        "use `tool_choice` of /v1/chat/completions", "function_call", accepts=("none", "auto")
    ),
    *_refused(_BACKEND, "guided_decoding_backend"),
    *_refused(_WHITESPACE, "guided_whitespace_pattern"),
    *_refused("use `structured_outputs`", "json_schema", "regex", "ebnf"),
    *_refused(_SEPARATED, "stream_reasoning", "separate_reasoning", accepts=(True,)),
    *_refused(_BEAMS, "use_beam_search", "early_stopping"),
    *_refused(_BEAMS, "length_penalty", accepts=(1,)),
    *_refused(_MEDIA, "audio"),
    *_refused(_MEDIA, "modalities", accepts=(["text"],)),
    *_refused("no model fills in a middle", "suffix"),
    *_refused("a template is a program; only the model's own is run", "chat_template"),
    *_refused("predictions are not used", "prediction"),
    *_refused("there are no levels of verbosity", "verbosity", accepts=("medium",)),
    *_refused("there is no web search", "web_search_options", accepts=()),
    *_refused("there is no moderation", "moderation", accepts=()),
    *_refused("prompts are text or ids", "prompt_embeds"),
    *_refused("send ids as `prompt` of /v1/completions", "prompt_token_ids"),
    *_refused("only the likeliest tokens have logprobs", "logprob_token_ids"),
    *_refused("answers do not contain it", "return_prompt_text", "return_token_offsets"),
    *_refused("answers do not contain it", "return_hidden_states", "return_mm_kwargs"),
    *_refused("answers do not contain it", "routed_experts_prompt_start", accepts=(0,)),
    *_refused("clients cannot send code", "logits_processors", "custom_logit_processor"),
    *_refused("there are no engine plug-ins", "vllm_xargs", "custom_params"),
    *_refused("repetitions are not detected", "repetition_detection"),
    *_refused("answers are not watermarked", "watermarking"),
    *_refused("the API key determines it", "priority"),
    *_refused("the router decides about hand-offs", "kv_transfer_params", "ec_transfer_params"),
    *_refused("name a request by the header `x-request-id`", "request_id", "rid"),
    *_refused("use `include_stop_str_in_output`", "no_stop_trim"),
    *_refused("stops are texts and ids", "stop_regex"),
    *_refused(
        "special tokens are in the text unchanged",
        "spaces_between_special_tokens",
        accepts=(True,),
    ),
)
_DERIVED = tuple(_the_keys("cache_salt", "salt", "extra_key", "tenant"))
_NO_ADAPTERS = tuple(_refused("there are no adapters", "adapter", "adapter_digest", "lora_path"))
_DRAINS = (
    _obeyed("deadline_s", DRAIN, "seconds that running requests may stay", "`--drain-timeout`"),
    _obeyed("reason", DRAIN, "one line for logs and `/pool`"),
    _obeyed(
        "replaced_by",
        DRAIN,
        "the revision that replaces the node's ([rolling out](operations/upgrade.md#rolling-out))",
    ),
)
FIELDS: tuple[Field, ...] = (
    *(*_INPUT, *_SAMPLING, *_STRUCTURED, *_CALLS, *_ENDS, *_OUTPUT),
    *(*_ACCEPTED, *_UNSUPPORTED, *_DERIVED, *_NO_ADAPTERS, *_DRAINS),
)


def _members() -> Mapping[tuple[Body, str], Members]:
    found: dict[tuple[Body, str], dict[str, Field]] = {}
    for field in FIELDS:
        path, _, name = field.name.rpartition(".")
        for body in field.bodies:
            found.setdefault((body, path), {})[name] = field
    nothing: dict[tuple[Body, str], dict[str, Field]] = {("resume", ""): {}}
    return {key: Members(*key, fields) for key, fields in (found | nothing).items()}


MEMBERS = _members()


# Limit per body: each value takes up to 72 bytes, however short its JSON. Few contexts are longer.
MAX_VALUES = 1 << 20
SLICE = 1 << 18  # bytes; a slice takes up to 3 ms to decode
_QUOTE, _BACKSLASH = b'"', ord("\\")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors and shells put it before a text
_ESCAPE_BYTES = 12  # at most: a surrogate pair
# Start of an escape that is not the second half of a surrogate pair.
_ESCAPE = re.compile(rb"(?<!\\)(?:\\\\)*(?<!\\u[dD][89abAB][0-9a-fA-F]{2})(?=\\)")


def check_size(data: bytes | bytearray, most: int = MAX_VALUES) -> None:
    """Raise TooLarge for JSON with more than `most` values, counted by commas and brackets."""
    count, at = 0, 0
    for start, end in (*_strings(data), (len(data), len(data))):
        for begin in range(at, start, SLICE):
            until = min(start, begin + SLICE)
            count += sum(data.count(sign, begin, until) for sign in (b",", b"[", b"{"))
        if count > most:
            raise TooLarge(
                f"the body holds more than {most} values; send fewer ids or prompts at a time"
            )
        at = end


def decode(data: bytes | bytearray, size: int = SLICE) -> Any:
    """Decode JSON that may be large, in short steps and within bounded memory.

    In: the bytes of a body. Out: what msgspec makes of them. msgspec holds the interpreter lock
    until it is done, up to 150 ms for a text of 16 MB, which would stop every stream even from a
    thread. Strings longer than `size` bytes are therefore decoded in slices. Call check_size()
    first: a body of 16 MB may hold 8 million values of 72 bytes each.

    Without such strings it equals msgspec.json.decode.
    """
    if len(data) <= size:
        return msgspec.json.decode(data)
    long = [(start, end) for start, end in _strings(data) if end - start > size]
    if not long:
        return msgspec.json.decode(data)
    mark, at = secrets.token_hex(16), 0
    rest: list[bytes | bytearray] = []
    texts = {}
    for number, (start, end) in enumerate(long):
        name = f"{mark}{number}"
        texts[name] = "".join(_decoded(data, start, end, size))
        rest += [data[at:start], name.encode()]
        at = end
    value = msgspec.json.decode(b"".join([*rest, data[at:]]))
    return _with_texts(value, texts)


def _strings(data: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Start and end of each string, without its quotes."""
    at = 0
    while (quote := data.find(_QUOTE, at)) >= 0:
        at = _string_end(data, quote + 1)
        yield quote + 1, at - 1


def _string_end(data: bytes | bytearray, at: int) -> int:
    """The offset after the quote that ends the string which contains offset `at`."""
    while (end := data.find(_QUOTE, at)) >= 0:
        first = end
        while data[first - 1] == _BACKSLASH:
            first -= 1
        at = end + 1
        if (end - first) % 2 == 0:
            return at
    return len(data) + 1


def _decoded(data: bytes | bytearray, start: int, end: int, size: int) -> Iterator[str]:
    while start < end:
        cut = end if end - start <= size else _cut(data, start, start + size)
        part = b"".join((_QUOTE, data[start : cut or end], _QUOTE))
        yield msgspec.json.decode(part, type=str)
        start = cut or end


def _cut(data: bytes | bytearray, start: int, end: int) -> int:
    """An offset up to `end` that is inside no character and no escape; 0 if none exists."""
    while end > start and data[end] & 0xC0 == 0x80:
        end -= 1
    if end == start:
        return 0
    near = max(start, end - 8 * _ESCAPE_BYTES)
    if data.find(b"\\", max(near, end - _ESCAPE_BYTES), end) < 0:
        return end
    last = 0
    for found in _ESCAPE.finditer(data, near, end):
        last = found.end()
    return last if last > start else 0


def _with_texts(value: Any, texts: dict[str, str]) -> Any:
    """Replace each placeholder in the value by its text. There are few, so the search stops as soon
    as all are found."""
    whole = [value]
    left = set(texts)
    looking: deque[Any] = deque([whole])
    while looking and left:
        within = looking.popleft()
        items = within.items() if isinstance(within, dict) else enumerate(within)
        for key, one in list(items):
            if isinstance(one, str) and one in texts:
                within[key] = texts[one]
                left.discard(one)
            elif isinstance(one, list | dict):
                looking.append(one)
            if isinstance(key, str) and key in texts:
                within[texts[key]] = within.pop(key)
                left.discard(key)
    return whole[0]


Schema = Mapping[str, Any]
ANY: Schema = {}  # matches every value
TRUE: Schema = {"const": True}
NOTHING_ELSE: Schema = {"additionalProperties": {"type": "null"}}
NOT_FALSE: Schema = {"enum": [True, None]}


class _Missing:
    """Stands for the value of a member that an object does not have."""


MISSING = _Missing()


def show(value: object) -> str:
    """The value as JSON, truncated; the word "missing" for MISSING."""
    if value is MISSING:
        return "missing"
    try:
        text = msgspec.json.encode(_beginning(value)).decode()
    except (TypeError, msgspec.MsgspecError):
        text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _beginning(value: object, depth: int = SHOWN) -> object:
    """The part of the value that is shown, as a client's value may be long and deep."""
    if isinstance(value, str):
        return value[: SHOWN + 1]
    if isinstance(value, list):
        return [_beginning(one, depth - 1) for one in value[: SHOWN + 1]] if depth else []
    if isinstance(value, dict):
        some = islice(value.items(), SHOWN + 1)
        return {_beginning(k): _beginning(v, depth - 1) for k, v in some} if depth else {}
    return value


def wrong(name: str, value: object, allowed: str) -> InvalidRequest:
    """The error for a field with a value that is not allowed. The value of a member of an object
    is `given.get(name, MISSING)`, so that the error tells null from missing."""
    return InvalidRequest(f"{name} is {show(value)}; {allowed}", param=name)


def members_schema(members: Members, **known: Schema) -> Schema:
    """The JSON schema of an object with these members, and no others unless it is open. `known`
    holds the schemas of some members."""
    properties = {
        name: {"description": field.plain_remark} | dict(known.get(name) or _limits(field, members))
        for name, field in members.fields.items()
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return schema if members.open else schema | dict(NOTHING_ELSE)


def _limits(field: Field, members: Members) -> Schema:
    """What `Members.check` allows as the value of a field."""
    if members.open and field.does == "refused":
        return {"enum": [None, *(field.accepts or ())]}
    return ANY


def needs(name: str, given: Schema, other: str, wanted: Schema, *, absent: bool = False) -> Schema:
    """The rule that `other` must match `wanted` if `name` matches `given`. With `absent`, `other`
    may be missing."""
    then = {"properties": {other: wanted}} | ({} if absent else {"required": [other]})
    return {"if": {"properties": {name: given}, "required": [name]}, "then": then}


class Fields:
    """A request body. Every reader returns None (or the default) for an absent or null field."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Fields:
        """Raise MalformedBody unless `data` is a JSON object, with or without a byte order mark."""
        if data.startswith(_BYTE_ORDER_MARK):
            data = data[len(_BYTE_ORDER_MARK) :]
        try:
            body = decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedBody(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise MalformedBody(f"the body is {show(body)}; it must be a JSON object")
        return cls(body)

    def __bool__(self) -> bool:
        return bool(self._body)

    def only(self, members: Members) -> None:
        """Raise InvalidRequest for a field outside `members`, unless it is null."""
        members.check(self._body)

    def raw(self, name: str, schema: Schema, *, required: bool = False) -> Any:
        """The raw value, MISSING for a `required` field that is not there. The caller checks it
        against `schema`, which only documents it."""
        return self._body.get(name, MISSING if required else None)

    def rule(self, schema: Schema) -> None:
        """Document a rule over several fields; the caller enforces it."""

    def given(self, names: Iterable[str]) -> bool:
        """Whether any of these fields is set; if none is, the caller can skip reading them."""
        if self._body.keys().isdisjoint(names):  # the usual case, at 20 ns a name
            return False
        return any(self._body.get(name) is not None for name in names)

    def integer(self, name: str, low: int | None = None, high: int | None = None) -> int | None:
        """An integer of 64 bits; 16.0 passes as 16, true does not pass as 1."""
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong(name, value, "it must be an integer")
        if not -(1 << 63) <= value < 1 << 63:
            raise wrong(name, value, "it must fit 64 bits")
        if (low is not None and value < low) or (high is not None and value > high):
            raise wrong(name, value, f"it must be {_interval(low, high)}")
        return value

    def number(
        self, name: str, low: float | None = None, high: float | None = None
    ) -> float | None:
        """A number of at least `low` and at most `high`."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong(name, value, "it must be a number")
        try:
            number = float(value)
        except OverflowError:
            raise wrong(name, value, "it must be a number that fits 64 bits") from None
        if not _inside(number, low, high):
            raise wrong(name, value, f"it must be {_interval(low, high)}")
        return number

    def boolean(self, name: str, default: bool) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, value, "it must be true or false")
        return value

    def text(self, name: str, schema: Schema = ANY) -> str | None:
        """A string. The caller checks it against `schema`."""
        value = self._body.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong(name, value, "it must be a string")
        return value

    def mapping(self, name: str, schema: Schema = ANY) -> dict[str, Any] | None:
        """An object. The caller checks its members against `schema`."""
        value = self._body.get(name)
        if value is not None and not isinstance(value, dict):
            raise wrong(name, value, "it must be an object")
        return value

    def nested(self, name: str, members: Members) -> Fields | None:
        """An object whose members are fields, limited to `members`."""
        value = self.mapping(name)
        if value is None:
            return None
        members.check(value, name)
        return Fields(value)

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...] | None:
        """A string or a list of at most `most` strings, each of 1 to `longest` characters."""
        value = self._body.get(name)
        if value is None:
            return None
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise wrong(name, value, "it must be a string or a list of strings")
        if len(items) > most:
            raise InvalidRequest(f"{name} holds {len(items)} strings; at most {most}", param=name)
        for item in items:
            if not 0 < len(item) <= longest:
                allowed = f"each must have 1 to {longest} characters"
                message = f"{name} holds {show(item)} of {len(item)} characters; {allowed}"
                raise InvalidRequest(message, param=name)
        return tuple(items)

    def objects(self, name: str, most: int) -> list[dict[str, Any]] | None:
        """A list of at most `most` objects with members of any kind."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise wrong(name, value, "it must be a list of objects")
        if len(value) > most:
            raise InvalidRequest(f"{name} holds {len(value)} objects; at most {most}", param=name)
        return value

    def ids(self, name: str, most: int, least: int = 0) -> tuple[int, ...] | None:
        """A list of `least` to `most` token ids; not checked against the vocabulary."""
        value = self._body.get(name)
        if value is None:
            return None
        value = integers(value) if isinstance(value, list) else None
        if value is None:
            raise wrong(name, self._body.get(name), "it must be a list of integers")
        if not least <= len(value) <= most:
            allowed = f"at most {most}" if not least else f"{least} to {most}"
            raise InvalidRequest(f"{name} holds {len(value)} ids; {allowed}", param=name)
        if any(item < 0 for item in value):
            raise wrong(name, value, "ids are 0 or more")
        return tuple(value)


def integers(values: list[Any]) -> list[int] | None:
    """The list with 16.0 as 16; None if it holds anything but integers."""
    kinds = set(map(type, values))
    if kinds <= {int}:
        return values
    whole = kinds <= {int, float} and all(
        isinstance(one, int) or one.is_integer() for one in values
    )
    return list(map(int, values)) if whole else None


def _inside(value: float, low: float | None, high: float | None) -> bool:
    """Whether the value is within the bounds; False for NaN if there is a bound."""
    return (low is None or value >= low) and (high is None or value <= high)


def _interval(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"in [{exact(low)}, {exact(high)}]"
    if low is not None:
        return f"{exact(low)} or more"
    assert high is not None, "a value is out of bounds only if there is a bound"
    return f"{exact(high)} or less"

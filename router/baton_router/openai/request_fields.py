"""Every field that a request body may hold, with what this server does about it and why.

In: nothing. Out: rows, from which three things follow: the names that a body may hold, at each
level (any other is refused by name); which values of an unsupported field are refused
(`unsupported`); and the table of docs/api.md, with the text of GET /openapi.json (`field_docs`,
`body_schema`). A field's bounds are not here: they stand where the field is read (see
`body_reader`).

A row's name is its path: `stream_options.include_usage`, `messages[].content[].text`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from baton_protocol.errors import InvalidRequest

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
ALIKE = 0.7  # of 1: how much a name must be like a field's to be taken for a slip of it
SHOWN = 60  # characters of an unknown name that are looked at and repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of one or several bodies.

    `accepts` are the values beside null that pass where not all do; None: its reader says which.
    `complaint` is what the error of another value says. `default` is empty where the reader says
    it, or where there is none. `remark` is what users read.
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
        """Without links."""
        return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", self.remark)


@dataclass(frozen=True, slots=True)
class Members:
    """The fields of one JSON object: a body (`path` is empty), or an object within one."""

    body: Body
    path: str
    fields: Mapping[str, Field]

    def check(self, given: Mapping[str, Any], at: str = "") -> None:
        """Raise InvalidRequest for a name that is none of these, unless its value is null. `at` is
        where the object stands in the client's body."""
        if given.keys() <= self.fields.keys():
            return
        for name, value in given.items():
            if name not in self.fields and value is not None:
                raise self._unknown(name, at)

    def _unknown(self, name: str, at: str) -> InvalidRequest:
        shown = name if len(name) <= SHOWN else name[:SHOWN] + "..."
        param = f"{at}.{shown}" if at else shown
        route = ROUTES[self.body]
        elsewhere = [
            ROUTES[body]
            for (body, path), others in MEMBERS.items()
            if path == self.path and body != self.body and name in others.fields
        ]
        told = f"{param!r} is not a field of {route}"
        if elsewhere:
            told += f" but of {' and '.join(elsewhere)}; leave it out"
        elif close := get_close_matches(name[:SHOWN], self._meant(), n=1, cutoff=ALIKE):
            told += f"; did you mean {close[0]!r}?"
        else:
            told += "; leave it out"
        return InvalidRequest(told, param=param, code="unknown_parameter")

    def _meant(self) -> Iterable[str]:
        """What a client may have meant: nothing that would be refused."""
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
    remark: str, *names: str, accepts: Values = EMPTY, complaint: str = ""
) -> Iterable[Field]:
    for name in names:
        yield Field(
            name=name,
            bodies=BOTH,
            does="refused",
            remark=remark,
            accepts=accepts,
            complaint=complaint or _unsupported(remark),
        )


def _the_keys(*names: str) -> Iterable[Field]:
    """Whose KV a request may use follows from its API key."""
    told = "no request may name it: the API key says it"
    return _refused(told, *names, complaint=f"{told}; leave it out")


_ASKED = (
    _obeyed("model", BOTH, "another name is a 404, which tells those there are", "the pool's"),
    _obeyed("messages", CHAT, "the conversation; required"),
    _obeyed("messages[].role", CHAT, "`system`, `user`, `assistant`, or what the template knows"),
    _obeyed("messages[].content", CHAT, "a text or text parts, which are joined by newlines"),
    _obeyed("messages[].content[].type", CHAT, "only `text`"),
    _obeyed("messages[].content[].text", CHAT, "the part's text"),
    _ignored(
        "messages[].content[].cache_control",
        "a hint; every prefix is cached anyway",
        bodies=CHAT,
    ),
    _ignored(
        "messages[].content[].prompt_cache_breakpoint",
        "a hint; every prefix is cached anyway",
        bodies=CHAT,
    ),
    *(
        _obeyed(f"messages[].{name}", CHAT, "given to the model's template as it is")
        for name in (
            *("name", "tool_calls", "tool_call_id", "function_call"),
            *("reasoning_content", "reasoning", "thinking", "tool_plan", "refusal", "annotations"),
        )
    ),
    _obeyed(
        "prompt",
        COMPLETIONS,
        "each prompt is answered by itself; required",
    ),
    _obeyed(
        "chat_template_kwargs", CHAT, "more values for the chat template, which may ignore them"
    ),
    _obeyed("documents", CHAT, "given to the model's template, which may ignore them"),
    _obeyed("add_generation_prompt", CHAT, "end the prompt where the assistant begins"),
    _obeyed(
        "continue_final_message",
        CHAT,
        "end the prompt where the last message ends; the answer goes on with it"
        " ([below](#continuing-a-message))",
    ),
    _obeyed(
        "truncate_prompt_tokens",
        BOTH,
        "keep so many tokens of each prompt; -1: as many as fit ([below](#long-prompts))",
        "all",
    ),
    _obeyed(
        "truncation_side", BOTH, "`left` keeps the last tokens, `right` the first ones", "`left`"
    ),
    _obeyed("add_special_tokens", BOTH, "put the tokenizer's own tokens (BOS) around the text"),
)
_CHOSEN = (
    _obeyed("temperature", BOTH, "0 is greedy", "the model's, else 1"),
    _obeyed("top_p", BOTH, "1 is off", "the model's, else 1"),
    _obeyed("top_k", BOTH, "-1 and 0 are off", "the model's, else -1"),
    _obeyed("min_p", BOTH, "0 is off", "the model's, else 0"),
    _obeyed(
        "seed",
        BOTH,
        "keys the random numbers, whichever node computes ([the same tokens](#the-same-tokens))",
        "random",
    ),
    _obeyed(
        "n",
        BOTH,
        "choices; prompts times `n` are at most [2,048](operations.md#admission)",
        "1",
    ),
    _obeyed("best_of", BOTH, "may only repeat `n`", "`n`"),
    _obeyed("frequency_penalty", BOTH, "per time that an id was generated", "0"),
    _obeyed("presence_penalty", BOTH, "once if an id was generated", "0"),
    _obeyed(
        "repetition_penalty",
        BOTH,
        "divides positive logits of ids in prompt and answer, multiplies negative ones",
        "the model's, else 1",
    ),
    _obeyed("logit_bias", BOTH, "added to the logits of these ids"),
    _obeyed("allowed_token_ids", BOTH, "no other id is generated", "all"),
    _obeyed(
        "bad_words",
        BOTH,
        "never completed, neither at the start of a text nor after a space; each at most 64 tokens",
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
        "at most `max_tokens`; before that neither EOS nor `stop` ends it",
        "0",
    ),
    _obeyed(
        "stop",
        BOTH,
        "the text ends before the first that occurs; `stop_reason` names it",
    ),
    _obeyed("stop_token_ids", BOTH, "the same for ids"),
    _obeyed("include_stop_str_in_output", BOTH, "the text ends after the stop instead"),
    _obeyed("ignore_eos", BOTH, "go on behind EOS"),
)
_TOLD = (
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
        remark="events are not padded against who measures their length",
        accepts=(False,),
        complaint="this server does not pad events; leave it out",
    ),
    _obeyed("logprobs", CHAT, "of each generated token"),
    _obeyed("logprobs", COMPLETIONS, "of each generated token, with so many likely ones", "off"),
    _obeyed("top_logprobs", CHAT, "how many likely ones, with `logprobs`", "0"),
    _obeyed(
        "prompt_logprobs", BOTH, "the same for the prompt's tokens, by id; not with `stream`", "off"
    ),
    _obeyed(
        "echo", CHAT, "the text begins with that of the last message, if that is the assistant's"
    ),
    _obeyed("echo", COMPLETIONS, "text and `logprobs` begin with the prompt's"),
    _obeyed(
        "skip_special_tokens",
        BOTH,
        "leave EOS and its like out of what is generated, not of `echo`",
    ),
    _obeyed("return_token_ids", BOTH, "fills `prompt_token_ids` and `token_ids`, else null"),
    _obeyed(
        "return_tokens_as_token_ids", BOTH, "`logprobs` name tokens by their ids: `token_id:7`"
    ),
    _obeyed(
        "detokenize",
        BOTH,
        "false: no text, with `return_token_ids` and without `stop`; tokens cost less",
    ),
)
_ACCEPTED = (
    _ignored("user", "for the client's own use"),
    _ignored("metadata", "for the client's own use"),
    _ignored("safety_identifier", "for the client's own use"),
    _ignored("session_id", "a hint; requests go where their prefix is cached"),
    _ignored("prompt_cache_key", "a hint; requests go where their prefix is cached"),
    _ignored("prompt_cache_retention", "a hint; every prefix is cached while there is room"),
    _ignored("prompt_cache_options", "a hint; every prefix is cached while there is room"),
    _ignored("store", "no answer is stored, so none can be retrieved later"),
    _ignored("service_tier", "there is one tier", ("auto", "default")),
    _ignored("stream_interval", "an event is sent as soon as it has a token"),
    _ignored("parallel_tool_calls", "without `tools` it says nothing"),
    _ignored("media_io_kwargs", "messages have no media"),
    _ignored("mm_processor_kwargs", "messages have no media"),
    _ignored("mm_payload", "messages have no media"),
)
_TOOLS, _GRAMMAR = "there are no tool calls yet", "there is no structured output yet"
_REASONING = "reasoning is not told apart from the answer yet"
_BEAMS, _MEDIA = "there is no beam search", "models here read and write text only"
_UNSUPPORTED = (
    *_refused(_TOOLS, "tools", "functions"),
    *_refused(_TOOLS, "tool_choice", "function_call", accepts=("none", "auto")),
    *_refused(
        _GRAMMAR,
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("guided_decoding_backend", "guided_whitespace_pattern", "json_schema", "regex", "ebnf"),
    ),
    *_refused(_GRAMMAR, "response_format", accepts=({"type": "text"},)),
    *_refused(_REASONING, "reasoning_effort"),
    *_refused(_REASONING, "thinking_token_budget", accepts=()),
    *_refused(_REASONING, "include_reasoning", "stream_reasoning", accepts=(True,)),
    *_refused(_REASONING, "separate_reasoning", accepts=(False,)),
    *_refused(_BEAMS, "use_beam_search", "early_stopping"),
    *_refused(_BEAMS, "length_penalty", accepts=(1,)),
    *_refused(_MEDIA, "audio"),
    *_refused(_MEDIA, "modalities", accepts=(["text"],)),
    *_refused("no model here fills in a middle", "suffix"),
    *_refused("a template is a program; only the model's own is run", "chat_template"),
    *_refused("an answer is not predicted", "prediction"),
    *_refused("there are no levels of verbosity", "verbosity", accepts=("medium",)),
    *_refused("nothing is looked up", "web_search_options", accepts=()),
    *_refused("nothing is moderated", "moderation", accepts=()),
    *_refused("prompts are text or ids", "prompt_embeds"),
    *_refused("ids are sent as `prompt` of /v1/completions", "prompt_token_ids"),
    *_refused("logprobs are of the likeliest tokens", "logprob_token_ids"),
    *_refused("answers do not have it", "return_prompt_text", "return_token_offsets"),
    *_refused("answers do not have it", "return_hidden_states", "return_mm_kwargs"),
    *_refused("answers do not have it", "routed_experts_prompt_start", accepts=(0,)),
    *_refused("clients bring no code", "logits_processors", "custom_logit_processor"),
    *_refused("there are no engine plug-ins", "vllm_xargs", "custom_params"),
    *_refused("repetitions are not looked for", "repetition_detection"),
    *_refused("answers are not watermarked", "watermarking"),
    *_refused("the API key decides about it", "priority"),
    *_refused("the router decides about hand-offs", "kv_transfer_params", "ec_transfer_params"),
    *_refused("a request is named by the header `x-request-id`", "request_id", "rid"),
    *_refused("use `include_stop_str_in_output`", "no_stop_trim"),
    *_refused("stops are texts and ids", "stop_regex"),
    *_refused(
        "special tokens stand in the text as they are",
        "spaces_between_special_tokens",
        accepts=(True,),
    ),
)
_DERIVED = tuple(
    _the_keys("cache_salt", "salt", "extra_key", "tenant", "adapter", "adapter_digest", "lora_path")
)
_DRAINS = (
    _obeyed("deadline_s", DRAIN, "seconds that running requests may stay", "`--drain-timeout`"),
    _obeyed("reason", DRAIN, "one line for logs and `/pool`"),
    _obeyed(
        "replaced_by",
        DRAIN,
        "the revision that takes the node's place ([rolling out](operations.md#rolling-out))",
    ),
)
FIELDS: tuple[Field, ...] = (
    *(*_ASKED, *_CHOSEN, *_ENDS, *_TOLD),
    *(*_ACCEPTED, *_UNSUPPORTED, *_DERIVED, *_DRAINS),
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

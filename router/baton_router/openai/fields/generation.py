"""The fields that every generation has, whatever its dialect: sampling, the answer's form and end.

A dialect is a table of its own on top (`chat`, `completions`). A field with the name of one of
SamplingParams becomes that parameter. Bounds are those of SamplingParams, which nodes enforce too.
"""

from __future__ import annotations

import re
from typing import Any

from baton_protocol.errors import InvalidRequest, exact
from baton_protocol.sampling import (
    ALL_LOGPROBS,
    BIAS_RANGE,
    LENGTH_PENALTY_RANGE,
    MAX_BAD_WORDS,
    MAX_BIASED,
    MAX_CHOICES,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_TEMPERATURE,
    MOST_LOGPROBS,
    NOT_WITH_BEAMS,
    PENALTY_RANGE,
    REPETITION_RANGE,
    beams_refuse,
)
from baton_router.openai.fields.errors import wrong
from baton_router.openai.fields.kinds import (
    Schema,
    ValueKind,
    choice,
    ids,
    integer,
    number,
    object_at,
    text,
    texts,
)
from baton_router.openai.fields.table import (
    TRUE,
    FieldTable,
    check_names,
    flag,
    needs,
    optional,
    read_values,
    refused,
    rule,
    schema_of,
    stated,
)
from baton_router.openai.fields.unserved import UnservedFields
from baton_router.openai.structured_output import (
    FORMAT_KIND,
    GRAMMAR_KINDS,
    NAMES,
    ONE_AT_MOST,
    OUTPUTS_KIND,
    RequestedGrammar,
)

MAX_STOPS = 16
MAX_TOP_K = (1 << 31) - 1  # engines store it in 32 bits; no vocabulary is larger
MAX_WORDS = MAX_BAD_WORDS // 2  # each word may become two id sequences
MAX_EXTRA_ARGS = 64
MAX_EXTRA_ITEMS = 1024
AS_FITS = -1  # of truncate_prompt_tokens
LOGPROBS_LIMIT = "at most the nodes' `--max-logprobs`, 20 by default; -1: of all ids"
_ID = re.compile(r"0|[1-9][0-9]{0,17}")
_SOME_TEXT: Schema = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
    ]
}
_NO_OPTIONS: Schema = {"anyOf": [{"type": "null"}, {"type": "object", "maxProperties": 0}]}
BEAMS_ALONE = (
    "use_beam_search excludes stream, echo with logprobs, and what changes logits or an answer's"
    " end: grammars, vllm_xargs and "
    + ", ".join(name for name in NOT_WITH_BEAMS if name not in ("structured", "extra_args"))
)
_SCALAR = [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]
# One rule instead of several: schema tools expand each rule with all others and give up on many.
_STREAMS: Schema = {
    "if": {"properties": {"stream": TRUE}, "required": ["stream"]},
    "then": {"properties": {"prompt_logprobs": {"type": "null"}}},
    "else": {"properties": {"stream_options": _NO_OPTIONS}},
}


def _read_logit_bias(at: str, value: Any) -> tuple[tuple[int, float], ...]:
    biases = object_at(at, value)
    if len(biases) > MAX_BIASED:
        raise InvalidRequest(f"{at} holds {len(biases)} ids; at most {MAX_BIASED}", param=at)
    pairs = []
    for name, bias in biases.items():
        if _ID.fullmatch(name) is None:
            raise wrong(at, {name: bias}, "its names must be token ids")
        numeric = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not numeric or not -BIAS_RANGE <= bias <= BIAS_RANGE:
            allowed = f"its values must be numbers in [{exact(-BIAS_RANGE)}, {exact(BIAS_RANGE)}]"
            raise wrong(at, {name: bias}, allowed)
        pairs.append((int(name), float(bias)))
    return tuple(pairs)


def _read_extra_args(at: str, value: Any) -> dict[str, Any] | None:
    args = object_at(at, value)
    if len(args) > MAX_EXTRA_ARGS:
        raise InvalidRequest(f"{at} holds {len(args)} names; at most {MAX_EXTRA_ARGS}", param=at)
    for name, arg in args.items():
        items = arg if isinstance(arg, list) else [arg]
        if len(items) > MAX_EXTRA_ITEMS or not all(isinstance(x, str | int | float) for x in items):
            allowed = f"must be a text, a number, a boolean or a list of {MAX_EXTRA_ITEMS} of them"
            raise wrong(at, {name: arg}, f"its values {allowed} at most")
    return args or None


_EXTRA_ARGS = ValueKind(
    _read_extra_args,
    {
        "type": "object",
        "maxProperties": MAX_EXTRA_ARGS,
        "additionalProperties": {
            "anyOf": [
                *_SCALAR,
                {"type": "array", "items": {"anyOf": _SCALAR}, "maxItems": MAX_EXTRA_ITEMS},
            ]
        },
    },
)


def _read_early_stopping(at: str, value: Any) -> bool | str:
    if isinstance(value, bool) or value == "never":
        return value if isinstance(value, bool) else "never"
    raise wrong(at, value, 'it must be true, false or "never"')


_EARLY_STOPPING = ValueKind(_read_early_stopping, {"enum": [True, False, "never"]})
LOGIT_BIAS = ValueKind(
    _read_logit_bias,
    {
        "type": "object",
        "patternProperties": {
            f"^({_ID.pattern})$": {
                "type": "number",
                "minimum": -BIAS_RANGE,
                "maximum": BIAS_RANGE,
            }
        },
        "additionalProperties": False,
        "maxProperties": MAX_BIASED,
    },
)


class StreamOptions(FieldTable):
    """The members of `stream_options`."""

    include_usage = flag(False, "usage in a last event")
    continuous_usage_stats = flag(
        False, "with `include_usage`, in every event: usage of its choice so far"
    )
    include_obfuscation = refused(
        "events are not padded to hide their length",
        accepts=(False,),
        complaint="this server does not pad events; leave it out",
    )


def _read_stream_options(at: str, value: Any) -> StreamOptions | None:
    options = object_at(at, value)
    if not options:
        return None  # as in vLLM, an empty object asks for nothing
    check_names(StreamOptions, options, at)
    return read_values(StreamOptions, options)  # errors name a member without its path


class SamplingFields(UnservedFields):
    """The fields of every dialect that generates: how tokens are drawn, and where answers end."""

    model = optional(text(), "another name is a 404 that lists the known ones", "the pool's")
    priority = optional(
        integer(),
        "lower ones of your own requests go first ([priority](api.md#priority))",
        "0",
    )
    skip_reading_prefix_cache = flag(
        False, "compute the whole prompt, on one node, without KV of earlier requests"
    )

    temperature = optional(number(0.0, MAX_TEMPERATURE), "0 is greedy", "the model's, else 1")
    top_p = optional(
        number(0.0, 1.0),
        "1 is off; 0 leaves the likeliest token, as temperature 0 does",
        "the model's, else 1",
    )
    top_k = optional(integer(-1, MAX_TOP_K), "-1 and 0 are off", "the model's, else -1")
    min_p = optional(number(0.0, 1.0), "0 is off", "the model's, else 0")
    seed = optional(
        integer(),
        "key of the random numbers, the same on every node"
        " ([the same tokens](api.md#the-same-tokens))",
        "random",
    )
    frequency_penalty = optional(
        number(-PENALTY_RANGE, PENALTY_RANGE),
        "subtracted from an id's logit for each time it was generated",
        "0",
    )
    presence_penalty = optional(
        number(-PENALTY_RANGE, PENALTY_RANGE),
        "subtracted once from an id's logit if it was generated",
        "0",
    )
    repetition_penalty = optional(
        number(*REPETITION_RANGE),
        "divides positive logits of ids in prompt and answer, multiplies negative ones",
        "the model's, else 1",
    )
    logit_bias = optional(LOGIT_BIAS, "added to the logits of these ids")
    allowed_token_ids = optional(ids(MAX_BIASED, least=1), "only these ids are generated", "all")
    bad_words = optional(
        texts(MAX_WORDS, MAX_STOP_CHARS),
        "never generated, neither at the start of a text nor after a space; each at most 64 tokens",
    )
    vllm_xargs = optional(
        _EXTRA_ARGS,
        "arguments for [logits processors of other packages](api.md#logits-processors), by name",
    )

    structured_outputs = optional(OUTPUTS_KIND, "the same, with exactly one of these kinds")

    min_tokens = optional(
        integer(0), "at most `max_tokens`; neither EOS nor `stop` ends the answer earlier", "0"
    )
    stop = optional(
        texts(MAX_STOPS, MAX_STOP_CHARS),
        "the text ends before the first one that occurs; `stop_reason` names it",
    )
    stop_token_ids = optional(ids(MAX_STOP_IDS), "the same for ids")
    include_stop_str_in_output = flag(False, "the text ends after the stop instead")
    ignore_eos = flag(False, "continue after EOS")

    stream = flag(False, "server-sent events")
    skip_special_tokens = flag(
        True, "leave EOS and other special tokens out of generated text, but not out of `echo`"
    )


class GenerationFields(SamplingFields):
    """The fields that chats and completions share."""

    truncate_prompt_tokens = optional(
        integer(AS_FITS),
        "keep at most this number of tokens of each prompt; -1: what fits ([below](#long-prompts))",
        "all",
    )
    truncation_side = optional(
        choice("left", "right"), "`left` keeps the last tokens, `right` the first ones", "`left`"
    )
    add_special_tokens = flag(False, "add the tokenizer's own tokens (BOS) to the text")
    n = optional(
        integer(1, MAX_CHOICES),
        "choices; prompts times `n` are at most [2,048](operations/limits.md#admission)",
        "1",
    )
    use_beam_search = flag(
        False,
        "the `n` best answers of a search with `n` beams ([beam search](#beam-search))",
    )
    length_penalty = optional(
        number(-LENGTH_PENALTY_RANGE, LENGTH_PENALTY_RANGE),
        "power of its length by which an answer's score is divided; with `use_beam_search`",
        "1",
    )
    early_stopping = optional(
        _EARLY_STOPPING,
        "when the search ends, as in transformers; with `use_beam_search`",
        "false",
    )
    response_format = optional(
        FORMAT_KIND,
        "what the answer must match ([structured output](structured-output.md))",
        "`text`",
    )
    guided_json = optional(GRAMMAR_KINDS["json"], "the older name of `structured_outputs.json`")
    guided_regex = optional(GRAMMAR_KINDS["regex"], "the older name of `structured_outputs.regex`")
    guided_choice = optional(
        GRAMMAR_KINDS["choice"], "the older name of `structured_outputs.choice`"
    )
    guided_grammar = optional(
        GRAMMAR_KINDS["grammar"], "the older name of `structured_outputs.grammar`"
    )
    max_tokens = optional(
        integer(1), "all generated tokens count; 0 with `echo` generates none", "what fits"
    )
    max_completion_tokens = optional(integer(1), "the newer name of `max_tokens`", "`max_tokens`")
    stream_options = optional(
        ValueKind(_read_stream_options, schema_of(StreamOptions), StreamOptions),
        "only with `stream`",
    )
    prompt_logprobs = optional(
        integer(ALL_LOGPROBS, MOST_LOGPROBS),
        f"the same for the prompt's tokens, by id; not with `stream`; {LOGPROBS_LIMIT}",
        "off",
    )
    return_token_ids = flag(False, "fills `prompt_token_ids` and `token_ids`, else null")
    return_tokens_as_token_ids = flag(False, "`logprobs` name tokens by their ids: `token_id:7`")
    detokenize = flag(
        True, "false: no text; needs `return_token_ids`, excludes `stop`, and costs less"
    )

    min_tokens_agree = stated(
        {"description": "min_tokens is at most what max_tokens is, or is by default"}
    )
    stop_needs_text = stated(
        needs("stop", _SOME_TEXT, "detokenize", {"enum": [True, None]}, absent=True)
    )

    @rule(
        "detokenize",
        schemas=[needs("detokenize", {"const": False}, "return_token_ids", TRUE)],
    )
    def check_detokenize(self) -> None:
        if not self.detokenize and not self.return_token_ids:
            raise wrong("detokenize", False, "without text there are ids: set return_token_ids too")

    @rule("prompt_logprobs", "stream_options", schemas=[_STREAMS])
    def check_stream(self) -> None:
        if self.prompt_logprobs is not None and self.stream:
            allowed = "a stream does not have them; leave out one of both"
            raise wrong("prompt_logprobs", self.prompt_logprobs, allowed)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed when stream is true", param="stream_options"
            )

    @rule("use_beam_search", schemas=[{"description": BEAMS_ALONE}])
    def check_beams(self) -> None:
        if not self.use_beam_search:
            return
        if self.stream:
            allowed = "a beam search has no answer before its end; leave out stream"
            raise wrong("use_beam_search", True, allowed)
        if grammars := self.grammars():
            raise beams_refuse(grammars[0].field)
        if self.vllm_xargs:
            raise beams_refuse("vllm_xargs")
        for name, default in NOT_WITH_BEAMS.items():
            if getattr(self, name, None) not in (None, default):
                raise beams_refuse(name)

    def grammars(self) -> list[RequestedGrammar]:
        """What the answer must match, according to each field that says so."""
        requested = (self.response_format, self.structured_outputs, self.guided_json)
        older = (self.guided_regex, self.guided_choice, self.guided_grammar)
        return [grammar for grammar in (*requested, *older) if grammar is not None]

    @rule(*NAMES, schemas=[{"description": ONE_AT_MOST}])
    def check_grammars(self) -> None:
        names = [grammar.field.partition(".")[0] for grammar in self.grammars()]
        if len(names) > 1:
            raise InvalidRequest(
                f"{names[1]} and {names[0]} both constrain the answer; send only one of them",
                param=names[1],
            )
        if names and self.allowed_token_ids is not None:
            raise InvalidRequest(
                f"allowed_token_ids and {names[0]} both restrict the tokens; send only one of them",
                param="allowed_token_ids",
            )

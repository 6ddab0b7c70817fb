"""Request bodies, field by field: an error names each wrong or unsupported field."""

from __future__ import annotations

import codecs
from typing import Any

import msgspec
import pytest

from baton_protocol.errors import InvalidRequest, MalformedBody, exact
from baton_protocol.sampling import SamplingParams
from baton_router.openai.body_reader import SLICE, Fields
from baton_router.openai.chat import ChatCall
from baton_router.openai.completions import CompletionCall
from baton_router.openai.endpoint import TextPrompt

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**body: Any) -> ChatCall:
    return ChatCall.parse(msgspec.json.encode({"messages": MESSAGES} | body))


def completion(**body: Any) -> CompletionCall:
    return CompletionCall.parse(msgspec.json.encode({"prompt": "Hi"} | body))


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'"text"', b"nul", b"\xff\xfe", b'{"a":NaN}'])
def test_a_body_that_is_not_a_json_object_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedBody):
        Fields.parse(data)


@pytest.mark.parametrize("text", ["Hi", "\ufeff", "x" * SLICE * 2])
def test_a_byte_order_mark_before_a_body_is_skipped(text: str) -> None:
    data = codecs.BOM_UTF8 + msgspec.json.encode({"prompt": text})
    assert CompletionCall.parse(data) == CompletionCall.parse(bytearray(data))
    assert CompletionCall.parse(data).given == [TextPrompt(text, add_special_tokens=True)]


@pytest.mark.parametrize("data", [codecs.BOM_UTF8, codecs.BOM_UTF8 * 2 + b"{}"])
def test_a_byte_order_mark_alone_or_twice_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedBody):
        Fields.parse(data)


# Fields, values beyond their bounds, and the bounds in full.
BOUNDS: list[tuple[str, Any, str]] = [
    ("top_k", -2, "[-1, 2147483647]"),
    ("top_k", 2**31, "[-1, 2147483647]"),
    ("top_p", -0.01, "[0, 1]"),
    ("top_p", 1.01, "[0, 1]"),
    ("min_p", 1.5, "[0, 1]"),
    ("temperature", 100.5, "[0, 100]"),
    ("repetition_penalty", 0, "[0.01, 10]"),
    ("frequency_penalty", 2.5, "[-2, 2]"),
    ("logit_bias", {"5": 100.5}, "[-100, 100]"),
    ("n", 129, "[1, 128]"),
    ("prompt_logprobs", 21, "[0, 20]"),
    ("truncate_prompt_tokens", -2, "-1 or more"),
    ("min_tokens", -1, "0 or more"),
    ("stream_interval", 0, "1 or more"),
]


@pytest.mark.parametrize(("field", "value", "bounds"), BOUNDS)
@pytest.mark.parametrize("parse", [chat, completion])
def test_an_error_has_the_bounds_in_full(parse: Any, field: str, value: Any, bounds: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**{field: value})
    assert caught.value.message.endswith(bounds)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (2**31 - 1, "2147483647"),
        (2**63 - 1, "9223372036854775807"),
        (-100.0, "-100"),
        (0.01, "0.01"),
        (1234567.5, "1234567.5"),
        (1e15, "1000000000000000"),
        (float("inf"), "inf"),
    ],
)
def test_a_number_in_an_error_is_not_rounded(value: float, shown: str) -> None:
    assert exact(value) == shown


# A field, its value, the member that is wrong, and what the error calls it.
ABSENT: list[tuple[str, Any, str, str]] = [
    ("messages", [{}], "messages[0].role", "missing"),
    ("messages", [{"role": None}], "messages[0].role", "null"),
    ("messages", [{"role": "user"}], "messages[0].content", "missing"),
    ("messages", [{"role": "user", "content": None}], "messages[0].content", "null"),
    ("messages", None, "messages", "null"),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{}]}],
        "messages[0].tool_calls[0].function",
        "missing",
    ),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        "messages[0].tool_calls[0].function.name",
        "missing",
    ),
    ("response_format", {}, "response_format.type", "missing"),
    ("response_format", {"type": None}, "response_format.type", "null"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema", "missing"),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "a"}},
        "response_format.json_schema.schema",
        "missing",
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": None}},
        "response_format.json_schema.schema",
        "null",
    ),
    ("response_format", {"type": "structural_tag"}, "response_format.structures", "missing"),
    (
        "response_format",
        {"type": "structural_tag", "structures": [{}], "triggers": None},
        "response_format.triggers",
        "null",
    ),
    (
        "structured_outputs",
        {"structural_tag": {"structures": [{}]}},
        "structured_outputs.structural_tag.triggers",
        "missing",
    ),
]


@pytest.mark.parametrize(("field", "value", "member", "called"), ABSENT)
def test_an_error_tells_a_missing_member_from_null(
    field: str, value: Any, member: str, called: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{field: value})
    assert caught.value.message.startswith(f"{member} is {called}; it must") or (
        caught.value.message.startswith(f"{member} is {called}; use one of")
    )
    assert caught.value.param == member


@pytest.mark.parametrize("body", [{}, {"model": "m"}])
def test_the_error_for_a_body_without_its_prompt_says_that_it_is_missing(
    body: dict[str, Any],
) -> None:
    for parse, field in ((ChatCall.parse, "messages"), (CompletionCall.parse, "prompt")):
        with pytest.raises(InvalidRequest, match=f"^{field} is missing; it must be"):
            parse(msgspec.json.encode(body))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", [1]),
        ("n", 0),
        ("n", 1.5),
        ("n", True),
        ("n", 129),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("min_tokens", -1),
        ("seed", 0.5),
        ("seed", 2**64),
        ("top_k", -2),
        ("top_k", 2**31),
        ("stop", 5),
        ("stop", ["a", 1]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", "eos"),
        ("stop_token_ids", [True]),
        ("stream", "yes"),
        ("ignore_eos", 1),
        ("model", 5),
        ("return_token_ids", "x"),
        ("max_completion_tokens", 0),
        ("frequency_penalty", "much"),
        ("presence_penalty", True),
        ("repetition_penalty", [1]),
        ("logit_bias", 1),
        ("logit_bias", {"hello": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"05": 1}),
        ("logit_bias", {"5": "high"}),
        ("logit_bias", {"5": 100.5}),
        ("logit_bias", {"5": -(10**400)}),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", ["a"]),
        ("bad_words", 5),
        ("bad_words", [["a"]]),
        ("bad_words", ["a", ""]),
        ("bad_words", ["a" * 1025]),
        ("bad_words", ["a"] * 513),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
        ("best_of", 2),
        ("user", 5),
        ("metadata", "mine"),
        ("metadata", {"a": 1}),
        ("metadata", {str(number): "" for number in range(17)}),
        ("store", "yes"),
        ("safety_identifier", 5),
        ("prompt_cache_key", ["mine"]),
        ("stream_interval", 0),
        ("stream_options", []),
    ],
)
@pytest.mark.parametrize("parse", [chat, completion])
def test_a_field_with_a_wrong_value_is_an_error_that_names_it(
    parse: Any, field: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("guided_whitespace_pattern", " *"),
        ("suffix", "end"),
        ("length_penalty", 1.5),
        ("modalities", ["audio"]),
        ("verbosity", "low"),
        ("separate_reasoning", False),
        ("web_search_options", {}),
        ("regex", "a+"),
        ("use_beam_search", True),
        ("repetition_detection", {"max_pattern_size": 3}),
        ("return_prompt_text", True),
        ("vllm_xargs", {"a": 1}),
        ("kv_transfer_params", {"do_remote_decode": True}),
        ("request_id", "mine"),
        ("logprob_token_ids", [1]),
        ("prompt_token_ids", [1]),
        ("service_tier", "flex"),
        ("priority", 1),
        ("prompt_embeds", "AA=="),
        ("chat_template", "{{ x }}"),
    ],
)
@pytest.mark.parametrize("parse", [chat, completion])
def test_a_known_but_unsupported_field_is_an_error_that_names_it(
    parse: Any, field: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest, match="does not support") as caught:
        parse(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "why"),
    [
        *((field, "the API key determines it") for field in ("cache_salt", "salt", "tenant")),
        *((field, "there are no adapters") for field in ("adapter", "adapter_digest")),
    ],
)
@pytest.mark.parametrize("parse", [chat, completion])
def test_a_body_may_not_choose_whose_kv_is_used(parse: Any, field: str, why: str) -> None:
    message = f"{why}; leave it out"
    for value in ("mine", 5, ["x"], {"of": "x"}, True):
        with pytest.raises(InvalidRequest, match=message) as caught:
            parse(**{field: value})
        assert caught.value.param == field
    parse(**{field: None})


@pytest.mark.parametrize("parse", [chat, completion])
def test_streams_do_not_support_prompt_logprobs(parse: Any) -> None:
    with pytest.raises(InvalidRequest, match="stream") as caught:
        parse(prompt_logprobs=0, stream=True)
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize("parse", [chat, completion])
def test_detokenize_false_requires_return_token_ids(parse: Any) -> None:
    with pytest.raises(InvalidRequest, match="return_token_ids") as caught:
        parse(detokenize=False)
    assert caught.value.param == "detokenize"
    sampling = parse(detokenize=False, return_token_ids=True, stop="x").sampling
    assert sampling["detokenize"] is False
    with pytest.raises(InvalidRequest, match="stop needs text") as caught:
        SamplingParams(**sampling).check()
    assert caught.value.param == "stop"


@pytest.mark.parametrize("parse", [chat, completion])
def test_best_of_must_equal_n(parse: Any) -> None:
    assert parse(n=2, best_of=2).sampling["n"] == 2
    with pytest.raises(InvalidRequest) as caught:
        parse(n=2, best_of=3)
    assert caught.value.param == "best_of"


@pytest.mark.parametrize("parse", [chat, completion])
def test_fields_without_an_effect_are_accepted(parse: Any) -> None:
    parse(
        tools=None,
        response_format={"type": "text"},
        reasoning_effort=None,
        stream_reasoning=True,
        best_of=1,
        suffix=None,
        user="me",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        prompt_cache_key="mine",
        prompt_cache_retention="24h",
        prompt_cache_options={"ttl": "30m"},
        safety_identifier="x",
        session_id="x",
        stream_interval=5,
        nobody_knows_this=None,
        n=None,
        stop=None,
    )


@pytest.mark.parametrize(
    ("prompt", "given_prompts"),
    [
        ("a", (TextPrompt("a", True),)),
        (["a", "b"], (TextPrompt("a", True), TextPrompt("b", True))),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_a_list_of_either(prompt: Any, given_prompts: Any) -> None:
    assert completion(prompt=prompt).given == list(given_prompts)


@pytest.mark.parametrize("prompt", [None, [], 5, {}, [1, "a"], [[1], "a"], [True], ["a"] * 1025])
def test_prompts_of_other_types_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("Hi", "messages"),
        (["Hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (
            [*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}],
            "messages[1].content[0]",
        ),
    ],
)
def test_an_error_in_messages_names_the_position(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=messages)
    assert caught.value.param == param


def test_text_parts_are_joined_and_an_assistant_may_have_no_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat(messages=[{"role": "assistant", "name": "x"}, {"role": "user", "content": parts}])
    assert call.messages == [
        {"role": "assistant", "name": "x", "content": ""},
        {"role": "user", "content": "a\nb"},
    ]


def test_chat_logprobs_is_a_boolean_and_top_logprobs_a_number() -> None:
    assert "logprobs" not in chat().sampling
    assert chat(logprobs=True).sampling["logprobs"] == 0
    assert chat(logprobs=True, top_logprobs=3).sampling["logprobs"] == 3
    for body in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(InvalidRequest) as caught:
            chat(**body)
        assert caught.value.param == "top_logprobs"
    with pytest.raises(InvalidRequest):
        chat(logprobs=2)
    with pytest.raises(InvalidRequest):
        completion(logprobs=True)


def test_stream_options_require_a_stream() -> None:
    assert completion(stream=True, stream_options={"include_usage": True}).options.include_usage
    with pytest.raises(InvalidRequest) as caught:
        completion(stream_options={"include_usage": True})
    assert caught.value.param == "stream_options"


def test_continuous_usage_requires_include_usage() -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert completion(stream=True, stream_options=both).options.continuous_usage
    without_total = {"continuous_usage_stats": True}
    assert not completion(stream=True, stream_options=without_total).options.continuous_usage


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(temperature="x" * 10_000)
    assert len(caught.value.message) < 200

"""A body field by field: an error names the field, its wrong value and what is allowed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_protocol.errors import InvalidRequest, exact
from baton_protocol.sampling import SamplingParams
from baton_router.openai.call import TextPrompt
from baton_router.openai.chat import ChatCall
from baton_router.openai.completions import CompletionCall
from tests.router.openai.bodies import USER, Json, Read, both_dialects, chat, completion, refusal

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
    ("prompt_logprobs", -2, "[-1, 1048576]"),
    ("truncate_prompt_tokens", -2, "-1 or more"),
    ("min_tokens", -1, "0 or more"),
    ("stream_interval", 0, "1 or more"),
]


@pytest.mark.parametrize(("field", "value", "bounds"), BOUNDS)
@both_dialects
def test_an_error_has_the_bounds_in_full(read: Read, field: str, value: Any, bounds: str) -> None:
    assert refusal(read, **{field: value}).message.endswith(bounds)


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
    error = refusal(chat, **{field: value})
    assert error.message.startswith(
        (f"{member} is {called}; it must", f"{member} is {called}; use one of")
    )
    assert error.param == member


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
        ("temperature", True),
        ("n", 1.5),
        ("n", True),
        ("max_tokens", 0),
        ("max_completion_tokens", 0),
        ("seed", 0.5),
        ("stop", 5),
        ("stop", ["a", 1]),
        ("stop_token_ids", [True]),
        ("ignore_eos", 1),
        ("logit_bias", {"hello": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"05": 1}),
        ("logit_bias", {"5": "high"}),
        ("logit_bias", {"5": -(10**400)}),
        ("allowed_token_ids", ["a"]),
        ("bad_words", 5),
        ("bad_words", [["a"]]),
        ("early_stopping", "always"),
        ("metadata", {"a": 1}),
        ("prompt_cache_key", ["mine"]),
        ("stream_options", []),
    ],
)
@both_dialects
def test_a_field_with_a_wrong_value_is_an_error_that_names_it(
    read: Read, field: str, value: Any
) -> None:
    """`test_schema` tries the values on both sides of each bound; these are of a wrong type."""
    error = refusal(read, **{field: value})
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("guided_whitespace_pattern", " *"),
        ("suffix", "end"),
        ("modalities", ["audio"]),
        ("verbosity", "low"),
        ("separate_reasoning", False),
        ("web_search_options", {}),
        ("regex", "a+"),
        ("repetition_detection", {"max_pattern_size": 3}),
        ("return_prompt_text", True),
        ("kv_transfer_params", {"do_remote_decode": True}),
        ("request_id", "mine"),
        ("prompt_token_ids", [1]),
        ("service_tier", "flex"),
        ("prompt_embeds", "AA=="),
        ("chat_template", "{{ x }}"),
    ],
)
@both_dialects
def test_a_known_but_unsupported_field_is_an_error_that_names_it(
    read: Read, field: str, value: Any
) -> None:
    error = refusal(read, **{field: value})
    assert error.param == field
    assert "does not support" in error.message


@pytest.mark.parametrize(
    ("field", "why"),
    [
        *((field, "the API key determines it") for field in ("cache_salt", "salt", "tenant")),
        *((field, "there are no adapters") for field in ("adapter", "adapter_digest")),
    ],
)
@both_dialects
def test_a_body_may_not_choose_whose_kv_is_used(read: Read, field: str, why: str) -> None:
    for value in ("mine", 5, ["x"], {"of": "x"}, True):
        error = refusal(read, **{field: value})
        assert error.param == field
        assert f"{why}; leave it out" in error.message
    read(**{field: None})


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "a stream does not have them"),
        ({"detokenize": False}, "detokenize", "set return_token_ids too"),
        ({"n": 2, "best_of": 1}, "best_of", "n"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search", "leave out stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "when stream is true"),
    ],
)
@both_dialects
def test_fields_that_exclude_each_other_are_an_error_that_names_one(
    read: Read, fields: Json, param: str, words: str
) -> None:
    error = refusal(read, **fields)
    assert error.param == param
    assert words in error.message


@both_dialects
def test_fields_that_agree_are_accepted(read: Read) -> None:
    assert read(n=2, best_of=2).sampling["n"] == 2
    assert read(stream=True, stream_options={"include_usage": True}).options.include_usage
    sampling = read(detokenize=False, return_token_ids=True, stop="x").sampling
    assert sampling["detokenize"] is False
    with pytest.raises(InvalidRequest, match="stop needs text") as caught:
        SamplingParams(**sampling).check()
    assert caught.value.param == "stop"


@both_dialects
def test_fields_without_an_effect_are_accepted(read: Read) -> None:
    read(
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
    assert refusal(completion, prompt=prompt).param == "prompt"


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
            [USER, {"role": "user", "content": [{"type": "image_url"}]}],
            "messages[1].content[0]",
        ),
    ],
)
def test_an_error_in_messages_names_the_position(messages: Any, param: str) -> None:
    assert refusal(chat, messages=messages).param == param


def test_text_parts_are_joined_and_an_assistant_may_have_no_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat(messages=[{"role": "assistant", "name": "x"}, {"role": "user", "content": parts}])
    assert call.messages == [
        {"role": "assistant", "name": "x", "content": ""},
        {"role": "user", "content": "a\nb"},
    ]


@both_dialects
def test_naming_ids_asks_for_logprobs(read: Read) -> None:
    sampling = read(logprob_token_ids=[5, 3]).sampling
    assert (sampling["logprob_token_ids"], sampling["logprobs"]) == ((5, 3), 0)
    assert refusal(read, logprob_token_ids=[1] * 129).param == "logprob_token_ids"
    assert refusal(read, logprob_token_ids=[-1]).param == "logprob_token_ids"


def test_chat_logprobs_is_a_boolean_and_top_logprobs_a_number() -> None:
    assert "logprobs" not in chat().sampling
    assert chat(logprobs=True).sampling["logprobs"] == 0
    assert chat(logprobs=True, top_logprobs=3).sampling["logprobs"] == 3
    for body in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": -2}):
        assert refusal(chat, **body).param == "top_logprobs"
    for read, value in ((chat, 2), (completion, True)):
        assert refusal(read, logprobs=value).param == "logprobs"


def test_continuous_usage_requires_include_usage() -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert completion(stream=True, stream_options=both).options.continuous_usage
    without_total = {"continuous_usage_stats": True}
    assert not completion(stream=True, stream_options=without_total).options.continuous_usage


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(refusal(completion, temperature="x" * 10_000).message) < 200

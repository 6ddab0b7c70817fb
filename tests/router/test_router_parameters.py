"""Bodies become sampling parameters, or an error that names field, value and range."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.errors import InvalidRequest, MalformedBody, PromptTooLong
from baton_protocol.sampling import SamplingParams
from baton_router.calls import TextPrompt
from baton_router.fields import Fields
from baton_router.openai_chat import ChatCall
from baton_router.openai_completions import CompletionCall
from baton_router.parameters import complete

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**body: Any) -> ChatCall:
    return ChatCall.parse(msgspec.json.encode({"messages": MESSAGES} | body))


def completion(**body: Any) -> CompletionCall:
    return CompletionCall.parse(msgspec.json.encode({"prompt": "Hi"} | body))


def params(asked: dict[str, Any], **changes: Any) -> SamplingParams:
    facts: dict[str, Any] = {"prompt_tokens": 10, "max_model_len": 100, "default_max_tokens": None}
    return complete(asked, {}, **(facts | changes))


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'"text"', b"nul", b"\xff\xfe", b'{"a":NaN}'])
def test_a_body_that_is_no_json_object_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedBody):
        Fields.parse(data)


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
    ],
)
@pytest.mark.parametrize("parse", [chat, completion])
def test_a_field_of_the_wrong_kind_is_named_with_its_value(
    parse: Any, field: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("a", "b" * 1025)}, "stop"),
        ({"stop_token_ids": tuple(range(1025))}, "stop_token_ids"),
    ],
)
def test_a_value_out_of_range_is_named(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params(asked)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("suffix", "end"),
        ("echo", True),
        ("best_of", 3),
        ("guided_json", {"type": "object"}),
        ("prompt_logprobs", 0),
        ("use_beam_search", True),
        ("truncate_prompt_tokens", 5),
        ("chat_template", "{{ x }}"),
        ("continue_final_message", True),
        ("logit_bias", 1),
    ],
)
@pytest.mark.parametrize("parse", [chat, completion])
def test_a_known_field_we_do_not_obey_is_refused_by_name(
    parse: Any, field: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest, match="does not support") as caught:
        parse(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("parse", [chat, completion])
def test_fields_that_change_nothing_are_accepted(parse: Any) -> None:
    parse(
        frequency_penalty=0,
        presence_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={},
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        best_of=1,
        echo=False,
        suffix=None,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        nobody_knows_this=1,
        n=None,
        stop=None,
    )


def test_null_is_the_same_as_absent() -> None:
    call = completion(temperature=None, max_tokens=None, stop=None, seed=None, logprobs=None)
    assert set(call.sampling) == {
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
    }


def test_all_sampling_fields_reach_the_parameters() -> None:
    call = completion(
        n=2,
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        seed=3,
        max_tokens=20,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[5],
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=4,
    )
    assert params(call.sampling) == SamplingParams(
        n=2,
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        seed=3,
        max_tokens=20,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(5,),
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=4,
    )


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).sampling["max_tokens"] == 7


def test_a_chat_may_fill_the_context_and_a_completion_gets_sixteen() -> None:
    assert params({}, default_max_tokens=chat().default_max_tokens).max_tokens == 90
    assert params({}, default_max_tokens=completion().default_max_tokens).max_tokens == 16
    assert params({}, default_max_tokens=16, prompt_tokens=95).max_tokens == 5


def test_the_models_own_defaults_fill_what_is_left_open() -> None:
    defaults = {"temperature": 0.2, "top_k": 50, "max_tokens": 3, "repetition_penalty": 2}
    facts: dict[str, Any] = {
        "prompt_tokens": 1,
        "max_model_len": 100,
        "default_max_tokens": 16,
    }
    made = complete({"top_k": 5}, defaults, **facts)
    assert (made.temperature, made.top_k, made.top_p, made.max_tokens) == (0.2, 5, 1.0, 16)


@given(
    prompt=st.integers(1, 200), limit=st.integers(1, 200), wanted=st.none() | st.integers(1, 200)
)
def test_prompt_and_answer_fit_the_context_or_the_error_says_the_numbers(
    prompt: int, limit: int, wanted: int | None
) -> None:
    asked = {} if wanted is None else {"max_tokens": wanted}
    if prompt + (wanted or 1) <= limit:
        made = params(asked, prompt_tokens=prompt, max_model_len=limit)
        assert prompt + made.max_tokens <= limit
        return
    with pytest.raises(PromptTooLong) as caught:
        params(asked, prompt_tokens=prompt, max_model_len=limit)
    assert caught.value.reason == "context_length_exceeded"
    assert str(limit) in caught.value.message
    assert str(prompt) in caught.value.message


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        params({}, prompt_tokens=0)


@pytest.mark.parametrize(
    ("prompt", "given_prompts"),
    [
        ("a", (TextPrompt("a", True),)),
        (["a", "b"], (TextPrompt("a", True), TextPrompt("b", True))),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_come_as_texts_or_ids_alone_or_in_lists(prompt: Any, given_prompts: Any) -> None:
    assert completion(prompt=prompt).given == given_prompts


@pytest.mark.parametrize("prompt", [None, [], 5, {}, [1, "a"], [[1], "a"], [True], ["a"] * 1025])
def test_other_prompts_are_refused(prompt: Any) -> None:
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
def test_wrong_messages_are_named_by_position(messages: Any, param: str) -> None:
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


def test_chat_logprobs_are_a_switch_and_a_number() -> None:
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


def test_stream_options_need_a_stream() -> None:
    assert completion(stream=True, stream_options={"include_usage": True}).options.include_usage
    with pytest.raises(InvalidRequest) as caught:
        completion(stream_options={"include_usage": True})
    assert caught.value.param == "stream_options"


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(temperature="x" * 10_000)
    assert len(caught.value.message) < 200

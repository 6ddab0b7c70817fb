"""Request bodies as sampling parameters, or as errors that name the field, its value and range."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.errors import InvalidRequest, PromptTooLong
from baton_protocol.sampling import SamplingParams
from baton_router.auth import Tenant
from baton_router.openai.sampling import check_alone, check_scores, complete
from baton_router.requests.tokenize import prepare
from tests.router.openai.bodies import Read, both_dialects, chat, completion
from tests.support.nodes.servings import make_serving

FACTS: dict[str, Any] = {
    "prompt_tokens": 1,
    "max_model_len": 100,
    "default_max_tokens": 16,
    "names": {},
}


def params(fields: dict[str, Any], **changes: Any) -> SamplingParams:
    facts = {**FACTS, "prompt_tokens": 10, "default_max_tokens": None}
    return complete(fields, {}, **(facts | changes))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("a", "b" * 1025)}, "stop"),
        ({"stop_token_ids": tuple(range(1025))}, "stop_token_ids"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty"),
        ({"repetition_penalty": 10.1}, "repetition_penalty"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": tuple(range(1025))}, "allowed_token_ids"),
        ({"logit_bias": tuple((id, 1.0) for id in range(1025))}, "logit_bias"),
        ({"bad_words": ((1,) * 65,)}, "bad_words"),
        ({"bad_words": ((1,) * 64,) * 129}, "bad_words"),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_field(
    fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params(fields)
    assert caught.value.param == field


def test_null_is_the_same_as_absent() -> None:
    call = completion(temperature=None, max_tokens=None, stop=None, seed=None, logprobs=None)
    assert set(call.sampling) == {
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "detokenize",
        "skip_reading_prefix_cache",
        "use_beam_search",
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
        detokenize=True,
        logprobs=4,
        prompt_logprobs=5,
        frequency_penalty=0.5,
        presence_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"7": 100, "0": -0.5},
        allowed_token_ids=[7, 8],
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
        prompt_logprobs=5,
        frequency_penalty=0.5,
        presence_penalty=-1.0,
        repetition_penalty=1.2,
        logit_bias=((7, 100.0), (0, -0.5)),
        allowed_token_ids=(7, 8),
    )


@pytest.mark.parametrize(("shared", "sent"), [(False, (-5, 3)), (True, (0, 3))])
async def test_a_priority_puts_no_request_before_another_tenant_s(
    shared: bool, sent: tuple[int, int]
) -> None:
    facts: dict[str, Any] = {"tenant": Tenant(), "deadline": 60.0, "rng": random.Random(0)}
    for priority, of_request in zip((-5, 3), sent, strict=True):
        call = completion(priority=priority)
        [item] = await prepare(call, make_serving(), "r", shared=shared, **facts)
        assert (item.priority, item.request.priority) == (priority, of_request)


async def test_bad_words_are_banned_with_and_without_a_space_before() -> None:
    serving = make_serving()
    call = completion(bad_words=["the", "fox", " end", "x"])
    facts: dict[str, Any] = {"tenant": Tenant(), "deadline": 60.0, "rng": random.Random(0)}
    [prepared] = await prepare(call, serving, "r", **facts)
    banned = prepared.request.params.bad_words
    # "x" is the same token after a space, so it is banned once.
    texts = [serving.model.tokenizer.decode(ids) for ids in banned]
    assert texts == ["the", " the", "fox", " fox", " end", "x"]


def test_an_echo_with_logprobs_requests_the_prompt_s_logprobs() -> None:
    assert completion(echo=True).sampling.get("prompt_logprobs") is None
    assert completion(echo=True, logprobs=2).sampling["prompt_logprobs"] == 2
    assert completion(echo=True, logprobs=2, stream=True).sampling["prompt_logprobs"] == 2
    call = completion(echo=True, logprobs=2, prompt_logprobs=1)
    assert (call.sampling["prompt_logprobs"], call.prompt_logprobs) == (2, 1)


def test_only_an_echo_may_request_zero_tokens() -> None:
    call = completion(echo=True, max_tokens=0)
    assert (call.sampling["max_tokens"], call.options.generates) == (1, False)
    assert completion(echo=True, max_tokens=1).options.generates
    with pytest.raises(InvalidRequest) as caught:
        completion(max_tokens=0)
    assert caught.value.param == "max_tokens"


def test_max_completion_tokens_takes_precedence_over_max_tokens() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).sampling["max_tokens"] == 7


def test_by_default_a_chat_may_fill_the_context_and_a_completion_gets_16_tokens() -> None:
    assert params({}, default_max_tokens=chat().default_max_tokens).max_tokens == 90
    assert params({}, default_max_tokens=completion().default_max_tokens).max_tokens == 16
    assert params({}, default_max_tokens=16, prompt_tokens=95).max_tokens == 5


def test_the_model_s_defaults_apply_to_absent_fields() -> None:
    defaults = {"temperature": 0.2, "top_k": 50, "max_tokens": 3, "repetition_penalty": 1.1}
    result = complete({"top_k": 5}, defaults, **FACTS)
    assert (result.temperature, result.top_k, result.top_p) == (0.2, 5, 1.0)
    assert result.max_tokens == 16
    assert result.repetition_penalty == 1.1


@pytest.mark.parametrize(
    ("body", "defaults"),
    [
        ({"top_p": 0}, {}),
        ({"top_p": 0.0, "temperature": 2, "top_k": 5, "min_p": 0.1, "seed": 7, "n": 3}, {}),
        ({"top_p": 0}, {"temperature": 0.7, "top_p": 0.9}),
        ({}, {"top_p": 0.0}),
        ({"temperature": 1.5}, {"top_p": 0.0}),
    ],
)
@both_dialects
def test_top_p_0_is_greedy_whatever_else_is_asked_for(
    read: Read, body: dict[str, Any], defaults: dict[str, Any]
) -> None:
    sampling = read(**body).sampling
    check_alone(sampling, 16)
    result = complete(sampling, defaults, **FACTS)
    assert (result.temperature, result.top_p) == (0.0, 1.0)
    assert (result.seed, result.n) == (body.get("seed"), body.get("n", 1))


def test_a_client_s_top_p_replaces_a_default_of_0() -> None:
    result = complete({"top_p": 0.5}, {"top_p": 0.0}, **FACTS)
    assert (result.temperature, result.top_p) == (1.0, 0.5)


@given(
    prompt=st.integers(1, 200),
    limit=st.integers(1, 200),
    max_tokens=st.none() | st.integers(1, 200),
)
def test_prompt_and_answer_fit_the_context_or_the_error_has_both_numbers(
    prompt: int, limit: int, max_tokens: int | None
) -> None:
    fields = {} if max_tokens is None else {"max_tokens": max_tokens}
    if prompt + (max_tokens or 1) <= limit:
        result = params(fields, prompt_tokens=prompt, max_model_len=limit)
        assert prompt + result.max_tokens <= limit
        return
    with pytest.raises(PromptTooLong) as caught:
        params(fields, prompt_tokens=prompt, max_model_len=limit)
    assert caught.value.reason == "context_length_exceeded"
    assert str(limit) in caught.value.message
    assert str(prompt) in caught.value.message


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        params({}, prompt_tokens=0)


@pytest.mark.parametrize(
    ("fields", "prompt_tokens", "param"),
    [
        ({}, 0, "messages"),
        ({}, 100, "messages"),
        ({"max_tokens": 91}, 10, "max_completion_tokens"),
    ],
)
def test_length_errors_name_the_client_s_own_fields(
    fields: dict[str, Any], prompt_tokens: int, param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params(fields, prompt_tokens=prompt_tokens, names=chat(max_completion_tokens=91).names)
    assert caught.value.param == param
    assert param in caught.value.message or prompt_tokens == 0
    assert chat().names["max_tokens"] == "max_tokens"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20}, "logprobs"),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 20}, "prompt_logprobs"),
    ],
)
def test_logprobs_for_a_long_prompt_are_refused(body: dict[str, Any], param: str) -> None:
    for call, limit in ((completion(**body), 9_000), (completion(n=4, **body), 2_250)):
        check_scores(call.sampling, limit, call.names)
        with pytest.raises(InvalidRequest, match=f"{param} is 20 for 10000 tokens") as caught:
            check_scores(call.sampling, 10_000, call.names)
        assert caught.value.param == param


async def test_the_limit_of_prompt_logprobs_applies_to_all_prompts_of_a_call() -> None:
    serving = make_serving(9_000)
    call = completion(prompt=[[1] * 5_000] * 2, prompt_logprobs=20)
    with pytest.raises(InvalidRequest, match="for 10000 tokens"):
        await prepare(call, serving, "r", tenant=Tenant(), deadline=60.0, rng=random.Random(0))

"""The official client against a disaggregated pool with a real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.clients.http import exchange
from tests.support.pools.baton_up import Pool

MESSAGES: Any = [{"role": "user", "content": "the prefill node computes the prompt " * 8}]
PROMPT = "every chunk of the cache has a name " * 8


@pytest.fixture(scope="module")
def pool(tiny_model: Callable[[str], Path]) -> Iterator[Pool]:
    flags = [
        *("--model", str(tiny_model("llama-gqa2-tied")), "--dtype", "float32", "--threads", "1"),
        *("--prefill", "1", "--decode", "1", "--chunk-blocks", "1", "--handoff", "always"),
        *("--kv-blocks", "800", "--served-model-name", "tiny"),
    ]
    with Pool(flags) as running:
        yield running


@pytest.fixture
def client(pool: Pool) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_chat_answer_has_text_usage_and_a_finish_reason(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=12, temperature=0
    )
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_streamed_text_is_the_whole_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=40, temperature=0, seed=3
    )
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=40,
        temperature=0,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts, usage = [], None
    for event in stream:
        usage = event.usage or usage
        parts += [choice.delta.content or "" for choice in event.choices]
    assert "".join(parts) == whole.choices[0].message.content
    assert len(parts) > 3
    assert usage == whole.usage or (
        usage is not None
        and whole.usage is not None
        and usage.completion_tokens == whole.usage.completion_tokens
    )


def test_two_choices_of_a_completion_differ_and_stream_apart(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": PROMPT,
        "n": 2,
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": 5,
    }
    whole = client.completions.create(**asked)
    texts = {choice.index: choice.text for choice in whole.choices}
    assert sorted(texts) == [0, 1]
    assert texts[0] != texts[1]
    streamed = {0: "", 1: ""}
    for event in client.completions.create(**asked, stream=True):
        for choice in event.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_logprobs_name_the_sampled_token_among_the_likeliest(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for position in logprobs.content:
        assert len(position.top_logprobs) == 3
        assert position.top_logprobs[0].logprob == pytest.approx(position.logprob)
        assert position.logprob <= 0


def test_a_prompts_logprobs_are_those_its_tokens_were_said_with(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "logprobs": 0, "temperature": 0}
    extra = {"return_token_ids": True, "ignore_eos": True}
    [said] = client.completions.create(
        prompt=PROMPT, max_tokens=12, extra_body=extra, **asked
    ).choices
    told: Any = said
    whole = [*told.prompt_token_ids, *told.token_ids]
    answer = client.completions.create(prompt=whole, max_tokens=0, echo=True, **asked)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    assert said.logprobs is not None
    assert len(scores.token_logprobs) == len(whole)
    assert scores.token_logprobs[-12:] == pytest.approx(said.logprobs.token_logprobs, abs=1e-4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_a_bad_words_token_is_not_said(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    extra: dict[str, Any] = {"return_token_ids": True, "logprobs": 0}
    free: Any = client.completions.create(**asked, extra_body=extra).choices[0]
    said = list(zip(free.token_ids, free.logprobs.tokens, strict=True))
    token, text = next(one for one in said if len(one[1].strip()) > 1 and one[1].strip().isalpha())
    extra["bad_words"] = [text.strip()]
    cut: Any = client.completions.create(**asked, extra_body=extra).choices[0]
    place = free.token_ids.index(token)
    assert cut.token_ids[:place] == free.token_ids[:place]
    assert token not in cut.token_ids


def test_a_bias_of_a_hundred_forces_a_token(client: openai.OpenAI) -> None:
    answer: Any = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=6,
        logit_bias={"40": 100},
        extra_body={"return_token_ids": True},
    )
    assert answer.choices[0].token_ids == [40] * 6


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 48, "temperature": 0}
    free = client.completions.create(**asked)
    text = free.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    cut = client.completions.create(**asked, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens <= free.usage.completion_tokens


def test_a_prompt_that_is_too_long_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="1024") as caught:
        client.completions.create(model="tiny", prompt=[5] * 1100, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_is_not_found_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-17"):
        client.chat.completions.create(model="gpt-17", messages=MESSAGES)


def test_a_wrong_field_is_named_with_its_value(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"top_p.*1\.5"):
        client.completions.create(model="tiny", prompt=PROMPT, top_p=1.5)


def test_malformed_json_is_a_bad_request_in_openais_shape(pool: Pool) -> None:
    answer = exchange(pool.url, "/v1/chat/completions", b'{"messages": [')
    assert answer.status == 400
    assert answer.body["error"]["type"] == "invalid_request_error"
    assert answer.body["error"]["message"]


def test_the_answers_came_from_both_nodes(pool: Pool, client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="tiny", prompt=PROMPT, max_tokens=4)
    assert "prefill-0" in raw.headers["x-baton-placement"]
    assert "decode-0" in raw.headers["x-baton-placement"]
    assert pool.totals()["reused_chunks_total"] > 0

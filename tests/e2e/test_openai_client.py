"""The official OpenAI client against a disaggregated pool with a real model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.clients.http import complete, events, exchange
from tests.support.engines.tiny_models import prompt_of
from tests.support.pools.baton_up import Pool

MESSAGES: Any = [{"role": "user", "content": "the prefill node computes the prompt " * 8}]
PROMPT = "every chunk of the cache has a name " * 8


@pytest.fixture(scope="module")
def pool(tiny_model: Callable[[str], Path]) -> Iterator[Pool]:
    flags = [
        *("--model", str(tiny_model("llama-gqa2-tied")), "--dtype", "float32", "--threads", "1"),
        *("--prefill", "1", "--decode", "1", "--chunk-blocks", "1", "--handoff", "always"),
        *("--kv-blocks", "800", "--served-model-name", "tiny", "--batch-invariant", "on"),
    ]
    with Pool(flags) as running:
        yield running


@pytest.fixture
def client(pool: Pool) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_chat_completion_has_text_usage_and_a_finish_reason(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=12, temperature=0
    )
    [choice] = completion.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert completion.usage is not None
    assert 0 < completion.usage.completion_tokens <= 12
    assert (
        completion.usage.total_tokens
        == completion.usage.prompt_tokens + completion.usage.completion_tokens
    )


def test_streamed_text_equals_unstreamed_text(client: openai.OpenAI) -> None:
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


def test_two_choices_of_a_completion_differ_and_stream_separately(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompt": PROMPT,
        "n": 2,
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": 5,
    }
    whole = client.completions.create(**fields)
    texts = {choice.index: choice.text for choice in whole.choices}
    assert sorted(texts) == [0, 1]
    assert texts[0] != texts[1]
    streamed = {0: "", 1: ""}
    for event in client.completions.create(**fields, stream=True):
        for choice in event.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_chat_logprobs_include_the_sampled_token_among_the_top_tokens(
    client: openai.OpenAI,
) -> None:
    completion = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert completion.usage is not None
    assert len(logprobs.content) == completion.usage.completion_tokens
    for position in logprobs.content:
        assert len(position.top_logprobs) == 3
        assert position.top_logprobs[0].logprob == pytest.approx(position.logprob)
        assert position.logprob <= 0


def test_echoed_prompt_logprobs_equal_those_of_the_generated_tokens(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "logprobs": 0, "temperature": 0}
    extra = {"return_token_ids": True, "ignore_eos": True}
    [generated] = client.completions.create(
        prompt=PROMPT, max_tokens=12, extra_body=extra, **fields
    ).choices
    ids: Any = generated
    whole = [*ids.prompt_token_ids, *ids.token_ids]
    completion = client.completions.create(prompt=whole, max_tokens=0, echo=True, **fields)
    scores = completion.choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    assert generated.logprobs is not None
    assert len(scores.token_logprobs) == len(whole)
    assert scores.token_logprobs[-12:] == pytest.approx(generated.logprobs.token_logprobs, abs=1e-4)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 0


def test_the_token_of_a_bad_word_is_not_generated(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    extra: dict[str, Any] = {"return_token_ids": True, "logprobs": 0}
    free: Any = client.completions.create(**fields, extra_body=extra).choices[0]
    tokens = zip(free.token_ids, free.logprobs.tokens, strict=True)
    token, text = next(
        (id, text) for id, text in tokens if len(text.strip()) > 1 and text.strip().isalpha()
    )
    extra["bad_words"] = [text.strip()]
    cut: Any = client.completions.create(**fields, extra_body=extra).choices[0]
    place = free.token_ids.index(token)
    assert cut.token_ids[:place] == free.token_ids[:place]
    assert token not in cut.token_ids


def test_a_logit_bias_of_100_forces_a_token(client: openai.OpenAI) -> None:
    completion: Any = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=6,
        logit_bias={"40": 100},
        extra_body={"return_token_ids": True},
    )
    assert completion.choices[0].token_ids == [40] * 6


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 48, "temperature": 0}
    free = client.completions.create(**fields)
    text = free.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    cut = client.completions.create(**fields, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens <= free.usage.completion_tokens


def test_a_prompt_that_is_too_long_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="1024") as error:
        client.completions.create(model="tiny", prompt=[5] * 1100, max_tokens=4)
    assert error.value.code == "context_length_exceeded"


def test_the_error_for_an_unknown_model_names_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-17"):
        client.chat.completions.create(model="gpt-17", messages=MESSAGES)


def test_the_error_for_an_invalid_field_names_it_with_its_value(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"top_p.*1\.5"):
        client.completions.create(model="tiny", prompt=PROMPT, top_p=1.5)


def test_malformed_json_is_a_bad_request_with_an_openai_error(pool: Pool) -> None:
    response = exchange(pool.url, "/v1/chat/completions", b'{"messages": [')
    assert response.status == 400
    assert response.body["error"]["type"] == "invalid_request_error"
    assert response.body["error"]["message"]


def test_requests_use_both_nodes(pool: Pool, client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="tiny", prompt=PROMPT, max_tokens=4)
    assert "prefill-0" in raw.headers["x-baton-placement"]
    assert "decode-0" in raw.headers["x-baton-placement"]
    assert pool.totals()["reused_chunks_total"] > 0


def test_answers_and_nodes_of_a_batch_invariant_pool_are_bitwise_exact(pool: Pool) -> None:
    answer = complete(pool.url, prompt_of(40, seed=1), max_tokens=4)
    assert "prefill-0" in answer.headers["x-baton-placement"]
    assert answer.headers["x-baton-exact"] == "bitwise"
    assert [node["exact"] for node in pool.pool()["nodes"]] == ["bitwise"] * 2


LABELS = [5, 77, 300]


def logprob_after(client: openai.OpenAI, prompt: list[int], label: int) -> float:
    """How likely the label is after the prompt, as the last token of a prompt that is scored."""
    scored = client.completions.create(
        model="tiny", prompt=[*prompt, label], echo=True, logprobs=0, max_tokens=0
    )
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    return logprobs.token_logprobs[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_named_ids_have_the_logprobs_of_prompts_that_end_with_them(
    client: openai.OpenAI, stream: bool
) -> None:
    prompt = prompt_of(40, seed=8)
    answer: Any = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=3,
        temperature=0,
        logprobs=1,
        stream=stream,
        extra_body={
            **{"logprob_token_ids": LABELS, "return_tokens_as_token_ids": True},
            **{"return_token_ids": True, "ignore_eos": True},
        },
    )
    choices: list[Any] = [
        choice for event in (answer if stream else [answer]) for choice in event.choices
    ]
    ids = [id for choice in choices for id in choice.token_ids]
    tops = [top for choice in choices for top in choice.logprobs.top_logprobs]
    assert len(ids) == len(tops) == 3
    for place, top in enumerate(tops):
        before = prompt + ids[:place]
        assert {id: top[f"token_id:{id}"] for id in LABELS} == {
            id: logprob_after(client, before, id) for id in LABELS
        }
        assert f"token_id:{ids[place]}" in top


def test_scores_of_labels_follow_from_their_logprobs(client: openai.OpenAI, pool: Pool) -> None:
    query, items = prompt_of(20, seed=4), [prompt_of(9, seed=5), prompt_of(30, seed=6), []]
    body = {"query": query, "items": items, "label_token_ids": LABELS}
    among = exchange(pool.url, "/generative_scoring", body)
    alone = exchange(pool.url, "/generative_scoring", body | {"apply_softmax": False})
    assert (among.status, alone.status) == (200, 200)
    for item, one, other in zip(items, among.body["data"], alone.body["data"], strict=True):
        shares = [math.exp(logprob_after(client, query + item, label)) for label in LABELS]
        assert other["score"] == shares[0]
        assert one["score"] == pytest.approx(shares[0] / sum(shares))


def test_a_batch_has_the_answers_of_its_conversations(pool: Pool) -> None:
    conversations = [MESSAGES, [{"role": "user", "content": "two"}], MESSAGES + MESSAGES]
    fields = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "return_token_ids": True}
    batch = exchange(pool.url, "/v1/chat/completions/batch", {"messages": conversations, **fields})
    assert batch.status == 200, batch.body
    alone = [
        exchange(pool.url, "/v1/chat/completions", {"messages": messages, **fields}).body
        for messages in conversations
    ]
    found = [choice["token_ids"] for choice in batch.body["choices"]]
    assert found == [answer["choices"][0]["token_ids"] for answer in alone]
    assert batch.body["usage"]["prompt_tokens"] == sum(
        answer["usage"]["prompt_tokens"] for answer in alone
    )


def test_a_rendered_chat_generates_the_ids_of_the_chat(pool: Pool) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 1.0, "seed": 7}
    rendered = exchange(pool.url, "/v1/chat/completions/render", body | {"stream": True}).body
    streamed = [
        id
        for event in events(pool.url, "/inference/v1/generate", rendered)
        for choice in event["choices"]
        for id in choice["token_ids"]
    ]
    whole = exchange(pool.url, "/inference/v1/generate", rendered | {"stream": False}).body
    chat = exchange(pool.url, "/v1/chat/completions", body | {"return_token_ids": True}).body
    expected = chat["choices"][0]["token_ids"]
    assert (streamed, whole["choices"][0]["token_ids"]) == (expected, expected)

"""The official openai client reads every answer and raises its own exceptions with our messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.support.fake_node import FakeNode

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(running: Any, decode: FakeNode, prefill: FakeNode) -> Any:
    """`async with client() as openai_client`: before a router with a prefill and a decode node."""

    @asynccontextmanager
    async def opened(**settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        async with (
            running(decode, prefill, handoff="always", **settings) as router,
            openai.AsyncOpenAI(
                base_url=router.url + "/v1", api_key="any", max_retries=0
            ) as official,
        ):
            yield official

    return opened


async def test_a_chat_completion(client: Any) -> None:
    async with client() as api:
        answer = await api.chat.completions.create(model="fake-model", messages=MESSAGES, n=2)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert {choice.message.content for choice in answer.choices} == {"Hello, world!"}
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        assert answer.choices[0].message.role == "assistant"
        assert answer.usage.completion_tokens == 26
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 26
        assert answer.usage.prompt_tokens_details.cached_tokens == 8
        assert answer.id.startswith("chatcmpl-")
        assert (answer.object, answer.model) == ("chat.completion", "fake-model")


async def test_a_streamed_chat_completion_with_usage(client: Any) -> None:
    async with client() as api:
        chunks = [
            chunk
            async for chunk in await api.chat.completions.create(
                model="fake-model",
                messages=MESSAGES,
                stream=True,
                stream_options={"include_usage": True},
                max_completion_tokens=4,
            )
        ]
        *told, usage = chunks
        assert "".join(chunk.choices[0].delta.content for chunk in told) == "Hell"
        assert [chunk.choices[0].delta.role for chunk in told] == ["assistant", None, None, None]
        assert told[-1].choices[0].finish_reason == "length"
        assert (usage.choices, usage.usage.completion_tokens) == ([], 4)
        assert len({chunk.id for chunk in chunks}) == 1


async def test_chat_logprobs(client: Any) -> None:
    async with client() as api:
        answer = await api.chat.completions.create(
            model="fake-model", messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=3
        )
        content = answer.choices[0].logprobs.content
        assert [token.token for token in content] == ["H", "e", "l"]
        assert content[0].bytes == [ord("H")]
        assert [len(token.top_logprobs) for token in content] == [2, 2, 2]
        assert content[0].top_logprobs[1].logprob == -1.5
        streamed = []
        async for chunk in await api.chat.completions.create(
            model="fake-model", messages=MESSAGES, logprobs=True, max_tokens=3, stream=True
        ):
            streamed += chunk.choices[0].logprobs.content
        assert [token.token for token in streamed] == ["H", "e", "l"]
        assert streamed[0].top_logprobs == []


async def test_a_completion_with_logprobs(client: Any) -> None:
    async with client() as api:
        answer = await api.completions.create(
            model="fake-model", prompt="Say", logprobs=2, max_tokens=3
        )
        told = answer.choices[0].logprobs
        assert answer.choices[0].text == "Hel"
        assert told.tokens == ["H", "e", "l"]
        assert told.token_logprobs == [-0.5, -0.5, -0.5]
        assert told.top_logprobs[0] == {"H": -0.5, "I": -1.5}
        assert told.text_offset == [0, 1, 2]
        offsets = []
        async for chunk in await api.completions.create(
            model="fake-model", prompt="Say", logprobs=0, max_tokens=3, stream=True
        ):
            offsets += chunk.choices[0].logprobs.text_offset
        assert offsets == [0, 1, 2]


async def test_completions_of_ids_and_of_several_prompts(client: Any) -> None:
    async with client() as api:
        answer = await api.completions.create(
            model="fake-model",
            prompt=[[72, 105], [72]],
            extra_body={"return_token_ids": True, "ignore_eos": True, "top_k": 5},
        )
        assert [choice.prompt_token_ids for choice in answer.choices] == [[72, 105], [72]]
        assert bytes(answer.choices[1].token_ids) == b"Hello, world!"
        assert answer.object == "text_completion"
        chunks = [
            chunk
            async for chunk in await api.completions.create(
                model="fake-model", prompt=["a", "b"], max_tokens=2, stream=True
            )
        ]
        for index in (0, 1):
            mine = [c.choices[0].text for c in chunks if c.choices[0].index == index]
            assert mine == ["H", "e"]


async def test_chat_token_ids_stand_where_vllm_puts_them(client: Any) -> None:
    async with client() as api:
        extra = {"return_token_ids": True}
        answer = await api.chat.completions.create(
            model="fake-model", messages=MESSAGES, extra_body=extra
        )
        assert bytes(answer.choices[0].token_ids) == b"Hello, world!"
        assert b"Hi" in bytes(answer.prompt_token_ids[1:])
        stream = await api.chat.completions.create(
            model="fake-model", messages=MESSAGES, extra_body=extra, stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].prompt_token_ids == answer.prompt_token_ids
        assert not hasattr(chunks[1], "prompt_token_ids")
        assert [chunk.choices[0].token_ids for chunk in chunks[:2]] == [[72], [101]]


async def test_models_can_be_listed_and_retrieved(client: Any) -> None:
    async with client(served_model_name="my/model") as api:
        assert [model.id async for model in api.models.list()] == ["my/model"]
        assert (await api.models.retrieve("my/model")).owned_by == "baton"
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("other")
        answer = await api.completions.create(model="my/model", prompt="x", max_tokens=1)
        assert answer.model == "my/model"


async def test_errors_are_the_clients_own_types_with_our_words(client: Any) -> None:
    async with client() as api:
        with pytest.raises(openai.NotFoundError, match="'nope' does not exist") as missing:
            await api.chat.completions.create(model="nope", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="256 tokens") as long:
            await api.completions.create(model="fake-model", prompt=[1] * 256)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="temperature is -1") as wrong:
            await api.completions.create(model="fake-model", prompt="x", temperature=-1)
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="does not support") as refused:
            await api.chat.completions.create(
                model="fake-model",
                messages=MESSAGES,
                tools=[{"type": "function", "function": {"name": "f"}}],
            )
        assert refused.value.param == "tools"


async def test_a_failure_on_a_node_is_a_typed_error_too(
    client: Any, decode: FakeNode, prefill: FakeNode
) -> None:
    decode.script.run = "fail"
    prefill.script.prefill = "silent"
    async with client() as api:
        with pytest.raises(openai.InternalServerError, match="the engine said no"):
            await api.completions.create(model="fake-model", prompt="x")


async def test_an_error_in_mid_stream_reaches_the_reader(client: Any, decode: FakeNode) -> None:
    decode.script.run = "half"
    async with client() as api:
        texts: list[str] = []
        stream = await api.completions.create(model="fake-model", prompt="x", stream=True)

        async def read() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].text)
                if "".join(texts) == "Hello,":
                    await decode.drop_links()

        with pytest.raises(openai.APIError, match="decode-0 was lost"):
            await read()
        assert "".join(texts) == "Hello,"

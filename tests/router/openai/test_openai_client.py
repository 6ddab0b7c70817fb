"""The official openai client reads every answer and raises its own exceptions with our messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from baton_protocol.errors import DOCS
from baton_protocol.link import JobFailed, RunJob
from baton_protocol.sampling import SamplingParams
from tests.support.nodes.fake_node import FakeNode

pytestmark = pytest.mark.integration

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


async def send(api: Any, endpoint: str, stream: bool, **fields: Any) -> list[Any]:
    """The chunks of a stream, or a list of one answer."""
    create = api.chat.completions.create if endpoint == "chat" else api.completions.create
    prompt = {"messages": MESSAGES} if endpoint == "chat" else {"prompt": "Hi"}
    answer = await create(**({"model": "fake-model", "stream": stream} | prompt | fields))
    return [chunk async for chunk in answer] if stream else [answer]


@pytest.fixture
def client(running: Any, decode: FakeNode, prefill: FakeNode) -> Any:
    """`async with client() as api`: the official client of a router with a prefill and a decode
    node."""

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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_the_client_reads_the_logprobs_of_named_ids(
    client: Any, endpoint: str, stream: bool
) -> None:
    fields: dict[str, Any] = {"logprobs": 0} if endpoint == "completions" else {"logprobs": True}
    body = {"logprob_token_ids": [64, 32], "return_tokens_as_token_ids": True}
    async with client() as api:
        answers = await send(api, endpoint, stream, max_tokens=3, extra_body=body, **fields)
        positions: list[dict[str, float]] = []
        for logprobs in [choice.logprobs for answer in answers for choice in answer.choices]:
            if endpoint == "completions":
                positions += logprobs.top_logprobs
                continue
            for position in logprobs.content:
                positions.append({top.token: top.logprob for top in position.top_logprobs})
        assert len(positions) == 3
        for found in positions:
            named = {name: found[name] for name in ("token_id:64", "token_id:32")}
            assert named == {"token_id:64": -4.0, "token_id:32": -2.0}


async def test_the_client_reads_a_chat_completion(client: Any) -> None:
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


async def test_the_client_reads_a_streamed_chat_completion_with_usage(client: Any) -> None:
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
        *tokens, usage = chunks
        assert "".join(chunk.choices[0].delta.content for chunk in tokens) == "Hell"
        assert [chunk.choices[0].delta.role for chunk in tokens] == ["assistant", None, None, None]
        assert tokens[-1].choices[0].finish_reason == "length"
        assert (usage.choices, usage.usage.completion_tokens) == ([], 4)
        assert len({chunk.id for chunk in chunks}) == 1


async def test_the_client_reads_chat_logprobs(client: Any) -> None:
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


async def test_the_client_reads_a_completion_with_logprobs(client: Any) -> None:
    async with client() as api:
        answer = await api.completions.create(
            model="fake-model", prompt="Say", logprobs=2, max_tokens=3
        )
        logprobs = answer.choices[0].logprobs
        assert answer.choices[0].text == "Hel"
        assert logprobs.tokens == ["H", "e", "l"]
        assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
        assert logprobs.top_logprobs[0] == {"H": -0.5, "I": -1.5}
        assert logprobs.text_offset == [0, 1, 2]
        offsets = []
        async for chunk in await api.completions.create(
            model="fake-model", prompt="Say", logprobs=0, max_tokens=3, stream=True
        ):
            offsets += chunk.choices[0].logprobs.text_offset
        assert offsets == [0, 1, 2]


async def test_completions_accept_ids_and_several_prompts(client: Any) -> None:
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
            texts = [c.choices[0].text for c in chunks if c.choices[0].index == index]
            assert texts == ["H", "e"]


async def test_chat_token_ids_are_in_vllm_s_fields(client: Any) -> None:
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_each_sampling_field_reaches_the_node(
    client: Any, decode: FakeNode, endpoint: str, stream: bool
) -> None:
    async with client() as api:
        await send(
            api,
            endpoint,
            stream,
            max_tokens=5,
            n=2,
            temperature=0.5,
            top_p=0.9,
            frequency_penalty=0.5,
            presence_penalty=-1,
            logit_bias={"7": 100, "0": -0.5},
            seed=3,
            stop=["a", "b"],
            user="me",
            extra_body={
                "top_k": 7,
                "min_p": 0.1,
                "repetition_penalty": 1.2,
                "allowed_token_ids": [7, 8],
                "bad_words": ["ab"],
                "min_tokens": 2,
                "stop_token_ids": [5],
                "include_stop_str_in_output": True,
                "ignore_eos": True,
                "skip_special_tokens": False,
            },
        )
    assert decode.got_of(RunJob)[0].request.params == SamplingParams(
        max_tokens=5,
        n=2,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.5,
        presence_penalty=-1.0,
        logit_bias=((7, 100.0), (0, -0.5)),
        seed=3,
        stop=("a", "b"),
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.2,
        allowed_token_ids=(7, 8),
        bad_words=((ord("a"), ord("b")),),
        min_tokens=2,
        stop_token_ids=(5,),
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
    )


async def test_fields_without_an_effect_are_accepted(client: Any) -> None:
    async with client() as api:
        for endpoint in ("chat", "completions"):
            extra = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "best_of": 1}
            await send(api, endpoint, False, user="me", extra_body=extra)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_each_event_has_usage_if_requested(client: Any, endpoint: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client() as api:
        chunks = await send(api, endpoint, True, n=2, max_tokens=3, stream_options=options)
    *usages, total = [chunk.usage for chunk in chunks]
    assert sorted(usage.completion_tokens for usage in usages) == [1, 1, 2, 2, 3, 3]
    assert {usage.prompt_tokens for usage in usages} == {total.prompt_tokens}
    assert total.completion_tokens == 6


async def test_models_can_be_listed_and_retrieved(client: Any) -> None:
    async with client(served_model_name=("my/model",)) as api:
        assert [model.id async for model in api.models.list()] == ["my/model"]
        assert (await api.models.retrieve("my/model")).owned_by == "baton"
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("other")
        answer = await api.completions.create(model="my/model", prompt="x", max_tokens=1)
        assert answer.model == "my/model"


async def test_an_unknown_model_raises_not_found_error(client: Any) -> None:
    async with client() as api:
        with pytest.raises(openai.NotFoundError, match="'nope' does not exist") as missing:
            await send(api, "chat", False, model="nope")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


FIELDS, LONG = f"{DOCS}api.md#request-fields", f"{DOCS}api.md#long-prompts"
TOO_LONG = [{"role": "user", "content": "x" * 256}]
# A field, a value that is refused, and a part of the message beside the field's name.
REFUSED: list[tuple[str, Any, str]] = [
    ("temperature", -1, "[0, 100]"),
    ("top_p", -0.5, "[0, 1]"),
    ("top_k", -2, "[-1, 2147483647]"),
    ("min_p", 1.5, "[0, 1]"),
    ("n", 0, "[1, 128]"),
    ("max_tokens", 0, "1 or more"),
    ("max_completion_tokens", 1000, "ask for at most"),
    ("min_tokens", 5, "[0, 2]"),
    ("seed", 2**63, "64 bits"),
    ("stop", ["x"] * 17, "at most 16"),
    ("stop_token_ids", [259], "[0, 258]"),
    ("frequency_penalty", 2.5, "[-2, 2]"),
    ("presence_penalty", -2.5, "[-2, 2]"),
    ("repetition_penalty", 0, "[0.01, 10]"),
    ("logit_bias", {"5": 101}, "[-100, 100]"),
    ("logit_bias", {"259": 1}, "[0, 258]"),
    ("logit_bias", {"five": 1}, "token ids"),
    ("allowed_token_ids", [], "1 to 1024"),
    ("allowed_token_ids", [-1], "0 or more"),
    ("allowed_token_ids", [259], "[0, 258]"),
    ("bad_words", [""], "1 to 1024 characters"),
    ("bad_words", ["x" * 65], "at most 64"),
    ("prompt_logprobs", 21, "[0, 20]"),
    ("use_beam_search", "yes", "true or false"),
    ("length_penalty", 17, "[-16, 16]"),
    ("suffix", "end", "leave it out"),
    ("response_format", "json", "must be an object"),
    ("guided_regex", "(a", "unclosed group"),
    ("regex", "a+", "leave it out"),
    ("user", 5, "a string"),
    ("metadata", {"a": 1}, "a string"),
    ("stream_options", {"include_usage": True}, "stream is true"),
    ("temprature", 1, "did you mean 'temperature'?"),
    ("kv_transfer_params", {"do_remote_decode": True}, "the router decides"),
]
REFUSED_BY_ENDPOINT: dict[str, list[tuple[str, Any, str]]] = {
    "chat": [
        ("messages", [], "at least one message"),
        ("messages", TOO_LONG, "256 tokens"),
        ("top_logprobs", 3, "needs logprobs"),
        ("best_of", 2, "leave it out"),
        ("tools", {"type": "function"}, "a list"),
        ("functions", [{"name": "f"}], "use `tools`"),
        ("prompt_token_ids", [1], "leave it out"),
    ],
    "completions": [
        ("prompt", [1] * 256, "256 tokens"),
        ("prompt", [259], "[0, 258]"),
        ("best_of", 129, "[1, 128]"),
        ("logprobs", 21, "[0, 20]"),
    ],
}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_each_bad_request_error_names_the_field_and_the_allowed_values(
    client: Any, decode: FakeNode, endpoint: str
) -> None:
    async with client() as api:
        for field, value, allowed in [*REFUSED, *REFUSED_BY_ENDPOINT[endpoint]]:
            body = {field: value} if field.startswith("max_") else {"max_tokens": 2, field: value}
            with pytest.raises(openai.BadRequestError) as caught:
                await send(api, endpoint, False, extra_body=body)
            assert caught.value.param == field
            assert caught.value.type == "invalid_request_error"
            assert field in caught.value.message, caught.value.message
            assert allowed in caught.value.message, caught.value.message
            long = caught.value.code == "context_length_exceeded"
            error: Any = caught.value.body
            assert error["doc"] == (LONG if long else FIELDS)
    assert decode.got_of(RunJob) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retryable_error_has_retry_after(
    running: Any, decode: FakeNode, stream: bool
) -> None:
    async with running(decode) as router:
        router.router.api.generation.draining = True
        async with openai.AsyncOpenAI(
            base_url=router.url + "/v1", api_key="any", max_retries=0
        ) as api:
            with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
                await send(api, "chat", stream)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"


async def test_a_request_past_its_deadline_is_a_504(client: Any, prefill: FakeNode) -> None:
    prefill.script.prefill = "silent"
    async with client(request_timeout_s=0.3) as api:
        with pytest.raises(openai.InternalServerError, match="did not finish within") as caught:
            await send(api, "completions", False)
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")


async def test_a_body_that_is_too_large_is_a_413(client: Any) -> None:
    async with client(max_body_bytes=1000) as api:
        with pytest.raises(openai.APIStatusError, match="1000") as caught:
            await send(api, "completions", False, prompt="x" * 2000)
    assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")


async def test_a_failure_on_a_node_raises_a_typed_error(
    client: Any, decode: FakeNode, prefill: FakeNode
) -> None:
    decode.script.run = "fail"
    prefill.script.prefill = "silent"
    async with client() as api:
        with pytest.raises(openai.InternalServerError, match="the engine said no"):
            await api.completions.create(model="fake-model", prompt="x")


async def test_the_client_reads_past_the_comments_of_a_slow_stream(
    client: Any, decode: FakeNode
) -> None:
    decode.script.token_s = 0.1
    async with client(keepalive_s=0.02) as api:
        chunks = await send(api, "chat", True, max_tokens=4)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "Hell"


async def test_an_error_mid_stream_is_raised_to_the_reader(client: Any, decode: FakeNode) -> None:
    decode.script.run = "half"
    async with client() as api:
        texts: list[str] = []
        stream = await api.completions.create(model="fake-model", prompt="x", stream=True)

        async def read() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].text)
                if "".join(texts) == "Hello,":
                    request = decode.got_of(RunJob)[0].request
                    await decode.say(JobFailed(request.id, 1, decode.script.failure))

        with pytest.raises(openai.APIError, match="the engine said no") as caught:
            await read()
        assert caught.value.code == "engine_error"
        assert "".join(texts) == "Hello,"

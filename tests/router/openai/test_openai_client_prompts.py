"""Answers about the prompt itself, read by the official openai client: echo and prompt_logprobs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from baton_protocol.link import RunJob
from tests.router.pools import REPLY, completing, half_sent, join
from tests.support.nodes.fake_node import FakeNode

pytestmark = pytest.mark.integration


@pytest.fixture
async def api(running: Any, decode: FakeNode) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        running(decode) as router,
        openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


async def complete(api: Any, **fields: Any) -> Any:
    defaults = {"model": "fake-model", "prompt": "Say", "echo": True, "max_tokens": 2}
    return await api.completions.create(**(defaults | fields))


async def parts(api: Any, **fields: Any) -> list[Any]:
    """The choices of a stream's chunks."""
    return [chunk.choices[0] async for chunk in await complete(api, stream=True, **fields)]


async def test_an_echo_starts_with_the_prompt(api: Any, decode: FakeNode) -> None:
    answer = await complete(api)
    assert answer.choices[0].text == "SayHe"
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == 2
    # Without logprobs the node does not compute the prompt's.
    assert decode.got_of(RunJob)[0].request.params.prompt_logprobs is None


async def test_an_echo_of_ids_includes_special_tokens_whatever_skip_special_tokens_is(
    api: Any,
) -> None:
    answer = await complete(api, prompt=[[72, 105], [256, 72]], n=2)
    texts = ["HiHe", "HiHe", "<|bos|>HHe", "<|bos|>HHe"]
    assert [choice.text for choice in answer.choices] == texts
    for skip in (False, True):
        extra = {"skip_special_tokens": skip}
        answer = await complete(api, prompt=[256] * 3 + [72], logprobs=0, extra_body=extra)
        [choice] = answer.choices
        assert choice.text == "<|bos|>" * 3 + "HHe"
        assert (choice.logprobs.tokens[0], len(choice.logprobs.tokens)) == ("<|bos|>", 6)
        assert choice.logprobs.text_offset == [0, 7, 14, 21, 22, 23]


async def test_an_echo_of_a_text_prompt_is_the_unchanged_text(api: Any) -> None:
    answer = await complete(api, prompt="<|bos|>Say", logprobs=0)
    [choice] = answer.choices
    assert choice.text == "<|bos|>SayHe"
    assert choice.logprobs.text_offset == [0, 7, 8, 9, 10, 11]


async def test_an_echo_leaves_an_incomplete_last_character_to_the_answer(
    api: Any,
) -> None:
    half = [72, *"\u00fc".encode()[:1]]
    assert (await complete(api, prompt=half)).choices[0].text == "HHe"  # then the node's text
    without_answer = await complete(api, prompt=half, max_tokens=0)
    assert without_answer.choices[0].text == "H\ufffd"


async def test_all_tokens_of_a_character_have_the_character_s_offset(api: Any) -> None:
    euro = "a\u20acb"
    for prompt in (euro, [*euro.encode()]):
        logprobs = (await complete(api, prompt=prompt, logprobs=0)).choices[0].logprobs
        assert logprobs.text_offset == [0, 1, 1, 1, 2, 3, 4]
    half = await complete(api, prompt=[*euro.encode()[:3]], logprobs=0, max_tokens=0)
    assert half.choices[0].text == "a\ufffd"
    assert half.choices[0].logprobs.text_offset == [0, 1, 1]


async def test_text_offsets_continue_when_another_node_takes_over(
    running: Any, decode: FakeNode, other: FakeNode
) -> None:
    decode.script.run = "half"
    async with running(decode, link_patience_s=600.0) as client:
        fields = {"prompt": [256, 72], "echo": True, "logprobs": 0, "n": 2}
        answer = completing(client, **fields)
        await half_sent(client)
        await join(client, other)
        await decode.stop()
        status, body, _ = await answer
        assert status == 200, body
        assert [job.request.attempt for job in other.got_of(RunJob)] == [2]
        for choice in body["choices"]:
            assert choice["text"] == "<|bos|>H" + REPLY
            assert choice["logprobs"]["text_offset"] == [0, *range(7, 8 + len(REPLY))]


async def test_jobs_state_whether_the_answer_continues_the_prompt_s_text(
    api: Any, decode: FakeNode
) -> None:
    await complete(api)
    message = {"role": "user", "content": "Say"}
    await api.chat.completions.create(model="fake-model", messages=[message], max_tokens=2)
    continues = [job.request.continues_prompt for job in decode.got_of(RunJob)]
    assert continues == [True, False]


async def test_a_streamed_echo_starts_each_choice_once(api: Any) -> None:
    chunks = await parts(api, n=2)
    for index in (0, 1):
        assert [part.text for part in chunks if part.index == index] == ["SayH", "e"]


async def test_an_echo_with_logprobs_has_the_prompt_s_logprobs_first(api: Any) -> None:
    logprobs = (await complete(api, logprobs=2)).choices[0].logprobs
    assert logprobs.tokens == ["S", "a", "y", "H", "e"]
    assert logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs.top_logprobs[:2] == [None, {"a": -0.5, "b": -1.5}]
    assert logprobs.text_offset == [0, 1, 2, 3, 4]


async def test_a_streamed_echo_has_the_prompt_s_logprobs_in_each_choice_s_first_chunk(
    api: Any,
) -> None:
    chunks = await parts(api, logprobs=0, n=2, prompt=["Say", "I"])
    for index, prompt in enumerate(["Say", "Say", "I", "I"]):
        first, second = [part.logprobs for part in chunks if part.index == index]
        assert first.tokens == [*prompt, "H"]
        assert first.token_logprobs == [None] + [-0.5] * len(prompt)
        assert first.text_offset + second.text_offset == list(range(len(prompt) + 2))
        assert second.tokens == ["e"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_can_be_scored_without_an_answer(api: Any, stream: bool) -> None:
    fields = {"max_tokens": 0, "logprobs": 1}
    if stream:
        [choice] = await parts(api, **fields)
    else:
        answer = await complete(api, **fields)
        [choice] = answer.choices
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)
    assert (choice.text, choice.finish_reason) == ("Say", "length")
    assert choice.logprobs.tokens == ["S", "a", "y"]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5]


async def test_a_completion_has_prompt_logprobs_by_id_per_choice(api: Any) -> None:
    answer = await complete(api, echo=False, n=2, extra_body={"prompt_logprobs": 2})
    assert answer.choices[0].text == "He"
    assert answer.choices[0].prompt_logprobs == [
        None,
        {
            "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
        },
        {
            "121": {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
            "122": {"logprob": -1.5, "rank": 2, "decoded_token": "z"},
        },
    ]
    assert answer.choices[1].prompt_logprobs == answer.choices[0].prompt_logprobs


async def test_echo_and_prompt_logprobs_have_separate_counts(api: Any) -> None:
    answer = await complete(api, logprobs=3, extra_body={"prompt_logprobs": 1})
    [choice] = answer.choices
    assert [len(top) for top in choice.prompt_logprobs[1:]] == [1, 1]
    assert [len(top) for top in choice.logprobs.top_logprobs[1:]] == [3, 3, 3, 3]


async def test_a_chat_has_prompt_logprobs_at_the_top(api: Any) -> None:
    answer = await api.chat.completions.create(
        model="fake-model",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=2,
        n=2,
        extra_body={"prompt_logprobs": 0, "return_token_ids": True},
    )
    first, *others = answer.prompt_logprobs
    assert first is None
    assert [list(top) for top in others] == [[str(id)] for id in answer.prompt_token_ids[1:]]
    assert not hasattr(answer.choices[0], "prompt_logprobs")


async def test_the_only_token_of_a_prompt_has_no_logprob(api: Any) -> None:
    answer = await complete(api, prompt="S", logprobs=0, extra_body={"prompt_logprobs": 0})
    assert answer.choices[0].prompt_logprobs == [None]
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.5, -0.5]


async def test_tokens_may_be_named_by_their_ids(api: Any) -> None:
    by_id = {"return_tokens_as_token_ids": True}
    answer = await complete(api, prompt="Sa", logprobs=2, extra_body=by_id)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["token_id:83", "token_id:97", "token_id:72", "token_id:101"]
    assert logprobs.top_logprobs[1] == {"token_id:97": -0.5, "token_id:98": -1.5}
    assert logprobs.text_offset == [0, 1, 2, 3]
    [first, *_] = await parts(api, prompt="Sa", logprobs=0, extra_body=by_id)
    assert first.logprobs.tokens == ["token_id:83", "token_id:97", "token_id:72"]
    message = {"role": "user", "content": "Hi"}
    for stream in (False, True):
        answer = await api.chat.completions.create(
            model="fake-model",
            messages=[message],
            max_tokens=1,
            logprobs=True,
            top_logprobs=2,
            stream=stream,
            extra_body=by_id,
        )
        [choice] = [part.choices[0] async for part in answer] if stream else answer.choices
        [token] = choice.logprobs.content
        assert (token.token, token.bytes) == ("token_id:72", [72])
        assert [each.token for each in token.top_logprobs] == ["token_id:72", "token_id:73"]


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"logprobs": 0}, {"return_token_ids": True}])
async def test_optional_fields_of_a_completion_are_null_unless_requested(
    running: Any, decode: FakeNode, more: Any
) -> None:
    body = {"prompt": "S", "max_tokens": 2} | more
    requested = "return_token_ids" in more
    async with running(decode) as client:
        _, answer, _ = await client.post("/v1/completions", body)
        [choice] = answer["choices"]
        assert choice["prompt_logprobs"] is None
        assert choice["prompt_token_ids"] == ([83] if requested else None)
        assert choice["token_ids"] == ([72, 101] if requested else None)
        events = await streamed_events(client, "/v1/completions", body)
        choices = [event["choices"][0] for event in events]
        prompt_ids = [[83] if requested else None, None]
        assert [choice["prompt_token_ids"] for choice in choices] == prompt_ids
        ids = [[72], [101]] if requested else [None, None]
        assert [choice["token_ids"] for choice in choices] == ids
        # Streams do not support prompt_logprobs; like vLLM's, they lack the member.
        assert all("prompt_logprobs" not in choice for choice in choices)


@pytest.mark.parametrize("requested", [False, True])
async def test_optional_fields_of_a_chat_are_null_unless_requested(
    running: Any, decode: FakeNode, requested: bool
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    body |= {"return_token_ids": True} if requested else {}
    async with running(decode) as client:
        _, answer, _ = await client.post("/v1/chat/completions", body)
        assert answer["prompt_logprobs"] is None
        assert (answer["prompt_token_ids"] is not None) is requested
        assert answer["choices"][0]["token_ids"] == ([72, 101] if requested else None)
        first, second = await streamed_events(client, "/v1/chat/completions", body)
        assert first["prompt_token_ids"] == answer["prompt_token_ids"]
        assert "prompt_token_ids" not in second
        ids = [event["choices"][0]["token_ids"] for event in (first, second)]
        assert ids == ([[72], [101]] if requested else [None, None])


async def streamed_events(client: Any, path: str, body: Any) -> list[Any]:
    async with client.session.post(client.url + path, json=body | {"stream": True}) as response:
        lines = (await response.text()).split("\n\n")
    *events, end = [line.removeprefix("data: ") for line in lines if line]
    assert end == "[DONE]"
    return [json.loads(event) for event in events]

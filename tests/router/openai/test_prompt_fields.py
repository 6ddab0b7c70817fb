"""Fields that change the prompt: truncation, continued messages, echo, documents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from baton_protocol.link import RunJob
from baton_protocol.request import Request
from baton_text.artifacts import byte_artifacts
from baton_text.chat import ChatTemplate
from baton_text.tokenizer import Tokenizer
from tests.support.nodes.fake_node import FakeNode

pytestmark = pytest.mark.integration

MESSAGES: Any = [{"role": "user", "content": "Where is Paris?"}]
UNFINISHED: Any = [*MESSAGES, {"role": "assistant", "content": "Paris is "}]
LONG = "0123456789" * 60  # 600 tokens; the context has 256
TOKENIZER = Tokenizer.from_artifacts(byte_artifacts())
TEMPLATE = ChatTemplate.from_artifacts(byte_artifacts())
REPLY = "Hello, world!"


@pytest.fixture
def client(running: Any, decode: FakeNode) -> Any:
    """`async with client() as api`: the official client of a router with one node."""

    @asynccontextmanager
    async def opened(**settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        async with (
            running(decode, handoff="never", **settings) as router,
            openai.AsyncOpenAI(
                base_url=router.url + "/v1", api_key="any", max_retries=0
            ) as official,
        ):
            yield official

    return opened


async def completion(api: Any, prompt: Any, max_tokens: int = 4, **extra: Any) -> Any:
    return await api.completions.create(
        model="fake-model", prompt=prompt, max_tokens=max_tokens, extra_body=extra
    )


async def chat(api: Any, messages: Any = MESSAGES, stream: bool = False, **extra: Any) -> Any:
    return await api.chat.completions.create(
        model="fake-model", messages=messages, stream=stream, extra_body=extra
    )


def requests_of(decode: FakeNode) -> list[Request]:
    return [job.request for job in decode.got_of(RunJob)]


def text_of(request: Request) -> str:
    return TOKENIZER.decode(request.prompt_ids, skip_special_tokens=False)


@pytest.mark.parametrize("prompt", [LONG, list(LONG.encode())], ids=["text", "ids"])
@pytest.mark.parametrize(
    ("extra", "max_tokens", "kept"),
    [
        ({"truncate_prompt_tokens": 100}, 4, LONG[-100:]),
        ({"truncate_prompt_tokens": 1}, 4, LONG[-1:]),
        ({"truncate_prompt_tokens": 252}, 4, LONG[-252:]),
        ({"truncate_prompt_tokens": -1}, 4, LONG[-252:]),
        ({"truncate_prompt_tokens": -1}, 200, LONG[-56:]),
        ({"truncate_prompt_tokens": -1}, 255, LONG[-1:]),
        ({"truncate_prompt_tokens": 33, "truncation_side": "left"}, 4, LONG[-33:]),
        ({"truncate_prompt_tokens": 33, "truncation_side": "right"}, 4, LONG[:33]),
        ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, 4, LONG[:252]),
    ],
)
async def test_a_long_prompt_is_truncated_to_the_requested_number_of_tokens(
    client: Any, decode: FakeNode, prompt: Any, extra: Any, max_tokens: int, kept: str
) -> None:
    async with client() as api:
        answer = await completion(api, prompt, max_tokens, **extra)
    [request] = requests_of(decode)
    assert text_of(request) == kept
    assert answer.usage.prompt_tokens == len(kept)


@pytest.mark.parametrize("cut", [3, 5, 200, -1, 100_000])
async def test_a_short_prompt_is_not_truncated(client: Any, decode: FakeNode, cut: int) -> None:
    async with client() as api:
        await completion(api, "abc", truncate_prompt_tokens=cut)
        await completion(api, "abc", truncate_prompt_tokens=cut, truncation_side="right")
    assert [text_of(request) for request in requests_of(decode)] == ["abc", "abc"]


async def test_truncation_applies_to_each_prompt_of_a_call_and_to_chats(
    client: Any, decode: FakeNode
) -> None:
    async with client() as api:
        await completion(api, [LONG, "abc", "abcdef"], truncate_prompt_tokens=4)
        await chat(api, [{"role": "user", "content": LONG}], truncate_prompt_tokens=30)
        await chat(api, [{"role": "user", "content": LONG}], truncate_prompt_tokens=-1)
    *texts, short, whole = [text_of(request) for request in requests_of(decode)]
    rendered = TEMPLATE.render([{"role": "user", "content": LONG}])
    assert sorted(texts) == sorted(["6789", "abc", "cdef"])
    assert (short, whole) == (rendered[-30:], rendered[-255:])


@pytest.mark.parametrize(
    ("extra", "max_tokens", "param"),
    [
        ({"truncate_prompt_tokens": 0}, 4, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, 4, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "middle"}, 4, "truncation_side"),
        ({"truncate_prompt_tokens": 253}, 4, "max_tokens"),
        ({"truncate_prompt_tokens": 256}, 4, "prompt"),
        ({"truncate_prompt_tokens": -1}, 256, "max_tokens"),
    ],
)
async def test_a_truncation_that_leaves_no_room_or_no_prompt_is_refused(
    client: Any, decode: FakeNode, extra: Any, max_tokens: int, param: str
) -> None:
    async with client() as api:
        with pytest.raises(openai.BadRequestError) as caught:
            await completion(api, LONG, max_tokens, **extra)
    assert caught.value.param == param
    assert requests_of(decode) == []


async def test_echo_contains_the_truncated_prompt(client: Any) -> None:
    async with client() as api:
        cut = await completion(api, LONG, echo=True, truncate_prompt_tokens=10)
        whole = await completion(api, "abc", echo=True, truncate_prompt_tokens=10)
    assert cut.choices[0].text == LONG[-10:] + REPLY[:4]
    assert whole.choices[0].text == "abc" + REPLY[:4]


async def test_continue_final_message_continues_the_last_message(
    client: Any, decode: FakeNode
) -> None:
    async with client() as api:
        answer = await chat(api, UNFINISHED, continue_final_message=True)
        await chat(api, UNFINISHED, continue_final_message=True, add_generation_prompt=False)
        await chat(api, UNFINISHED)
    first, second, other = requests_of(decode)
    expected = TEMPLATE.render(UNFINISHED, add_generation_prompt=False, continue_final_message=True)
    assert expected.endswith("Paris is ")
    assert text_of(first) == text_of(second) == expected
    continues = [request.continues_prompt for request in (first, second, other)]
    assert continues == [True, True, False]
    assert answer.choices[0].message.content == REPLY


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("messages", "extra", "begins"),
    [
        (UNFINISHED, {"continue_final_message": True}, "Paris is "),
        (UNFINISHED, {"add_generation_prompt": False}, "Paris is "),
        (UNFINISHED, {}, "Paris is "),
        (MESSAGES, {}, ""),
    ],
)
async def test_echo_starts_each_choice_of_a_chat_with_the_assistant_s_last_message(
    client: Any, stream: bool, messages: Any, extra: Any, begins: str
) -> None:
    async with client() as api:
        answer = await chat(api, messages, stream, echo=True, n=2, **extra)
        texts = ["", ""]
        if stream:
            async for chunk in answer:
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        else:
            texts = [choice.message.content for choice in answer.choices]
    assert texts == [begins + REPLY] * 2


async def test_documents_are_passed_to_the_template(running: Any, decode: FakeNode) -> None:
    files = byte_artifacts() | {
        "chat_template.jinja": b"{% for d in documents %}[{{ d.title }}]{% endfor %}"
    }
    decode.serve_artifacts(files)
    documents = [{"title": "one", "text": "x"}, {"title": "two"}]
    async with running(decode) as router:
        for body in ({"documents": documents}, {"chat_template_kwargs": {"documents": documents}}):
            await router.post("/v1/chat/completions", {"messages": MESSAGES, **body})
        both = {"documents": documents, "chat_template_kwargs": {"documents": []}}
        status, answer, _ = await router.post(
            "/v1/chat/completions", {"messages": MESSAGES, **both}
        )
    assert [text_of(request) for request in requests_of(decode)] == ["[one][two]"] * 2
    assert (status, answer["error"]["param"]) == (400, "documents")


async def test_continuing_a_message_and_starting_a_new_one_is_refused(
    client: Any, decode: FakeNode
) -> None:
    async with client() as api:
        for body in (
            {"continue_final_message": True, "add_generation_prompt": True},
            {"chat_template_kwargs": {"continue_final_message": True}},
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await chat(api, UNFINISHED, **body)
            assert caught.value.param == next(iter(body))
    assert requests_of(decode) == []

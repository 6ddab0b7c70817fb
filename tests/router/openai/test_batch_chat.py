"""POST /v1/chat/completions/batch: one answer per conversation, in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from baton_router.openai.answers import ChatCompletion
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode

pytestmark = pytest.mark.integration

BATCH, CHAT = "/v1/chat/completions/batch", "/v1/chat/completions"
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "One"}],
    [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Two"}],
    [{"role": "user", "content": "Three"}, {"role": "assistant", "content": "Well"}],
]


def prompts(node: FakeNode) -> dict[str, tuple[int, ...]]:
    """The prompts that the node got, by the last part of the requests' ids."""
    return {job.request.id[-2:]: job.request.prompt_ids for job in node.got}  # type: ignore[union-attr]


async def test_each_conversation_has_one_choice_in_order(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        body = {"messages": CONVERSATIONS, "max_tokens": 4, "logprobs": True, "echo": True}
        status, answer, _ = await client.post(BATCH, body | {"return_token_ids": True})
        assert status == 200, answer
        read = msgspec.convert(answer, ChatCompletion)
        assert [choice.index for choice in read.choices] == [0, 1, 2]
        texts = [choice.message.content for choice in read.choices]
        assert texts == ["Hell", "Hell", "WellHell"]
        assert all(choice.token_ids == list(b"Hell") for choice in read.choices)
        assert all(len(choice.logprobs.content) == 4 for choice in read.choices if choice.logprobs)
        batch = prompts(decode)
        assert sorted(batch) == ["-0", "-1", "-2"]
        assert read.usage.prompt_tokens == sum(map(len, batch.values()))
        for place, messages in enumerate(CONVERSATIONS):
            decode.got.clear()
            status, _, _ = await client.post(CHAT, {"messages": messages, "max_tokens": 4})
            assert status == 200
            [alone] = prompts(decode).values()
            assert batch[f"-{place}"] == alone


async def test_a_continued_conversation_is_echoed_with_its_own_text(decode: FakeNode) -> None:
    begun = [[*CONVERSATIONS[0], {"role": "assistant", "content": text}] for text in ("A", "B")]
    body = {"messages": begun, "continue_final_message": True, "echo": True, "max_tokens": 1}
    async with pools.running(decode) as client:
        status, answer, _ = await client.post(BATCH, body)
        assert status == 200, answer
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["AH", "BH"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": CONVERSATIONS[0]}, "messages[0]"),
        ({"messages": [*CONVERSATIONS, [{"role": "user"}]]}, "messages[3][0].content"),
        ({"n": 2}, "n"),
        ({"stream": True}, "stream"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "now"}}]}, "tools"),
        ({"messages": [CONVERSATIONS[0]] * 1025}, "messages"),
        ({"messages": [[{"role": "user", "content": "x" * 200_000}]]}, "messages"),
    ],
)
async def test_what_a_batch_lacks_is_an_error_that_names_it(
    decode: FakeNode, body: Mapping[str, Any], param: str
) -> None:
    async with pools.running(decode) as client:
        status, answer, _ = await client.post(BATCH, {"messages": CONVERSATIONS} | dict(body))
        assert (status, answer["error"]["param"]) == (400, param), answer


async def test_a_batch_may_say_that_it_wants_no_tools(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        body = {"messages": CONVERSATIONS, "tool_choice": "none", "stream": False, "n": 1}
        assert (await client.post(BATCH, body))[0] == 200

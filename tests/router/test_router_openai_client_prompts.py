"""What the official openai client is told about the prompt itself: echo and prompt_logprobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from baton_protocol.link import RunJob
from tests.support.fake_node import FakeNode


@pytest.fixture
async def api(running: Any, decode: FakeNode) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        running(decode) as router,
        openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


async def complete(api: Any, **fields: Any) -> Any:
    asked = {"model": "fake-model", "prompt": "Say", "echo": True, "max_tokens": 2}
    return await api.completions.create(**(asked | fields))


async def parts(api: Any, **fields: Any) -> list[Any]:
    """The choices of a stream's chunks."""
    return [chunk.choices[0] async for chunk in await complete(api, stream=True, **fields)]


async def test_an_echo_begins_with_the_prompt(api: Any, decode: FakeNode) -> None:
    answer = await complete(api)
    assert answer.choices[0].text == "SayHe"
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == 2
    # Nothing is computed that nobody asked for.
    assert decode.got_of(RunJob)[0].request.params.prompt_logprobs is None


async def test_an_echo_of_ids_is_their_text(api: Any) -> None:
    answer = await complete(api, prompt=[[72, 105], [256, 72]], n=2)
    assert [choice.text for choice in answer.choices] == ["HiHe", "HiHe", "HHe", "HHe"]
    shown = await complete(api, prompt=[256, 72], extra_body={"skip_special_tokens": False})
    assert shown.choices[0].text.endswith("HHe")
    assert len(shown.choices[0].text) > 3


async def test_an_echo_leaves_a_character_that_the_prompt_only_begins_to_the_answer(
    api: Any,
) -> None:
    half = [72, *"\u00fc".encode()[:1]]
    assert (await complete(api, prompt=half)).choices[0].text == "HHe"  # the node's text follows
    alone = await complete(api, prompt=half, max_tokens=0)
    assert alone.choices[0].text == "H\ufffd"


async def test_nodes_are_told_which_answers_continue_their_prompts_text(
    api: Any, decode: FakeNode
) -> None:
    await complete(api)
    message = {"role": "user", "content": "Say"}
    await api.chat.completions.create(model="fake-model", messages=[message], max_tokens=2)
    asked = [job.request.continues_prompt for job in decode.got_of(RunJob)]
    assert asked == [True, False]


async def test_a_streamed_echo_begins_each_choice_once(api: Any) -> None:
    chunks = await parts(api, n=2)
    for index in (0, 1):
        assert [part.text for part in chunks if part.index == index] == ["SayH", "e"]


async def test_an_echo_with_logprobs_has_the_prompts_first(api: Any) -> None:
    told = (await complete(api, logprobs=2)).choices[0].logprobs
    assert told.tokens == ["S", "a", "y", "H", "e"]
    assert told.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5]
    assert told.top_logprobs[:2] == [None, {"a": -0.5, "b": -1.5}]
    assert told.text_offset == [0, 1, 2, 3, 4]


async def test_a_streamed_echo_has_the_prompts_logprobs_in_each_choices_first_chunk(
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
    asked = {"max_tokens": 0, "logprobs": 1}
    if stream:
        [choice] = await parts(api, **asked)
    else:
        answer = await complete(api, **asked)
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


async def test_echo_and_prompt_logprobs_have_their_own_counts(api: Any) -> None:
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

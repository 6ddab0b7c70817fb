"""Answers: encoded JSON decodes into the records of the API document."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from baton_protocol.errors import PromptTooLong, Unavailable
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta
from baton_protocol.sampling import FinishReason
from baton_router.openai.answers import (
    DONE,
    ChatCompletionChunk,
    CommonFields,
    CompletionChunk,
    CompletionChunkChoice,
    ErrorAnswer,
    Usage,
)
from baton_router.openai.chat import ChatCall
from baton_router.openai.completions import CompletionCall
from baton_text.artifacts import byte_artifacts
from baton_text.tokenizer import Tokenizer

COMMON = CommonFields(id="cmpl-1", created=5, model="m", system_fingerprint="f")
TOKENIZER = Tokenizer.from_artifacts(byte_artifacts())
PROMPTS = [(1, 2, 3), (4, 5, 6, 7)]
MESSAGES = [{"role": "user", "content": "x"}]


def delta(text: str, finish: FinishReason | None = None, stop: str | None = None) -> Delta:
    return Delta(RequestId("r"), 1, 0, 0, ids=(7,), text=text, finish=finish, stop=stop)


def completion(**more: Any) -> Any:
    call = CompletionCall.from_body({"prompt": ["a", "b"], "stream": True, **more})
    return call.shape(COMMON, PROMPTS, TOKENIZER)


def chat(**more: Any) -> Any:
    call = ChatCall.from_body({"messages": MESSAGES, "stream": True, **more})
    return call.shape(COMMON, PROMPTS[:1], TOKENIZER)


def decoded(event: bytes, kind: type) -> Any:
    assert event.endswith(b"\n\n")
    return msgspec.json.decode(event.removeprefix(b"data: "), type=kind)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(
    "part", [delta('a"\n\u00e9'), delta("", "stop", "x"), delta("b", "length")]
)
def test_a_text_event_decodes_into_a_completion_chunk(part: Delta, usage: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    shape = completion(**({"stream_options": options} if usage else {}))
    choice = CompletionChunkChoice(
        index=1,
        text=part.text,
        logprobs=None,
        finish_reason=part.finish,
        prompt_token_ids=None,
        token_ids=None,
        stop_reason=UNSET if part.finish is None else part.stop,
    )
    assert decoded(shape.event(1, part), CompletionChunk) == CompletionChunk(
        id="cmpl-1",
        object="text_completion",
        created=5,
        model="m",
        system_fingerprint="f",
        choices=[choice],
        usage=Usage.of(4, 1) if usage else UNSET,
    )
    assert shape.event(1, delta("")) == b""


def test_only_the_first_event_of_a_choice_has_its_role_and_the_prompt() -> None:
    shape = chat(n=2, return_token_ids=True)
    events = [decoded(shape.event(index, delta("a")), ChatCompletionChunk) for index in (0, 1, 1)]
    assert [event.choices[0].delta.role for event in events] == ["assistant", "assistant", UNSET]
    assert [event.prompt_token_ids for event in events] == [[1, 2, 3], None, UNSET]
    assert [event.choices[0].token_ids for event in events] == [[7]] * 3


def test_choices_of_a_chat_begin_in_their_order_even_if_text_is_held_back() -> None:
    shape = chat(n=3)
    assert shape.event(0, delta("")) == b""
    data = shape.event(2, delta("c")) + shape.event(0, delta("a")) + shape.event(1, delta("b"))
    events = [decoded(each + b"\n\n", ChatCompletionChunk) for each in data.split(b"\n\n")[:-1]]
    shown = [(event.choices[0].index, event.choices[0].delta) for event in events]
    assert [(index, said.role, said.content) for index, said in shown] == [
        *((0, "assistant", ""), (1, "assistant", ""), (2, "assistant", "c")),
        *((0, UNSET, "a"), (1, UNSET, "b")),
    ]


def test_the_usage_event_has_no_choices_and_no_prompt_token_ids() -> None:
    for shape, kind in ((completion(), CompletionChunk), (chat(), ChatCompletionChunk)):
        shape.event(0, delta("a"))
        chunk = decoded(shape.end(Usage.of(7, 2, cached=3)).removesuffix(DONE), kind)
        assert (chunk.choices, chunk.usage.total_tokens, chunk.usage.cached_tokens) == ([], 9, 3)
        assert "prompt_token_ids" not in msgspec.structs.asdict(chunk) or (
            chunk.prompt_token_ids is UNSET
        )


def test_an_error_has_openai_s_shape() -> None:
    record = PromptTooLong("9 tokens; at most 8", param="prompt").record()
    assert record.status == 400
    assert json.loads(msgspec.json.encode(ErrorAnswer.of(record))) == {
        "error": {
            "message": "9 tokens; at most 8",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "context_length_exceeded",
            "doc": "docs/api.md#long-prompts",
        }
    }
    unavailable = ErrorAnswer.of(Unavailable("no node can serve it").record())
    assert b"doc" not in msgspec.json.encode(unavailable)

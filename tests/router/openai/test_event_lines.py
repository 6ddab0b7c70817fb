"""A stream's event is one line for every client: also for those that split lines as
`str.splitlines` does, at more characters than server-sent events do."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from baton_protocol.errors import ErrorRecord
from baton_protocol.link import JobFailed, RunJob
from baton_router.openai.answers import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatDelta,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    ErrorAnswer,
    FunctionDelta,
    ToolCallDelta,
    event,
)
from baton_text.artifacts import byte_artifacts
from baton_text.parsers.registry import parsers_artifact
from tests.support.nodes.fake_node import FakeNode

Json = dict[str, Any]
# All characters at which `str.splitlines` splits, found by asking it.
EVERY = "".join(map(chr, range(0x110000)))
BREAKS = "".join(line[-1] for line in EVERY.splitlines(keepends=True)[:-1])
# Their bytes in other characters, and characters that look like them but break no line.
OTHERS = "\x7f\x84\x86\xa0\u0385\u2003\u2027\u202a\u200b\ufeff\u8028\U00020285\\u2028\\\u00a8\u00a9"
TEXT = f"a{BREAKS}{OTHERS}z"
COMMON: Json = {"id": "chatcmpl-1", "created": 5, "model": "m", "system_fingerprint": "f"}
FIELDS: Json = {"logprobs": None, "finish_reason": None, "token_ids": None}


def chat(delta: ChatDelta, **common: Any) -> ChatCompletionChunk:
    choice = ChatChunkChoice(index=0, delta=delta, **FIELDS)
    shared = COMMON | common
    return ChatCompletionChunk(**shared, object="chat.completion.chunk", choices=[choice])


def completion(text: str, logprobs: CompletionLogprobs | None = None) -> CompletionChunk:
    fields = FIELDS | {"logprobs": logprobs}
    choice = CompletionChunkChoice(index=0, text=text, prompt_token_ids=None, **fields)
    return CompletionChunk(**COMMON, object="text_completion", choices=[choice])


def called(**function: str) -> ChatDelta:
    one = ToolCallDelta(index=0, function=FunctionDelta(**{"arguments": "", **function}))
    return ChatDelta(tool_calls=[one])


def scored(text: str) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[text], token_logprobs=[-1.0], top_logprobs=[{text: -1.0}], text_offset=[0]
    )


def error(text: str) -> ErrorAnswer:
    return ErrorAnswer.of(ErrorRecord(text, text, status=500, param=text))


EVENTS: dict[str, Any] = {
    "content": lambda text: chat(ChatDelta(content=text)),
    "reasoning": lambda text: chat(ChatDelta(reasoning=text, reasoning_content=text)),
    "a call's arguments": lambda text: chat(called(arguments=text)),
    "a call's name": lambda text: chat(called(name=text)),
    "a model's name": lambda text: chat(ChatDelta(content="a"), model=text),
    "a completion's text": completion,
    "a completion's logprobs": lambda text: completion("a", scored(text)),
    "an error": error,
}


@pytest.mark.parametrize("char", [*BREAKS, *OTHERS], ids=lambda char: f"U+{ord(char):04X}")
@pytest.mark.parametrize("place", EVENTS)
def test_an_event_is_one_line_and_says_the_same(place: str, char: str) -> None:
    record = EVENTS[place](f"a{char}{char}b")
    data = event(record)
    [line, empty] = data.decode().splitlines()
    assert empty == ""
    assert msgspec.json.decode(line.removeprefix("data: ")) == msgspec.to_builtins(record)


def test_other_characters_are_sent_as_they_are() -> None:
    assert OTHERS.replace("\\", "\\\\").encode() in event(completion(TEXT))


async def lines_of(url: str, path: str, **body: Any) -> list[str]:
    """The stream's lines, as httpx splits them."""
    async with (
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", path, json=body | {"stream": True}) as answer,
    ):
        assert answer.status_code == 200
        return [line async for line in answer.aiter_lines() if line]


WEATHER: Json = {"type": "function", "function": {"name": "weather"}}
MESSAGES: Json = {"messages": [{"role": "user", "content": "Hi"}]}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "TEXT"}}</tool_call>'
ROUTE = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def part(choice: Json) -> str:
    """What an event adds to the answer's text, reasoning or arguments."""
    delta = choice.get("delta", {})
    calls = [call["function"]["arguments"] for call in delta.get("tool_calls", ())]
    texts = [choice.get("text"), delta.get("content"), delta.get("reasoning"), *calls]
    return "".join(text for text in texts if text)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("route", "body", "reply"),
    [
        ("completions", {"prompt": "Hi"}, TEXT),
        ("completions", {"prompt": "Hi", "logprobs": 1, "echo": True}, TEXT),
        ("completions", {"prompt": TEXT, "echo": True, "max_tokens": 0}, TEXT),
        ("chat", MESSAGES, TEXT),
        ("chat", {**MESSAGES, "logprobs": True, "top_logprobs": 2}, TEXT),
        ("chat", MESSAGES, f"<think>{TEXT}"),
        ("chat", {**MESSAGES, "tools": [WEATHER]}, CALL.replace("TEXT", "\x85\u2028\u2029")),
    ],
)
async def test_httpx_reads_each_event_of_a_stream_as_one_line(
    running: Any, decode: FakeNode, route: str, body: Json, reply: str
) -> None:
    decode.serve_artifacts(byte_artifacts() | parsers_artifact("hermes", "qwen3"))
    decode.script.reply = reply.encode()
    async with running(decode) as client:
        *lines, done = await lines_of(client.url, ROUTE[route], **{"max_tokens": 99, **body})
    assert done == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    answer = "".join(part(choice) for event in events for choice in event["choices"])
    assert (TEXT if TEXT in reply else "\x85\u2028\u2029") in answer


@pytest.mark.integration
async def test_httpx_reads_an_error_in_a_stream_as_one_line(running: Any, decode: FakeNode) -> None:
    decode.script.run = "half"
    async with running(decode) as client:

        async def fail() -> None:
            [job] = decode.got_of(RunJob)
            record = ErrorRecord(TEXT, "engine_error", status=500)
            await decode.say(JobFailed(job.request.id, job.request.attempt, record))

        async with (
            httpx.AsyncClient(base_url=client.url) as http,
            http.stream("POST", ROUTE["chat"], json=MESSAGES | {"stream": True}) as answer,
        ):
            lines: list[str] = []
            async for line in answer.aiter_lines():
                if not lines:
                    await fail()
                lines += [line] if line else []
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["message"] == TEXT

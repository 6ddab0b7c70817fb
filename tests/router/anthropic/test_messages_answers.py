"""Answers of the Messages API: one piece and a stream have the same blocks, however the text is cut
into deltas; and the exact bytes of a stream."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta
from baton_protocol.sampling import FinishReason
from baton_router.anthropic.answers import (
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    Message,
    MessageDelta,
    MessageEvent,
    MessagesError,
    MessageStart,
    MessageStop,
    SignatureDelta,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    event,
)
from baton_router.anthropic.messages import MESSAGES, MessagesCall
from baton_router.openai.answers import CommonFields, CompletionTokensDetails, Usage
from baton_router.openai.choice_output import ChoiceOutput
from baton_text.conversation import RAW_ARGUMENTS
from tests.router.anthropic.test_messages_fields import TOOL, body
from tests.router.openai.bodies import Json
from tests.router.openai.test_event_lines import TEXT
from tests.router.openai.test_tools import PARIS, TIME, TOKENIZER, cuts, model

COMMON = CommonFields(id="msg_1", created=5, model="m", system_fingerprint="f")
NOW: Json = {"name": "now", "input_schema": {"type": "object"}}
OFFERED: Json = {"tools": [TOOL, NOW], "max_tokens": 500}
CALLED: Json = {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}}
ASKED: Json = {"type": "tool_use", "name": "now", "input": {}}
USAGE = Usage.of(20, 4, 12)


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def thought(words: str) -> Json:
    return {"type": "thinking", "thinking": words}


def cut_call(arguments: str) -> Json:
    return {"type": "tool_use", "name": "weather", "input": {RAW_ARGUMENTS: arguments}}


# Fields of the body, the generated text, how it finished, the blocks and the reason of the stop.
Answer = tuple[Json, str, FinishReason, list[Json], str]
ANSWERS: dict[str, Answer] = {
    "text": ({}, "It is sunny.", "stop", [text("It is sunny.")], "end_turn"),
    "nothing": ({}, "", "stop", [], "end_turn"),
    "a call": ({}, PARIS, "stop", [CALLED], "tool_use"),
    "text and calls": (
        {},
        f"I look.\n{PARIS}\n{TIME}",
        "stop",
        [text("I look."), CALLED, ASKED],
        "tool_use",
    ),
    "a tool that must be called": (
        {"tool_choice": {"type": "tool", "name": "weather"}},
        PARIS,
        "stop",
        [CALLED],
        "tool_use",
    ),
    "one call at most": (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        f"{PARIS}\n{TIME}\nDone.",
        "stop",
        [CALLED, text("Done.")],
        "tool_use",
    ),
    "a cut call": (
        {"max_tokens": 1},
        PARIS[: PARIS.index("ris")],
        "length",
        [cut_call('{"city": "Pa')],
        "max_tokens",
    ),
    "a call that only looks cut": (
        {},
        PARIS[: PARIS.index("ris")],
        "stop",
        [cut_call('{"city": "Pa')],
        "end_turn",
    ),
    "thinking": ({}, "<think>\nSo.\n</think>\n\nYes.", "stop", [thought("So."), text("Yes.")], ""),
    "thinking alone": ({}, "<think>So", "stop", [thought("So")], "end_turn"),
    "thinking that is not shown": (
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        "<think>So.</think>Yes.",
        "stop",
        [text("Yes.")],
        "end_turn",
    ),
    "thinking and a call": ({}, f"<think>So.</think>{PARIS}", "stop", [thought("So."), CALLED], ""),
    "no tools": ({"tools": []}, PARIS, "stop", [text(PARIS)], "end_turn"),
    "a continued message": (
        {"messages": [{"role": "assistant", "content": "<think>So</think>It"}]},
        " is <so>.",
        "stop",
        [text(" is <so>.")],
        "end_turn",
    ),
    "the context ends": ({}, "It is", "length", [text("It is")], "model_context_window_exceeded"),
}


def shape(fields: Json) -> Any:
    call = MessagesCall.from_body(body(**{**OFFERED, **fields}))
    served = model()
    return call.shape(COMMON, [(1, 2)], TOKENIZER, call.parsing(served, call.prompts(served)))


def deltas(parts: list[str], finish: FinishReason, stop: str | int | None = None) -> list[Delta]:
    last = len(parts) - 1
    return [
        Delta(
            RequestId("r"),
            *(1, 0, number),
            ids=(7,),
            text=part,
            finish=finish if number == last else None,
            stop=stop if number == last else None,
        )
        for number, part in enumerate(parts)
    ]


def whole(fields: Json, given: list[Delta]) -> Message:
    output = ChoiceOutput()
    for delta in given:
        output.add(delta)
    return msgspec.json.decode(shape(fields).answer([output], USAGE), type=Message)


def records(data: bytes) -> list[Any]:
    """The events of a stream. Each has the name of its type, and stands in one line."""
    found = []
    for lines in data.decode().removesuffix("\n\n").split("\n\n"):
        name, line = lines.split("\n")
        assert len(line.splitlines()) == 1
        record = msgspec.json.decode(line.removeprefix("data: "), type=MessageEvent)
        assert name == f"event: {record.__struct_config__.tag}"
        found.append(record)
    return found


def assembled(stream: list[Any]) -> Message:
    """The message that a client puts together from a stream's events."""
    begin, *between, ended, stop = stream
    assert isinstance(begin, MessageStart)
    assert isinstance(ended, MessageDelta)
    assert isinstance(stop, MessageStop)
    message, open_block, parts = begin.message, None, [""]
    assert message.content == []
    assert message.usage.input_tokens == 2
    for record in between:
        if isinstance(record, BlockStart):
            assert open_block is None
            assert record.index == len(message.content)
            open_block, parts = record.content_block, [""]
            message.content.append(record.content_block)
            continue
        assert record.index == len(message.content) - 1
        if isinstance(record, BlockStop):
            add_text(open_block, "".join(parts))
            open_block = None
            continue
        assert isinstance(record, BlockDelta)
        match record.delta:
            case SignatureDelta(signature=signature):
                assert isinstance(open_block, ThinkingBlock)
                open_block.signature = signature
            case TextDelta(text=more) | ThinkingDelta(thinking=more):
                parts.append(more)
            case InputDelta(partial_json=more):
                parts.append(more)
    assert open_block is None
    message.stop_reason, message.stop_sequence = ended.delta.stop_reason, ended.delta.stop_sequence
    message.usage = ended.usage
    return message


def add_text(block: Any, words: str) -> None:
    if isinstance(block, ThinkingBlock):
        block.thinking = words
    elif hasattr(block, "text"):
        block.text = words
    else:
        try:
            assert isinstance(msgspec.json.decode(words or "{}"), dict)
            block.input = msgspec.Raw((words or "{}").encode())
        except msgspec.DecodeError:
            block.input = msgspec.Raw(msgspec.json.encode({RAW_ARGUMENTS: words}))


def plain(message: Message) -> Json:
    built: Json = msgspec.to_builtins(msgspec.json.decode(msgspec.json.encode(message)))
    return built


@pytest.mark.parametrize(
    ("fields", "words", "finish", "blocks", "reason"), ANSWERS.values(), ids=ANSWERS
)
def test_an_answer_and_each_stream_of_it_have_the_same_blocks(
    fields: Json, words: str, finish: FinishReason, blocks: list[Json], reason: str
) -> None:
    answer = plain(whole(fields, deltas([words], finish)))
    bare = [
        {name: value for name, value in block.items() if name not in ("id", "signature")}
        for block in answer["content"]
    ]
    assert bare == blocks
    expected = reason or ("tool_use" if blocks[-1]["type"] == "tool_use" else "end_turn")
    assert answer["stop_reason"] == expected
    assert (answer["id"], answer["role"], answer["type"]) == ("msg_1", "assistant", "message")
    for parts in cuts(words):
        writer = shape(fields)
        data = b"".join(writer.event(0, delta) for delta in deltas(parts, finish))
        streamed = plain(assembled(records(data + writer.end(USAGE))))
        assert streamed == answer
    signatures = [block["signature"] for block in answer["content"] if "signature" in block]
    assert all(signatures)


def test_a_stop_sequence_is_named_and_a_stop_token_is_not() -> None:
    stopped = whole({"stop_sequences": ["END"]}, deltas(["It is "], "stop", "END"))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    stopped = whole({}, deltas(["It is "], "stop", 7))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("end_turn", None)


def test_usage_tells_cached_tokens_and_thinking_apart() -> None:
    usage = Usage.of(20, 4, 12)
    usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=3)
    [delta] = deltas(["x"], "stop")
    output = ChoiceOutput()
    output.add(delta)
    answer = msgspec.json.decode(shape({}).answer([output], usage))
    assert answer["usage"] == {
        "input_tokens": 8,
        "cache_read_input_tokens": 12,
        "cache_creation_input_tokens": 0,
        "output_tokens": 4,
        "output_tokens_details": {"thinking_tokens": 3},
    }


GOLDEN = """\
event: message_start
data: {"type":"message_start","message":{"type":"message","id":"msg_1","role":"assistant",\
"model":"m","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":2,\
"output_tokens":0,"cache_read_input_tokens":0,"cache_creation_input_tokens":0}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"",\
"signature":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"So."}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta",\
"signature":"SIGNATURE"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: content_block_start
data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Yes"}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"."}}

event: content_block_stop
data: {"type":"content_block_stop","index":1}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},\
"usage":{"input_tokens":8,"output_tokens":4,"cache_read_input_tokens":12,\
"cache_creation_input_tokens":0}}

event: message_stop
data: {"type":"message_stop"}

"""


def test_the_bytes_of_a_stream() -> None:
    writer = shape({"tools": []})
    given = deltas(["<think>So.</think>", "Yes", "."], "stop")
    data = b"".join(writer.event(0, delta) for delta in given) + writer.end(USAGE)
    [signature] = [
        record.delta.signature
        for record in records(data)
        if isinstance(record, BlockDelta) and isinstance(record.delta, SignatureDelta)
    ]
    assert data.decode() == GOLDEN.replace("SIGNATURE", signature)


@pytest.mark.parametrize("words", [TEXT, f"<think>{TEXT}</think>"])
def test_text_with_line_breaks_of_other_kinds_stays_in_one_line(words: str) -> None:
    writer = shape({"tools": []})
    data = b"".join(writer.event(0, delta) for delta in deltas([words], "stop"))
    message = assembled(records(data + writer.end(USAGE)))
    assert (
        plain(message)["content"] == plain(whole({"tools": []}, deltas([words], "stop")))["content"]
    )


def test_a_tool_s_input_keeps_numbers_that_no_64_bits_hold() -> None:
    long = PARIS.replace('"Paris"', "9" * 30)
    [block] = whole({}, deltas([long], "stop")).content
    assert bytes(block.input) == b'{"city": %b}' % (b"9" * 30)  # type: ignore[union-attr]


STATUSES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@pytest.mark.parametrize(("status", "type_"), STATUSES.items())
def test_errors_have_anthropic_s_types(status: int, type_: str) -> None:
    record = ErrorRecord("It failed.", "a_code", status=status, param="model")
    assert msgspec.to_builtins(MESSAGES.error_body(record, "r1")) == {
        "type": "error",
        "error": {
            "type": type_,
            "message": "It failed.",
            "details": {"error_code": "a_code", "param": "model"},
        },
        "request_id": "r1",
    }
    assert shape({}).error_event(record) == event(MessagesError.of(record))
    assert event(MessagesError.of(record)).startswith(b'event: error\ndata: {"type":"error"')

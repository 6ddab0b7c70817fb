"""The items and events of a response, whatever its deltas: text, reasoning, calls, and ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response as ClientResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs, TokenLogprob
from baton_protocol.sampling import FinishReason
from baton_router.openai.answers import CommonFields, CompletionTokensDetails, Usage
from baton_router.openai.call import TextPrompt
from baton_router.openai.choice_output import ChoiceOutput
from baton_router.responses.call import RESPONSES, ResponseCall
from baton_router.responses.event_log import EventLog, EventReader
from baton_router.responses.events import ResponseCreated, event_bytes
from baton_router.responses.items import decoded_reasoning
from baton_router.responses.records import Response
from baton_router.responses.replay import ReplayedResponse
from baton_router.responses.shape import ResponseShape
from tests.router.openai.test_tools import CITY, PARIS, TIME, TOKENIZER, model

Json = dict[str, Any]
NAME = "0123456789abcdef" * 2
COMMON = CommonFields(id=f"resp_{NAME}", created=5, model="m", system_fingerprint="f")
TOOLS: Json = {
    "tools": [
        {"type": "function", "name": "weather", "parameters": CITY},
        {"type": "function", "name": "now"},
    ]
}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def shape(*, reasons: bool = True, **fields: Any) -> ResponseShape:
    call = ResponseCall.from_body({"input": "Hi"} | fields)
    served = model(reasons=reasons)
    prompts = call.prompts(served)
    assert isinstance(prompts[0], TextPrompt)
    return call.shape(COMMON, [(1, 2)], TOKENIZER, call.parsing(served, prompts))


def usage() -> Usage:
    counted = Usage.of(2, 3, 1)
    counted.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=1)
    return counted


def delta(text: str, finish: FinishReason | None = None) -> Delta:
    ids = tuple(TOKENIZER.encode(text, add_special_tokens=False))
    return Delta(RequestId("r"), 1, choice=0, offset=0, ids=ids, text=text, finish=finish)


def parts(text: str, size: int) -> Iterator[str]:
    for at in range(0, len(text), size):
        yield text[at : at + size]


def events(data: bytes) -> list[Json]:
    """The data of events, each of which has its type as its name."""
    shown = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, line = block.split("\n")
        event = msgspec.json.decode(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        shown.append(event)
    return shown


def streamed(written: ResponseShape, text: str, finish: FinishReason, size: int = 3) -> list[Json]:
    data = b"".join(written.event(0, delta(part)) for part in parts(text, size))
    return events(data + written.event(0, delta("", finish)) + written.end(usage()))


def whole(written: ResponseShape, text: str, finish: FinishReason) -> Json:
    output = ChoiceOutput()
    output.add(delta(text, finish))
    answer: Json = msgspec.json.decode(written.answer([output], usage()))
    return answer


def short(shown: Sequence[Json]) -> list[str]:
    """The types of events without `response.`; equal ones that follow each other once."""
    names = [event["type"].removeprefix("response.") for event in shown]
    return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]


MESSAGE = [
    *("output_item.added", "content_part.added", "output_text.delta"),
    *("output_text.done", "content_part.done", "output_item.done"),
]
REASONING = [
    *("output_item.added", "content_part.added", "reasoning_text.delta"),
    *("reasoning_text.done", "content_part.done", "output_item.done"),
]
CALL = [
    *("output_item.added", "function_call_arguments.delta"),
    *("function_call_arguments.done", "output_item.done"),
]
BEGIN = ["created", "in_progress"]
CASES: dict[str, tuple[Json, str, FinishReason, list[str]]] = {
    "text": ({}, "Good morning.", "stop", [*MESSAGE, "completed"]),
    "cut text": ({}, "Good m", "length", [*MESSAGE, "incomplete"]),
    "nothing": (
        {},
        "",
        "stop",
        [name for name in MESSAGE if name != "output_text.delta"] + ["completed"],
    ),
    "reasoning": (
        {"reasoning": {"effort": "high"}},
        "<think>Morning?</think>Good morning.",
        "stop",
        [*REASONING, *MESSAGE, "completed"],
    ),
    "cut reasoning": ({}, "<think>Morn", "length", [*REASONING, "incomplete"]),
    "a call": (TOOLS, PARIS, "stop", [*CALL, "completed"]),
    "calls": (TOOLS, f"{PARIS}\n{TIME}", "stop", [*CALL, *CALL, "completed"]),
    "all": (
        TOOLS,
        f"<think>Where?</think>Let me see.{PARIS}",
        "stop",
        [*REASONING, *MESSAGE, *CALL, "completed"],
    ),
    "a cut call": (TOOLS, PARIS[:-30], "length", [*CALL, "incomplete"]),
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("case", CASES)
def test_a_stream_shows_each_item_in_order_and_ends_with_the_answer_in_one_piece(
    case: str, size: int
) -> None:
    fields, text, finish, expected = CASES[case]
    shown = streamed(shape(**fields), text, finish, size)
    assert short(shown) == [*BEGIN, *expected]
    assert [event["sequence_number"] for event in shown] == list(range(len(shown)))
    final = shown[-1]["response"]
    assert final == whole(shape(**fields), text, finish)
    done = [event["item"] for event in shown if event["type"] == "response.output_item.done"]
    assert final["output"] == done
    assert [event["output_index"] for event in shown if event["type"].endswith("item.added")] == (
        list(range(len(done)))
    )
    joined: dict[str, str] = {}
    for event in shown:
        if event["type"].endswith(".delta"):
            joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
    assert joined == {item["id"]: text_of(item) for item in done if text_of(item)}


@pytest.mark.parametrize("case", CASES)
def test_a_response_whose_events_were_not_kept_has_those_of_a_stream_with_long_deltas(
    case: str,
) -> None:
    fields, text, finish, expected = CASES[case]
    include = ["reasoning.encrypted_content"]
    shown = streamed(shape(include=include, **fields), text, finish, 1000)
    final = msgspec.convert(shown[-1]["response"], Response)
    replayed = events(ReplayedResponse(final).events())
    assert short(replayed) == [*BEGIN, *expected]
    assert replayed == events(ReplayedResponse(final).events()) == shown


def test_a_log_begins_where_its_first_event_ends() -> None:
    log = EventLog()
    log.add(event_bytes(ResponseCreated(sequence_number=0, response=begun())))
    call = replace(ResponseCall.from_body({"input": "Hi", "store": True}), log=log)
    served = model(reasons=False)
    written = call.shape(COMMON, [(1, 2)], TOKENIZER, call.parsing(served, call.prompts(served)))
    shown = streamed(written, "Good morning.", "stop")
    assert [event["sequence_number"] for event in shown] == list(range(1, len(shown) + 1))
    logged = events(EventReader(0).read(log.data()))
    assert logged[1:] == shown
    assert short(logged) == [*BEGIN, *MESSAGE, "completed"]


def begun() -> Response:
    return ResponseCall.from_body({"input": "Hi"}).response(COMMON, "queued")


def text_of(item: Json) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"])


@pytest.mark.parametrize("case", CASES)
def test_the_clients_types_take_each_event(case: str) -> None:
    fields, text, finish, _ = CASES[case]
    for event in streamed(shape(**fields), text, finish):
        taken = EVENTS.validate_python(event)
        assert taken.type == event["type"]
    ClientResponse.model_validate(whole(shape(**fields), text, finish))


def test_the_items_of_an_answer_have_the_clients_values_and_ids_of_the_request() -> None:
    _, text, finish, _ = CASES["all"]
    answer = whole(
        shape(include=["reasoning.encrypted_content"], metadata={"a": "b"}, **TOOLS), text, finish
    )
    reasoning, message, call = answer["output"]
    assert [item["id"] for item in answer["output"]] == [
        *(f"rs_{NAME}0000", f"msg_{NAME}0001", f"fc_{NAME}0002")
    ]
    assert {item["status"] for item in answer["output"]} == {"completed"}
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Where?"}]
    assert decoded_reasoning(reasoning["encrypted_content"]) == "Where?"
    assert message["content"] == [
        {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
    ]
    assert (call["name"], call["arguments"]) == ("weather", '{"city": "Paris"}')
    assert call["call_id"].startswith("call_")
    assert answer["usage"] == {
        "input_tokens": 2,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 5,
    }
    assert (answer["metadata"], answer["status"], answer["error"]) == (
        {"a": "b"},
        "completed",
        None,
    )


def test_an_answer_that_was_cut_says_so() -> None:
    answer = whole(shape(reasons=False), "Good m", "length")
    assert (answer["status"], answer["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert [item["status"] for item in answer["output"]] == ["incomplete"]


def test_a_failure_ends_the_open_item_and_the_response() -> None:
    written = shape(reasons=False)
    data = written.event(0, delta("Good m"))
    error = ErrorRecord("all nodes are lost", "unavailable", status=503)
    shown = events(data + written.error_event(error))
    assert short(shown) == [*BEGIN, *MESSAGE, "failed"]
    response = shown[-1]["response"]
    assert response["error"] == {"code": "unavailable", "message": "all nodes are lost"}
    assert [text_of(item) for item in response["output"]] == ["Good m"]
    assert (response["status"], response["output"][0]["status"]) == ("failed", "incomplete")


def test_a_failure_before_the_first_token_is_one_event() -> None:
    error = ErrorRecord("no node is ready", "unavailable", status=503)
    [shown] = events(RESPONSES.error_event(error))
    assert shown == {
        "type": "error",
        "sequence_number": 0,
        "code": "unavailable",
        "message": "no node is ready",
        "param": None,
    }


def scored(text: str, finish: FinishReason | None = None) -> Delta:
    positions = tuple(
        PositionLogprobs(
            TokenLogprob(id, -0.5, text=char, raw=char.encode()),
            (TokenLogprob(id, -0.5, text=char, raw=char.encode()),),
        )
        for id, char in zip(delta(text).ids, text, strict=True)
    )
    return msgspec.structs.replace(delta(text, finish), logprobs=positions)


@pytest.mark.parametrize(
    "fields", [{"top_logprobs": 1}, {"include": ["message.output_text.logprobs"]}]
)
def test_the_text_has_the_logprobs_of_its_tokens(fields: Json) -> None:
    written = shape(reasons=False, **fields)
    data = b"".join(written.event(0, scored(part)) for part in ("ab", "c"))
    shown = events(data + written.event(0, scored("d", "stop")) + written.end(usage()))
    ended = msgspec.convert(shown[-1]["response"], Response)
    [whole_text] = [
        event["logprobs"]
        for event in events(ReplayedResponse(ended).events())
        if event["type"] == "response.output_text.delta"
    ]
    assert [each["token"] for each in whole_text] == list("abcd")
    deltas = [event for event in shown if event["type"] == "response.output_text.delta"]
    assert [[each["token"] for each in event["logprobs"]] for event in deltas] == [
        *(["a", "b"], ["c"], ["d"])
    ]
    [done] = [event for event in shown if event["type"] == "response.output_text.done"]
    assert [each["token"] for each in done["logprobs"]] == list("abcd")
    top = fields.get("top_logprobs", 0)
    assert {len(each["top_logprobs"]) for each in done["logprobs"]} == {top}
    for event in shown:
        EVENTS.validate_python(event)


def test_the_records_hold_each_answer() -> None:
    for fields, text, finish, _ in CASES.values():
        answer = msgspec.json.encode(whole(shape(**fields), text, finish))
        assert msgspec.json.decode(answer, type=Response).object == "response"

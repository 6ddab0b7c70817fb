"""OpenAI's client and pydantic-ai use the Responses API of a pool: answers, streams, tools,
structured text, and responses that are kept and continued."""

from __future__ import annotations

import time
from typing import Annotated, Any

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.e2e.clients.trips import LIMITS, QUESTION, Trip
from tests.support.pools.baton_up import Pool

EXTRA: dict[str, Any] = {"extra_body": {"seed": LIMITS["seed"]}, "temperature": 0.0}
SHORT: dict[str, Any] = {**EXTRA, "model": "sim", "max_output_tokens": 8}
LONG: dict[str, Any] = {**EXTRA, "model": "sim", "max_output_tokens": LIMITS["max_tokens"]}


class Fare(BaseModel):
    """What a journey costs."""

    model_config = ConfigDict(extra="forbid")

    town: Annotated[str, Field(max_length=8)]
    nights: Annotated[int, Field(ge=0, le=9)]


FARE: Any = {
    "type": "function",
    "name": "Fare",
    "description": "What a journey costs.",
    "parameters": Fare.model_json_schema(),
    "strict": True,
}
CALLS: dict[str, Any] = {
    **LONG,
    "tools": [FARE],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


def test_the_stream_helper_ends_with_the_answer_in_one_piece(client: openai.OpenAI) -> None:
    whole = client.responses.create(input=QUESTION, **SHORT)
    assert whole.usage is not None
    with client.responses.stream(input=QUESTION, **SHORT) as stream:
        events = list(stream)
        last = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == last.output_text == whole.output_text != ""
    assert events[-1].type == "response.completed"
    assert last.usage is not None
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    fields = {**SHORT, "max_output_tokens": 2}
    whole = client.responses.create(input=QUESTION, **fields)
    *_, last = client.responses.create(input=QUESTION, stream=True, **fields)
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output_text == whole.output_text


def test_openai_parses_the_type_in_one_piece_and_streamed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(input=QUESTION, text_format=Trip, **LONG)
    assert isinstance(parsed.output_parsed, Trip)
    assert parsed.status == "completed"
    with client.responses.stream(input=QUESTION, text_format=Trip, **LONG) as stream:
        stream.until_done()
        last = stream.get_final_response()
    assert last.output_parsed == parsed.output_parsed


def test_openai_sends_a_call_and_its_output_back(client: openai.OpenAI) -> None:
    first = client.responses.create(input=QUESTION, **CALLS)
    [call] = first.output
    assert call.type == "function_call"
    Fare.model_validate_json(call.arguments)
    with client.responses.stream(input=QUESTION, **CALLS) as stream:
        parts = [
            event.delta
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
    assert "".join(parts) == call.arguments
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "90 euros"}
    question: Any = {"role": "user", "content": QUESTION}
    items: Any = [question, *first.output, output]
    by_hand = [question, {**call.to_dict(), "id": None, "status": None}, output]
    answers = [
        client.responses.create(input=form, tools=[FARE], **SHORT) for form in (items, by_hand)
    ]
    sizes = [answer.usage.input_tokens for answer in answers if answer.usage is not None]
    assert sizes[0] == sizes[1]
    counted = client.responses.input_tokens.count(model="sim", input=items, tools=[FARE])
    assert counted.input_tokens == sizes[0]


def test_openai_continues_reads_and_deletes_a_kept_response(client: openai.OpenAI) -> None:
    first = client.responses.create(input=QUESTION, store=True, **SHORT)
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(
        input="And back?", previous_response_id=first.id, store=True, **SHORT
    )
    by_hand: Any = [
        {"role": "user", "content": QUESTION},
        *first.output,
        {"role": "user", "content": "And back?"},
    ]
    alone = client.responses.create(input=by_hand, **SHORT)
    assert alone.output_text == second.output_text
    items = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.type for item in items] == ["message"] * 3, "the client asks for further pages"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_openai_waits_for_a_response_in_the_background(client: openai.OpenAI) -> None:
    whole = client.responses.create(input=QUESTION, **SHORT)
    begun = client.responses.create(input=QUESTION, store=True, background=True, **SHORT)
    assert begun.status == "queued"
    until = time.monotonic() + 30
    response = begun
    while response.status in ("queued", "in_progress") and time.monotonic() < until:
        time.sleep(0.05)
        response = client.responses.retrieve(begun.id)
    assert (response.status, response.output_text) == (whole.status, whole.output_text)
    assert client.responses.cancel(begun.id).status == whole.status


def test_openai_reads_a_stream_in_the_background_again(client: openai.OpenAI) -> None:
    made = client.responses.create(
        input=QUESTION, store=True, background=True, stream=True, **SHORT
    )
    shown = list(made)
    assert shown[0].type == "response.created"
    id = shown[0].response.id
    assert list(client.responses.retrieve(id, stream=True)) == shown
    assert list(client.responses.retrieve(id, stream=True, starting_after=4)) == shown[5:]
    with client.responses.stream(response_id=id, starting_after=4) as stream:
        assert [event.sequence_number for event in stream] == list(range(5, len(shown)))
        last = stream.get_final_response()
    assert last.output_text == client.responses.retrieve(id).output_text != ""
    plain = client.responses.create(input=QUESTION, store=True, **SHORT)
    with client.responses.stream(response_id=plain.id) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert deltas == [plain.output_text]


def test_openai_shows_what_is_refused(client: openai.OpenAI) -> None:
    tool: Any = {"type": "web_search"}
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.type is \"web_search\""):
        client.responses.create(input=QUESTION, tools=[tool], **SHORT)


# --- pydantic-ai ----------------------------------------------------------------------------------


@pytest.mark.parametrize("output", [NativeOutput(Trip), ToolOutput(Trip)], ids=["text", "call"])
async def test_pydantic_ai_returns_the_type(sim: Pool, output: Any) -> None:
    settings = ModelSettings(
        temperature=LIMITS["temperature"],
        max_tokens=LIMITS["max_tokens"],
        extra_body={"seed": LIMITS["seed"]},
    )
    async with openai.AsyncOpenAI(
        base_url=f"{sim.url}/v1", api_key="none", max_retries=0
    ) as official:
        provider = OpenAIProvider(openai_client=official)
        model = OpenAIResponsesModel(sim.model, provider=provider, settings=settings)
        agent = Agent(model, output_type=output)
        result = await agent.run(QUESTION)
        assert isinstance(result.output, Trip)
        again = await agent.run("And back?", message_history=result.all_messages())
        assert isinstance(again.output, Trip)
        async with agent.run_stream(QUESTION) as streamed:
            assert isinstance(await streamed.get_output(), Trip)

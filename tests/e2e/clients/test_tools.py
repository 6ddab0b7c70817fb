"""Tool calls through the client libraries that applications use. Each library passes the tools in
its own way and parses the calls into its own types."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import instructor
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, RunContext, ToolOutput
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.settings import ModelSettings, ToolOrOutput

from tests.e2e.clients.chat_models import langchain_model, litellm, pydantic_ai_model
from tests.e2e.clients.trips import LIMITS, QUESTION, Trip
from tests.support.pools.baton_up import Pool

MESSAGES: Any = [{"role": "user", "content": QUESTION}]


class Fare(BaseModel):
    """What a journey costs."""

    model_config = ConfigDict(extra="forbid")

    town: Annotated[str, Field(max_length=8)]
    nights: Annotated[int, Field(ge=0, le=9)]


@tool(args_schema=Fare)
def fare(town: str, nights: int) -> str:
    """What a journey costs."""
    return f"{nights} nights in {town} cost 90 euros."


# --- openai ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "Fare"}}], ids=str
)
def test_openai_parses_the_arguments_of_a_call(client: openai.OpenAI, choice: Any) -> None:
    completion = client.chat.completions.parse(
        model="sim",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Fare)],
        tool_choice=choice,
        parallel_tool_calls=False,
        **LIMITS,
    )
    [call] = completion.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Fare)


def test_openai_streams_the_arguments_of_a_call(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "sim",
        "messages": MESSAGES,
        "tools": [openai.pydantic_function_tool(Fare)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        **LIMITS,
    }
    [whole] = client.chat.completions.parse(**fields).choices[0].message.tool_calls or []
    with client.chat.completions.stream(**fields) as stream:
        parts = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        [last] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert len(parts) > 1
    assert "".join(parts) == last.function.arguments == whole.function.arguments
    assert isinstance(last.function.parsed_arguments, Fare)


# --- langchain ------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", "fare"])
def test_langchain_calls_a_tool_and_sends_its_result(sim: Pool, choice: str) -> None:
    model_with_tools = langchain_model(sim).bind_tools(
        [fare], tool_choice=choice, strict=True, parallel_tool_calls=False
    )
    message = model_with_tools.invoke(QUESTION)
    assert isinstance(message, AIMessage)
    [call] = message.tool_calls
    result = fare.invoke(call)
    assert isinstance(result, ToolMessage)
    reply = (
        langchain_model(sim).bind_tools([fare]).invoke([HumanMessage(QUESTION), message, result])
    )
    assert reply.content or reply.tool_calls


def test_langchain_streams_a_call(sim: Pool) -> None:
    model_with_tools = langchain_model(sim).bind_tools(
        [fare], tool_choice="required", strict=True, parallel_tool_calls=False
    )
    first, *others = model_with_tools.stream(QUESTION)
    whole: Any = first
    for part in others:
        whole = whole + part
    [call] = whole.tool_calls
    assert Fare.model_validate(call["args"])


def test_langchain_returns_the_type_by_a_call(sim: Pool) -> None:
    structured = langchain_model(sim).with_structured_output(Trip, method="function_calling")
    assert isinstance(structured.invoke(QUESTION), Trip)


# --- instructor -----------------------------------------------------------------------------------


MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.FUNCTIONS)


@pytest.mark.filterwarnings("ignore:Mode.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_instructor_returns_the_type_by_a_call(
    client: openai.OpenAI, mode: instructor.Mode
) -> None:
    structured = instructor.from_openai(client, mode=mode)
    trip = structured.chat.completions.create(
        model="sim", messages=MESSAGES, response_model=Trip, max_retries=0, **LIMITS
    )
    assert isinstance(trip, Trip)


def test_instructor_streams_partial_objects_of_a_call(client: openai.OpenAI) -> None:
    structured = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    *_, last = structured.chat.completions.create_partial(
        model="sim", messages=MESSAGES, response_model=Trip, max_retries=0, **LIMITS
    )
    assert Trip.model_validate(last.model_dump())


def test_instructor_returns_several_types_by_parallel_calls(client: openai.OpenAI) -> None:
    """instructor leaves the choice to the model, so the test requires calls."""
    structured: Any = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS)
    results = structured.chat.completions.create(
        model="sim",
        messages=MESSAGES,
        response_model=Iterable[Fare | Trip],
        max_retries=0,
        extra_body={"tool_choice": "required"},
        **{**LIMITS, "max_tokens": 1000},
    )
    found = list(results)
    assert found
    assert all(isinstance(each, Fare | Trip) for each in found)


# --- pydantic-ai ----------------------------------------------------------------------------------


async def test_pydantic_ai_returns_the_type_by_a_call(sim: Pool) -> None:
    async with pydantic_ai_model(sim) as model:
        run = await Agent(model, output_type=ToolOutput(Trip), retries=0).run(QUESTION)
    assert isinstance(run.output, Trip)


async def test_pydantic_ai_calls_a_tool_and_continues_with_its_result(sim: Pool) -> None:
    towns: list[str] = []

    def fare(town: Annotated[str, Field(max_length=8)]) -> str:
        """What a journey costs."""
        towns.append(town)
        return "90 euros"

    def fare_first(context: RunContext[None]) -> ModelSettings:
        first = context.run_step == 1
        return ModelSettings(tool_choice=["fare"] if first else ToolOrOutput(function_tools=[]))

    async with pydantic_ai_model(sim) as model:
        agent = Agent(
            model,
            output_type=ToolOutput(Trip),
            tools=[fare],
            retries=0,
            model_settings=fare_first,
        )
        run = await agent.run(QUESTION)
    assert len(towns) == 1
    assert isinstance(run.output, Trip)
    assert [
        part.content
        for message in run.all_messages()
        for part in message.parts
        if isinstance(part, ToolReturnPart) and part.tool_name == "fare"
    ] == ["90 euros"]


# --- litellm --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_calls_a_tool(sim: Pool, stream: bool) -> None:
    completion: Any = litellm().completion(
        model="openai/sim",
        api_base=f"{sim.url}/v1",
        api_key="none",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Fare)],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=stream,
        **LIMITS,
    )
    if stream:
        completion = litellm().stream_chunk_builder(list(completion))
    [call] = completion.choices[0].message.tool_calls
    assert call.function.name == "Fare"
    assert Fare.model_validate(json.loads(call.function.arguments))
    assert completion.choices[0].finish_reason == "tool_calls"

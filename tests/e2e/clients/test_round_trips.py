"""What a client library got back, it sends again: complete, append what it returned, complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import instructor
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    UserPromptPart,
)

from tests.e2e.clients.chat_models import langchain_model, litellm, pydantic_ai_model
from tests.e2e.clients.trips import LIMITS
from tests.support.pools.baton_up import Pool

Json = dict[str, Any]
USER: Any = {"role": "user", "content": "Where to?"}
SHORT: Json = {**LIMITS, "max_tokens": 8}


class Fare(BaseModel):
    """What a journey costs."""

    model_config = ConfigDict(extra="forbid")

    nights: Annotated[int, Field(ge=0, le=9)]


@tool(args_schema=Fare)
def fare(nights: int) -> str:
    """What a journey costs."""
    return f"{nights} nights cost 90 euros."


TOOLS: Any = [openai.pydantic_function_tool(Fare)]
CALLS: Json = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **LIMITS}
Ask = Callable[..., Any]
# Fields of the first request; each kind has its own form of a message.
KINDS: dict[str, Json] = {
    "plain": SHORT,
    "called": CALLS,
    "cut call": {**CALLS, "max_tokens": 30},
    "logprobs": {**SHORT, "logprobs": True, "top_logprobs": 1},
}


def history(message: Any, calls: Any) -> list[Any]:
    """A conversation that goes on after the message and the results of its calls."""
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "90 euros"} for call in calls or []
    ]
    return [USER, message, *results, USER]


def essence(message: Any) -> Json:
    """The message as another client would write it by hand."""
    calls = [
        {"id": call.id, "function": {"name": call.function.name, "arguments": arguments}}
        for call in message.tool_calls or []
        for arguments in [call.function.arguments]
    ]
    return {"role": "assistant", "content": message.content, "tool_calls": calls}


def check(ask: Ask, message: Any, *forms: Any) -> None:
    """Each form of the message is accepted, and gives the prompt of a message written by hand."""
    by_hand = ask(history(essence(message), message.tool_calls)).usage.prompt_tokens
    for form in forms:
        answer = ask(history(form, message.tool_calls))
        assert answer.usage.prompt_tokens == by_hand, form
        assert answer.choices[0].finish_reason


# --- openai ---------------------------------------------------------------------------------------


def asks(client: openai.OpenAI) -> Ask:
    def ask(messages: Any, **fields: Any) -> Any:
        fields = {"tools": TOOLS, **SHORT, **fields}
        return client.chat.completions.create(model="sim", messages=messages, **fields)

    return ask


@pytest.mark.parametrize("kind", KINDS)
def test_openai_sends_a_message_back(client: openai.OpenAI, kind: str) -> None:
    ask = asks(client)
    message = ask([USER], **KINDS[kind]).choices[0].message
    assert bool(message.tool_calls) == ("call" in kind)
    check(ask, message, message, message.model_dump(), message.to_dict())


# The library raises an error for a stream that is cut within its calls.
@pytest.mark.parametrize("kind", ["plain", "called", "logprobs"])
def test_openai_sends_its_assembled_stream_back(client: openai.OpenAI, kind: str) -> None:
    fields: Json = {"model": "sim", "messages": [USER], "tools": TOOLS, **KINDS[kind]}
    with client.chat.completions.stream(**fields) as stream:
        message: Any = stream.get_final_completion().choices[0].message
    check(asks(client), message, message, message.model_dump())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_assembled_by_hand_is_sent_back(client: openai.OpenAI, kind: str) -> None:
    ask = asks(client)
    message: Json = {"role": "assistant", "content": "", "tool_calls": []}
    for chunk in ask([USER], stream=True, **KINDS[kind]):
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        for part in delta.tool_calls or []:
            if part.id:
                message["tool_calls"].append(part.model_dump())
            else:
                call = message["tool_calls"][part.index]
                call["function"]["arguments"] += part.function.arguments
    assert all(call["index"] == 0 for call in message["tool_calls"])
    whole = ChatCompletionMessage.model_validate(message)
    check(ask, whole, message)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(
    "fields", [{"response_format": Fare, **LIMITS}, CALLS], ids=["json", "call"]
)
def test_openai_sends_a_parsed_message_back(client: openai.OpenAI, fields: Json) -> None:
    completion: Any = client.chat.completions.parse(model="sim", messages=[USER], **fields)
    message = completion.choices[0].message
    [call] = message.tool_calls or [None]
    assert isinstance(message.parsed or call.function.parsed_arguments, Fare)
    check(asks(client), message, message, message.model_dump(), message.to_dict())


# --- instructor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA], ids=str)
def test_instructor_s_completion_is_sent_back(client: openai.OpenAI, mode: Any) -> None:
    structured: Any = instructor.from_openai(client, mode=mode)
    _, completion = structured.chat.completions.create_with_completion(
        model="sim", messages=[USER], response_model=Fare, max_retries=0, **LIMITS
    )
    message = completion.choices[0].message
    check(asks(client), message, message, message.model_dump())


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA], ids=str)
def test_instructor_sends_an_answer_back_that_it_finds_wrong(
    client: openai.OpenAI, mode: Any
) -> None:
    tried = []

    class Picky(Fare):
        @field_validator("nights")
        @classmethod
        def second(cls, nights: int) -> int:
            tried.append(nights)
            if len(tried) == 1:
                raise ValueError("say it again")
            return nights

    structured: Any = instructor.from_openai(client, mode=mode)
    result = structured.chat.completions.create(
        model="sim", messages=[USER], response_model=Picky, max_retries=2, **LIMITS
    )
    assert isinstance(result, Picky)
    assert len(tried) == 2


# --- langchain ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", ["plain", "called"])
def test_langchain_sends_a_message_back(sim: Pool, kind: str, stream: bool) -> None:
    model = langchain_model(sim)
    choice: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    first: Any = model.bind_tools([fare], strict=True, **choice) if kind == "called" else model
    message: Any = None
    for part in first.stream("Where to?") if stream else [first.invoke("Where to?")]:
        message = part if message is None else message + part
    assert len(message.tool_calls) == (kind == "called")
    results = [fare.invoke(call) for call in message.tool_calls]
    talk = [HumanMessage("Where to?"), message, *results, HumanMessage("And then?")]
    assert isinstance(model.bind_tools([fare]).invoke(talk), AIMessage)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_langchain_sends_a_parsed_message_back(sim: Pool) -> None:
    model = langchain_model(sim)
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(Fare, method=method, include_raw=True)
        raw: Any = structured.invoke("Where to?")
        assert isinstance(raw["parsed"], Fare)
        results = [fare.invoke({**call, "name": "fare"}) for call in raw["raw"].tool_calls]
        talk = [HumanMessage("Where to?"), raw["raw"], *results, HumanMessage("And then?")]
        assert isinstance(model.invoke(talk), AIMessage)


# --- pydantic-ai ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "output", [str, NativeOutput(Fare), ToolOutput(Fare)], ids=["text", "json", "call"]
)
async def test_pydantic_ai_goes_on_with_its_history(sim: Pool, output: Any) -> None:
    async with pydantic_ai_model(sim) as model:
        agent = Agent(model, output_type=output, retries=0, instructions="Be brief.")
        first = await agent.run("Where to?")
        async with agent.run_stream("And then?", message_history=first.all_messages()) as run:
            await run.get_output()
        last = await agent.run("And then?", message_history=run.all_messages())
    assert len(last.all_messages()) > len(run.all_messages()) > len(first.all_messages())


async def test_pydantic_ai_sends_reasoning_and_late_system_prompts_back(sim: Pool) -> None:
    talk: list[ModelMessage] = [
        ModelRequest(parts=[SystemPromptPart("Be brief."), UserPromptPart("Where to?")]),
        ModelResponse(
            parts=[
                ThinkingPart("So", id="reasoning_content", provider_name="openai"),
                TextPart("Rome."),
            ]
        ),
        ModelRequest(parts=[SystemPromptPart("In French."), UserPromptPart("And then?")]),
    ]
    async with pydantic_ai_model(sim) as model:
        run = await Agent(model, retries=0).run("So?", message_history=talk)
    assert run.usage.output_tokens > 0


# --- litellm --------------------------------------------------------------------------------------
# The last, because it leaves an event loop behind that only later async tests would notice.


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", [*KINDS, "parsed"])
def test_litellm_sends_a_message_back(sim: Pool, kind: str, stream: bool) -> None:
    def ask(messages: Any, **fields: Any) -> Any:
        fields = {"tools": TOOLS, **SHORT, **fields}
        at: Json = {"api_base": f"{sim.url}/v1", "api_key": "none"}
        return litellm().completion(model="openai/sim", messages=messages, **at, **fields)

    first = KINDS.get(kind, {"tools": None, "response_format": Fare, **LIMITS})
    answer = ask([USER], stream=stream, **first)
    if stream:
        answer = litellm().stream_chunk_builder(list(answer))
    message = answer.choices[0].message
    more = {"provider_specific_fields": {"refusal": None}, "reasoning_details": [{"id": 1}]}
    check(ask, message, message, message.model_dump(), {**message.model_dump(), **more})

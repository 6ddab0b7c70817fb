"""The Messages API through Anthropic's client, langchain-anthropic and litellm. The pool hands each
request off. Clients are imported at their first use, as each import takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from tests.e2e.clients.chat_models import litellm
from tests.e2e.clients.trips import QUESTION
from tests.support.pools.baton_up import Pool

if TYPE_CHECKING:
    import anthropic
    from langchain_anthropic import ChatAnthropic

USER: Any = {"role": "user", "content": QUESTION}
ASK: Any = {"model": "sim", "messages": [USER], "max_tokens": 300}
SEED: Any = {"extra_body": {"seed": 3, "temperature": 0.0}}


class Fare(BaseModel):
    """What a journey costs."""

    model_config = ConfigDict(extra="forbid")

    town: Annotated[str, Field(max_length=8)]
    nights: Annotated[int, Field(ge=0, le=9)]


class Light(BaseModel):
    """A type that has no bounds, as this client leaves bounds out of the schema that it sends."""

    model_config = ConfigDict(extra="forbid")

    on: bool


@tool(args_schema=Fare)
def fare(town: str, nights: int) -> str:
    """What a journey costs."""
    return f"{nights} nights in {town} cost 90 euros."


TOOL: Any = {"name": "fare", "input_schema": Fare.model_json_schema(), "strict": True}
FUNCTION: Any = {"name": "fare", "parameters": TOOL["input_schema"]}
CALLS: Any = {
    **ASK,
    "tools": [TOOL],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


@pytest.fixture
def messages(sim: Pool) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=sim.url, api_key="none", max_retries=0) as api:
        yield api


def test_anthropic_s_stream_is_the_answer_in_one_piece(messages: anthropic.Anthropic) -> None:
    whole = messages.messages.create(**ASK, **SEED)
    with messages.messages.stream(**ASK, **SEED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    [block] = whole.content
    assert block.type == "text"
    assert block.text == text == stream.get_final_text()
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = messages.messages.count_tokens(model="sim", messages=[USER])
    assert counted.input_tokens == final.usage.input_tokens + (
        final.usage.cache_read_input_tokens or 0
    )


@pytest.mark.parametrize("choice", [CALLS["tool_choice"], {"type": "tool", "name": "fare"}])
def test_anthropic_calls_a_tool_and_sends_its_result(
    messages: anthropic.Anthropic, choice: Any
) -> None:
    asked = CALLS | {"tool_choice": choice}
    with messages.messages.stream(**asked, **SEED) as stream:
        called = stream.get_final_message()
    whole = messages.messages.create(**asked, **SEED)
    [use], [same] = called.content, whole.content
    assert use.type == same.type == "tool_use"
    assert called.stop_reason == whole.stop_reason == "tool_use"
    assert use.input == same.input
    made = Fare.model_validate(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": f"{made.nights} nights"}
    turns: Any = [USER, called.to_param(), {"role": "user", "content": [result]}]
    answer = messages.messages.create(**ASK | {"messages": turns}, tools=[TOOL], **SEED)
    assert answer.stop_reason in ("end_turn", "tool_use", "max_tokens")


def test_anthropic_parses_an_output_of_a_type(messages: anthropic.Anthropic) -> None:
    parsed = messages.messages.parse(**ASK, output_format=Light, **SEED)
    assert isinstance(parsed.parsed_output, Light)


def chat_model(pool: Pool, **fields: Any) -> ChatAnthropic:
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(
        base_url=pool.url,
        api_key=SecretStr("none"),
        model_name="sim",
        max_tokens_to_sample=300,
        temperature=0.0,
        max_retries=0,
        **fields,
    )


def test_langchain_calls_a_tool_and_sends_its_result(sim: Pool) -> None:
    model = chat_model(sim)
    with_tools = model.bind_tools([fare], tool_choice="any", parallel_tool_calls=False)
    question = HumanMessage(QUESTION)
    called = with_tools.invoke([question])
    assert isinstance(called, AIMessage)
    [call] = called.tool_calls
    assert Fare.model_validate(call["args"])
    result = ToolMessage(fare.invoke(call["args"]), tool_call_id=call["id"])
    answer = model.invoke([question, called, result])
    assert answer.response_metadata["stop_reason"] in ("end_turn", "max_tokens")


def test_langchain_streams_text_and_usage(sim: Pool) -> None:
    chunks = list(chat_model(sim).stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.text
    assert whole.usage_metadata is not None
    asked = chat_model(sim).invoke(QUESTION).usage_metadata
    assert asked is not None
    assert whole.usage_metadata["output_tokens"] == asked["output_tokens"]
    assert whole.usage_metadata["input_tokens"] == asked["input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_speaks_messages(sim: Pool, stream: bool) -> None:
    answer = litellm().completion(
        model="anthropic/sim",
        api_base=sim.url,
        api_key="none",
        messages=[USER],
        max_tokens=300,
        temperature=0.0,
        tools=[
            {"type": "function", "function": {"name": "fare", "parameters": TOOL["input_schema"]}}
        ],
        tool_choice="required",
        stream=stream,
    )
    if stream:
        answer = litellm().stream_chunk_builder(list(answer))
    [choice] = answer.choices
    call = choice.message.tool_calls[0]
    assert call.function.name == "fare"
    assert Fare.model_validate_json(call.function.arguments)

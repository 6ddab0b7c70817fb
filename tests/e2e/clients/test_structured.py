"""Structured output of a user's own type, through the client libraries that applications use."""

from __future__ import annotations

import json
from typing import Annotated, Any

import instructor
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput

from tests.e2e.clients.chat_models import langchain_model, litellm, pydantic_ai_model
from tests.e2e.clients.trips import LIMITS, QUESTION, Trip
from tests.support.pools.baton_up import Pool

MESSAGES: Any = [{"role": "user", "content": QUESTION}]


class Anything(BaseModel):
    """Any JSON object, for clients that request JSON without a schema."""

    model_config = ConfigDict(extra="allow")


# The simulated engine's ids are bytes. This bias ends an object at once, so the object is empty.
END_OBJECT = {ord("}"): 100}


# --- openai ---------------------------------------------------------------------------------------


def test_openai_parses_the_type(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model="sim", messages=MESSAGES, response_format=Trip, **LIMITS
    )
    assert isinstance(completion.choices[0].message.parsed, Trip)


def test_openai_streams_and_parses_the_type(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "sim", "messages": MESSAGES, **LIMITS}
    whole = client.chat.completions.parse(response_format=Trip, **fields).choices[0].message
    with client.chat.completions.stream(response_format=Trip, **fields) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_completion().choices[0].message
    assert kinds == {"chunk", "content.delta", "content.done"}
    assert (last.content, last.parsed) == (whole.content, whole.parsed)


# --- langchain ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [None, True])
def test_langchain_returns_the_type_by_json_schema(sim: Pool, strict: bool | None) -> None:
    structured = langchain_model(sim).with_structured_output(
        Trip, method="json_schema", strict=strict
    )
    assert isinstance(structured.invoke(QUESTION), Trip)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # from langchain's last chunk
def test_langchain_streams_the_type(sim: Pool) -> None:
    structured = langchain_model(sim).with_structured_output(Trip)
    *_, last = structured.stream(QUESTION)
    assert last == structured.invoke(QUESTION)
    assert isinstance(last, Trip)


def test_langchain_returns_an_object_in_json_mode(sim: Pool) -> None:
    structured = langchain_model(sim, logit_bias=END_OBJECT).with_structured_output(
        None, method="json_mode"
    )
    assert structured.invoke(QUESTION) == {}


# --- instructor -----------------------------------------------------------------------------------


def test_instructor_returns_the_type_by_json_schema(client: openai.OpenAI) -> None:
    structured = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    trip = structured.chat.completions.create(
        model="sim", messages=MESSAGES, response_model=Trip, max_retries=0, **LIMITS
    )
    assert isinstance(trip, Trip)


def test_instructor_streams_partial_objects_of_the_type(client: openai.OpenAI) -> None:
    structured = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = structured.chat.completions.create_partial(
        model="sim", messages=MESSAGES, response_model=Trip, max_retries=0, **LIMITS
    )
    assert Trip.model_validate(last.model_dump())


def test_instructor_parses_json_in_markdown(client: openai.OpenAI) -> None:
    """instructor sends no response format, so the test adds a grammar."""
    structured = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
    schema = json.dumps(Trip.model_json_schema() | {"x-guidance": {"whitespace_flexible": False}})
    grammar = f'start: "```json\\n" %json {schema} "\\n```"'
    trip = structured.chat.completions.create(
        model="sim",
        messages=MESSAGES,
        response_model=Trip,
        max_retries=0,
        extra_body={"structured_outputs": {"grammar": grammar}},
        **LIMITS,
    )
    assert isinstance(trip, Trip)


def test_instructor_returns_an_object_in_json_mode(client: openai.OpenAI) -> None:
    structured = instructor.from_openai(client, mode=instructor.Mode.JSON)
    result = structured.chat.completions.create(
        model="sim",
        messages=MESSAGES,
        response_model=Anything,
        max_retries=0,
        logit_bias={str(id): bias for id, bias in END_OBJECT.items()},
        **LIMITS,
    )
    assert result.model_dump() == {}


# --- pydantic-ai ----------------------------------------------------------------------------------


async def test_pydantic_ai_returns_the_type_by_json_schema(sim: Pool) -> None:
    async with pydantic_ai_model(sim) as model:
        run = await Agent(model, output_type=NativeOutput(Trip), retries=0).run(QUESTION)
    assert isinstance(run.output, Trip)
    assert run.usage.output_tokens > 0


async def test_pydantic_ai_streams_the_type(sim: Pool) -> None:
    async with (
        pydantic_ai_model(sim) as model,
        Agent(model, output_type=NativeOutput(Trip), retries=0).run_stream(QUESTION) as run,
    ):
        parts = [part async for part in run.stream_output(debounce_by=None)]
    assert isinstance(parts[-1], Trip)


async def test_pydantic_ai_returns_an_object_with_the_schema_only_in_the_prompt(sim: Pool) -> None:
    async with pydantic_ai_model(sim, {str(id): bias for id, bias in END_OBJECT.items()}) as model:
        run = await Agent(model, output_type=PromptedOutput(Anything), retries=0).run(QUESTION)
    assert run.output == Anything()


# --- litellm --------------------------------------------------------------------------------------


def complete(pool: Pool, messages: Any = MESSAGES, **fields: Any) -> Any:
    return litellm().completion(
        model=f"openai/{pool.model}",
        api_base=f"{pool.url}/v1",
        api_key="none",
        messages=messages,
        **LIMITS,
        **fields,
    )


def test_litellm_returns_the_types_json(sim: Pool) -> None:
    completion = complete(sim, response_format=Trip)
    assert Trip.model_validate_json(completion.choices[0].message.content)
    assert completion.usage.completion_tokens > 0


def test_litellm_streams_the_types_json(sim: Pool) -> None:
    parts = list(complete(sim, response_format=Trip, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert Trip.model_validate_json(text)
    assert parts[-1].choices[0].finish_reason == "stop"


def test_litellm_passes_extra_fields_for_a_regex(sim: Pool) -> None:
    completion = complete(sim, extra_body={"structured_outputs": {"regex": r"\d{3}"}})
    assert completion.choices[0].message.content.isdigit()


# --- the demo model -------------------------------------------------------------------------------


class Country(BaseModel):
    """A country."""

    model_config = ConfigDict(extra="forbid")

    country: Annotated[str, Field(max_length=16)]
    capital: Annotated[str, Field(max_length=16)]


CAPITAL = "What is the capital of France? Answer in JSON."
CAPITAL_MESSAGES: Any = [{"role": "user", "content": CAPITAL}]


async def test_each_client_gets_paris_from_the_demo_model(demo: Pool) -> None:
    url, fields = f"{demo.url}/v1", {"model": "demo", "messages": CAPITAL_MESSAGES, **LIMITS}
    results: dict[str, Any] = {}
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        parse: Any = client.chat.completions.parse
        results["openai"] = parse(response_format=Country, **fields).choices[0].message.parsed
        structured = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        create: Any = structured.chat.completions.create
        results["instructor"] = create(response_model=Country, max_retries=0, **fields)
    results["langchain"] = langchain_model(demo).with_structured_output(Country).invoke(CAPITAL)
    async with pydantic_ai_model(demo) as model:
        run = await Agent(model, output_type=NativeOutput(Country), retries=0).run(CAPITAL)
        results["pydantic-ai"] = run.output
    completion = complete(demo, CAPITAL_MESSAGES, response_format=Country)
    results["litellm"] = Country.model_validate_json(completion.choices[0].message.content)
    assert {name: country.capital for name, country in results.items()} == dict.fromkeys(
        results, "Paris"
    )

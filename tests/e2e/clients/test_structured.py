"""Answers of a user's own type, as the clients ask for them that applications are made of."""

from __future__ import annotations

import json
from typing import Annotated, Any

import instructor
import litellm
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput

from tests.e2e.clients.asking import langchain_model, pydantic_ai_model
from tests.e2e.clients.trips import LIMITS, QUESTION, Trip
from tests.support.pools.baton_up import Pool

MESSAGES: Any = [{"role": "user", "content": QUESTION}]


class Anything(BaseModel):
    """Any JSON object: a client that asks for JSON without a schema only hopes for more."""

    model_config = ConfigDict(extra="allow")


# Of the simulated engine, whose ids are bytes: the shortest object, as soon as one may end.
END_OBJECT = {ord("}"): 100}


# --- openai ---------------------------------------------------------------------------------------


def test_openai_parses(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="sim", messages=MESSAGES, response_format=Trip, **LIMITS
    )
    assert isinstance(answer.choices[0].message.parsed, Trip)


def test_openai_streams_and_parses(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "sim", "messages": MESSAGES, **LIMITS}
    whole = client.chat.completions.parse(response_format=Trip, **asked).choices[0].message
    with client.chat.completions.stream(response_format=Trip, **asked) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_completion().choices[0].message
    assert kinds == {"chunk", "content.delta", "content.done"}
    assert (last.content, last.parsed) == (whole.content, whole.parsed)


# --- langchain ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [None, True])
def test_langchain_gives_the_type_by_its_json_schema(sim: Pool, strict: bool | None) -> None:
    asking = langchain_model(sim).with_structured_output(Trip, method="json_schema", strict=strict)
    assert isinstance(asking.invoke(QUESTION), Trip)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # its own, of its last chunk
def test_langchain_streams_the_type(sim: Pool) -> None:
    asking = langchain_model(sim).with_structured_output(Trip)
    *_, last = asking.stream(QUESTION)
    assert last == asking.invoke(QUESTION)
    assert isinstance(last, Trip)


def test_langchain_gives_an_object_in_json_mode(sim: Pool) -> None:
    asking = langchain_model(sim, logit_bias=END_OBJECT).with_structured_output(
        None, method="json_mode"
    )
    assert asking.invoke(QUESTION) == {}


# --- instructor -----------------------------------------------------------------------------------


def test_instructor_gives_the_type_by_its_json_schema(client: openai.OpenAI) -> None:
    asking = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    trip = asking.chat.completions.create(
        model="sim", messages=MESSAGES, response_model=Trip, max_retries=0, **LIMITS
    )
    assert isinstance(trip, Trip)


def test_instructor_streams_the_type_as_it_grows(client: openai.OpenAI) -> None:
    asking = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = asking.chat.completions.create_partial(
        model="sim", messages=MESSAGES, response_model=Trip, max_retries=0, **LIMITS
    )
    assert Trip.model_validate(last.model_dump())


def test_instructor_reads_json_in_markdown(client: openai.OpenAI) -> None:
    """It asks for no format; a grammar beside makes sure of it."""
    asking = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
    schema = json.dumps(Trip.model_json_schema() | {"x-guidance": {"whitespace_flexible": False}})
    grammar = f'start: "```json\\n" %json {schema} "\\n```"'
    trip = asking.chat.completions.create(
        model="sim",
        messages=MESSAGES,
        response_model=Trip,
        max_retries=0,
        extra_body={"structured_outputs": {"grammar": grammar}},
        **LIMITS,
    )
    assert isinstance(trip, Trip)


def test_instructor_gives_an_object_in_json_mode(client: openai.OpenAI) -> None:
    asking = instructor.from_openai(client, mode=instructor.Mode.JSON)
    found = asking.chat.completions.create(
        model="sim",
        messages=MESSAGES,
        response_model=Anything,
        max_retries=0,
        logit_bias={str(id): bias for id, bias in END_OBJECT.items()},
        **LIMITS,
    )
    assert found.model_dump() == {}


# --- pydantic-ai ----------------------------------------------------------------------------------


async def test_pydantic_ai_gives_the_type_by_its_json_schema(sim: Pool) -> None:
    async with pydantic_ai_model(sim) as model:
        run = await Agent(model, output_type=NativeOutput(Trip), retries=0).run(QUESTION)
    assert isinstance(run.output, Trip)
    assert run.usage.output_tokens > 0


async def test_pydantic_ai_streams_the_type(sim: Pool) -> None:
    async with (
        pydantic_ai_model(sim) as model,
        Agent(model, output_type=NativeOutput(Trip), retries=0).run_stream(QUESTION) as run,
    ):
        found = [part async for part in run.stream_output(debounce_by=None)]
    assert isinstance(found[-1], Trip)


async def test_pydantic_ai_gives_an_object_where_it_only_tells_the_schema(sim: Pool) -> None:
    async with pydantic_ai_model(sim, {str(id): bias for id, bias in END_OBJECT.items()}) as model:
        run = await Agent(model, output_type=PromptedOutput(Anything), retries=0).run(QUESTION)
    assert run.output == Anything()


# --- litellm --------------------------------------------------------------------------------------


def complete(pool: Pool, messages: Any = MESSAGES, **fields: Any) -> Any:
    return litellm.completion(
        model=f"openai/{pool.model}",
        api_base=f"{pool.url}/v1",
        api_key="none",
        messages=messages,
        **LIMITS,
        **fields,
    )


def test_litellm_gives_the_types_json(sim: Pool) -> None:
    answer = complete(sim, response_format=Trip)
    assert Trip.model_validate_json(answer.choices[0].message.content)
    assert answer.usage.completion_tokens > 0


def test_litellm_streams_the_types_json(sim: Pool) -> None:
    parts = list(complete(sim, response_format=Trip, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert Trip.model_validate_json(text)
    assert parts[-1].choices[0].finish_reason == "stop"


def test_litellm_gives_a_regex_through_its_extra_fields(sim: Pool) -> None:
    answer = complete(sim, extra_body={"structured_outputs": {"regex": r"\d{3}"}})
    assert answer.choices[0].message.content.isdigit()


# --- a model that knows what it is asked ----------------------------------------------------------


class Country(BaseModel):
    """A country."""

    model_config = ConfigDict(extra="forbid")

    country: Annotated[str, Field(max_length=16)]
    capital: Annotated[str, Field(max_length=16)]


CAPITAL = "What is the capital of France? Answer in JSON."
ASKED: Any = [{"role": "user", "content": CAPITAL}]


async def test_each_client_hears_of_paris(demo: Pool) -> None:
    url, asked = f"{demo.url}/v1", {"model": "demo", "messages": ASKED, **LIMITS}
    found: dict[str, Any] = {}
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        parse: Any = client.chat.completions.parse
        found["openai"] = parse(response_format=Country, **asked).choices[0].message.parsed
        asking = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        create: Any = asking.chat.completions.create
        found["instructor"] = create(response_model=Country, max_retries=0, **asked)
    found["langchain"] = langchain_model(demo).with_structured_output(Country).invoke(CAPITAL)
    async with pydantic_ai_model(demo) as model:
        run = await Agent(model, output_type=NativeOutput(Country), retries=0).run(CAPITAL)
        found["pydantic-ai"] = run.output
    answer = complete(demo, ASKED, response_format=Country)
    found["litellm"] = Country.model_validate_json(answer.choices[0].message.content)
    assert {client: one.capital for client, one in found.items()} == dict.fromkeys(found, "Paris")

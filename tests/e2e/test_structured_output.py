"""Outputs that match a schema, a regex or a grammar, through the official client and a
disaggregated pool. Each request is handed off after its first token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import openai
import pydantic
import pytest

from tests.support.pools.baton_up import Pool

PROMPT = "every chunk of the cache has a name " * 4
ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "pieces": {"type": "integer", "minimum": 1, "maximum": 99},
        "express": {"type": "boolean"},
    },
    "required": ["name", "pieces", "express"],
    "additionalProperties": False,
}
DATE = r"[12]\d{3}-[01]\d-[0-3]\d"
Check = Callable[[str], object]


def is_order(text: str) -> None:
    jsonschema_rs.validate(ORDER, json.loads(text))


def is_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def matches(pattern: str) -> Check:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


SCHEMA = {"type": "json_schema", "json_schema": {"name": "order", "schema": ORDER, "strict": True}}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<order>", "schema": ORDER, "end": "</order>"}],
    "triggers": ["<order"],
}
CASES: dict[str, tuple[dict[str, Any], Check]] = {
    "json_schema": ({"response_format": SCHEMA}, is_order),
    "json_object": ({"response_format": {"type": "json_object"}}, is_object),
    "structural_tag": ({"response_format": TAG}, lambda text: None),
    "json": ({"structured_outputs": {"json": ORDER}}, is_order),
    "regex": ({"structured_outputs": {"regex": DATE}}, matches(DATE)),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, matches("yes|no")),
    "lark": ({"structured_outputs": {"grammar": 'start: "a" ("b" | "c")~3'}}, matches("a[bc]{3}")),
    "ebnf": ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] "y"'}}, matches(r"x\dy")),
    "guided_json": ({"guided_json": ORDER}, is_order),
    "guided_regex": ({"guided_regex": DATE}, matches(DATE)),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, matches("yes|no")),
    "guided_grammar": ({"guided_grammar": 'start: "k" "l"?'}, matches("kl?")),
}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    flags = ["--engine", "sim", "--prefill", "1", "--decode", "1", "--sim-eos-every", "5"]
    with (
        Pool([*flags, "--handoff", "always", "--chunk-blocks", "1"]) as pool,
        openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api


def generate(client: openai.OpenAI, endpoint: str, **fields: Any) -> list[tuple[str, str]]:
    """The text and the finish reason of each choice."""
    create: Any = client.completions.create
    prompt: dict[str, Any] = {"prompt": PROMPT}
    if endpoint.startswith("chat"):
        create = client.chat.completions.create
        prompt = {"messages": [{"role": "user", "content": PROMPT}]}
    stream = endpoint.endswith("stream")
    response = create(model="sim", stream=stream, **prompt, extra_body=fields)
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    for part in response if stream else [response]:
        for choice in part.choices:
            message = getattr(choice, "delta" if stream else "message", None)
            text = choice.text if message is None else message.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    return [(texts[index], finishes[index]) for index in sorted(texts)]


@pytest.mark.parametrize("endpoint", ["chat", "chat-stream", "completions", "completions-stream"])
@pytest.mark.parametrize("case", CASES)
def test_output_matches_its_constraint_on_each_endpoint(
    client: openai.OpenAI, case: str, endpoint: str
) -> None:
    fields, check = CASES[case]
    outputs = generate(client, endpoint, n=2, temperature=1.0, seed=4, max_tokens=120, **fields)
    assert len(outputs) == 2
    for text, finish in outputs:
        if finish == "stop":
            check(text)
        else:  # cut off by max_tokens, so the text alone cannot be checked
            assert finish == "length"
            assert case in ("json_object", "structural_tag"), text


# 65 names, so the 66th key that the schema requires cannot be written.
NO_NAME_LEFT = {
    "type": "object",
    "patternProperties": {"^[a-e][a-m]$": {"const": 1}},
    "additionalProperties": False,
    "minProperties": 66,
}
CALLED = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": NO_NAME_LEFT}}],
    "tool_choice": "required",
}


@pytest.mark.parametrize("endpoint", ["chat", "chat-stream", "completions", "completions-stream"])
@pytest.mark.parametrize("fields", [{"guided_json": NO_NAME_LEFT}, CALLED], ids=["content", "call"])
def test_a_dead_end_of_a_grammar_is_a_server_error_that_names_it(
    client: openai.OpenAI, endpoint: str, fields: dict[str, Any]
) -> None:
    """A stream ends with the error as its last event."""
    if endpoint.startswith("completions") and "tools" in fields:
        fields = {"guided_json": {**NO_NAME_LEFT, "maxProperties": 70}}
    with pytest.raises(openai.APIError) as failed:
        generate(client, endpoint, n=2, temperature=1.0, seed=4, max_tokens=1500, **fields)
    assert failed.value.code == "grammar_dead_end"
    assert "the grammar is" in failed.value.message
    if not endpoint.endswith("stream"):
        assert isinstance(failed.value, openai.InternalServerError)
        assert failed.value.status_code == 500


REFUSED = {
    "a dead terminal": {"guided_grammar": 'start: "x" (C | D)\nC: /q/ & /r/\nD: /s/ & /t/'},
    "a key too many": {
        "guided_json": {
            "type": "object",
            "patternProperties": {"^[ab]$": {"type": "boolean"}},
            "additionalProperties": False,
            "minProperties": 3,
            "maxProperties": 3,
        }
    },
    "itself": {"guided_json": {"$ref": "#"}},
    "an empty class": {"guided_regex": r"[^\s\S]"},
    "a place": {"guided_json": {"properties": {"a": {"items": {"not": {}}}}}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_text_matches_is_refused_before_it_runs(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        generate(client, "chat", **REFUSED[name])
    message = refused.value.message
    assert "NoExtension" not in message
    assert "non-verbose" not in message
    if name == "a place":
        assert "guided_json: properties.a.items: `not` cannot be enforced" in message


def test_an_overlapping_pattern_is_kept_and_the_answer_is_whole(client: openai.OpenAI) -> None:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {
        "type": "object",
        "properties": {"score": digit},
        "required": ["score"],
        "additionalProperties": False,
        "patternProperties": {"^score$": {"type": "integer"}},
    }
    outputs = generate(client, "chat", n=2, temperature=0, max_tokens=100, guided_json=schema)
    for text, finish in outputs:
        assert finish == "stop"
        jsonschema_rs.validate(schema, json.loads(text))


def test_the_client_parses_the_output_into_its_own_model(client: openai.OpenAI) -> None:
    """The client sends the model's schema, and parses the output into an object."""

    class Order(pydantic.BaseModel):
        pieces: int
        express: bool

    response = client.chat.completions.parse(
        model="sim",
        messages=[{"role": "user", "content": PROMPT}],
        response_format=Order,
        max_tokens=120,
        temperature=0,
    )
    parsed = response.choices[0].message.parsed
    assert isinstance(parsed, Order)

"""Tool calls and reasoning through the official client and a disaggregated pool, whose chat
template has both. Each request is handed off after its first token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from baton_text.artifacts import CHAT_TEMPLATE, TOKENIZER, byte_artifacts
from tests.support.engines.text_models import write_artifacts
from tests.support.pools.baton_up import Pool

PROMPT = "every chunk of the cache has a name " * 4
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}{{ message.content }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{%- if enable_thinking | default(true) %}<think>{% else %}<think></think>{% endif %}{% endif %}
{#- <tool_call>{"name": "", "arguments": {}}</tool_call> #}"""
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "pieces": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "pieces"],
    "additionalProperties": False,
}
FLAG = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
SCHEMAS = {"order": ORDER, "light": FLAG}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
LIGHT: Any = {"type": "function", "function": {"name": "light"}}
HANDING_OFF = ("--prefill", "1", "--decode", "1", "--handoff", "always", "--chunk-blocks", "1")
CONTENT = {"type": "json_schema", "json_schema": {"name": "light", "schema": FLAG}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    artifacts = byte_artifacts()
    backend = Backend.from_buffer(artifacts[TOKENIZER])
    backend.add_tokens([AddedToken(text, special=False) for text in MARKERS])
    changes = {TOKENIZER: backend.to_str().encode(), CHAT_TEMPLATE: TEMPLATE.encode()}
    folder = write_artifacts(artifacts | changes, tmp_path_factory.mktemp("thinking"))
    flags = ["--engine", "sim", "--model", str(folder), "--sim-eos-every", "5"]
    with (
        Pool([*flags, *HANDING_OFF]) as pool,
        openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api


def chat(client: openai.OpenAI, stream: bool, **fields: Any) -> list[Any]:
    """The choices of a chat completion. OpenAI's client puts the choices of a stream together."""
    model = client.models.list().data[0].id
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 300,
        "seed": 4,
        "extra_body": {"thinking_token_budget": 6, **fields.pop("extra_body", {})},
        **fields,
    }
    if not stream:
        return list(client.chat.completions.create(**body).choices)
    with client.chat.completions.stream(**body) as events:
        return list(events.get_final_completion().choices)


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls or []
    ]


@pytest.mark.parametrize(("stream", "parallel"), [(False, True), (False, False), (True, False)])
def test_required_calls_follow_reasoning_and_match_their_schemas(
    client: openai.OpenAI, stream: bool, parallel: bool
) -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel}
    choices = chat(client, stream, n=3, **fields)
    assert len(choices) == 3
    for choice in choices:
        if parallel and choice.finish_reason == "length":
            continue  # parallel calls may go on until max_tokens
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        assert choice.message.reasoning_content
        assert len(calls_of(choice)) >= 1 if parallel else len(calls_of(choice)) == 1
        for name, arguments in calls_of(choice):
            jsonschema_rs.validate(SCHEMAS[name], arguments)
    assert any(choice.finish_reason == "tool_calls" for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_called_once(client: openai.OpenAI, stream: bool) -> None:
    [choice] = chat(client, stream, tools=TOOLS, tool_choice=LIGHT)
    assert choice.finish_reason == "stop"
    [(name, arguments)] = calls_of(choice)
    assert name == "light"
    jsonschema_rs.validate(FLAG, arguments)


BUDGETS: list[Any] = [{"max_tokens": budget} for budget in range(1, 41)]
STOPS: list[Any] = [{"stop": [text]} for text in ("a", "{", '"', "<", "tool_call", "o")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", LIGHT], ids=["required", "named"])
def test_a_required_call_that_is_cut_off_has_no_content(
    client: openai.OpenAI, stream: bool, choice: Any
) -> None:
    body: Any = {"model": client.models.list().data[0].id, "seed": 4, "stream": stream}
    body |= {"messages": [{"role": "user", "content": PROMPT}]}
    body |= {"reasoning_effort": "none", "extra_body": {"thinking_token_budget": 0}}
    names: set[str] = set()
    for limit in [*BUDGETS, *STOPS]:
        answer = client.chat.completions.create(**body, tools=TOOLS, tool_choice=choice, **limit)
        for event in answer if stream else [answer]:
            part = event.choices[0].delta if stream else event.choices[0].message
            assert not part.content, limit
            names |= {call.function.name for call in part.tool_calls or []} - {None}
    assert names
    assert names <= set(SCHEMAS)


@pytest.mark.parametrize("stream", [False, True])
def test_with_tool_choice_none_no_tool_is_called(client: openai.OpenAI, stream: bool) -> None:
    [choice] = chat(client, stream, tools=TOOLS, tool_choice="none")
    assert choice.finish_reason == "stop"
    assert not choice.message.tool_calls
    assert choice.message.content or choice.message.reasoning_content


@pytest.mark.parametrize("stream", [False, True])
def test_structured_content_follows_reasoning_and_matches_its_schema(
    client: openai.OpenAI, stream: bool
) -> None:
    [choice] = chat(client, stream, response_format=CONTENT)
    assert choice.finish_reason == "stop"
    assert choice.message.reasoning_content
    jsonschema_rs.validate(FLAG, json.loads(choice.message.content))


def test_reasoning_is_counted_returned_hidden_or_disabled_on_request(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    body: Any = {
        **{"model": model, "messages": [{"role": "user", "content": PROMPT}]},
        **{"seed": 4, "max_tokens": 20},
    }
    # The reasoning never ends, because random text hardly ever contains the closing marker.
    completion = client.chat.completions.create(**body, extra_body={"ignore_eos": True})
    [choice] = completion.choices
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning"]
    assert completion.usage is not None
    assert completion.usage.completion_tokens_details is not None
    # All count, but for a hidden token at the end.
    assert completion.usage.completion_tokens_details.reasoning_tokens in (19, 20)
    [hidden] = client.chat.completions.create(
        **body, extra_body={"ignore_eos": True, "include_reasoning": False}
    ).choices
    assert hidden.message.model_extra is not None
    assert not hidden.message.model_extra.get("reasoning")
    # The template closes the reasoning, so the whole output is content.
    [off] = client.chat.completions.create(
        **body, extra_body={"ignore_eos": True}, reasoning_effort="none"
    ).choices
    assert len(off.message.content or "") > 10
    assert off.message.model_extra is not None
    assert not off.message.model_extra["reasoning"]

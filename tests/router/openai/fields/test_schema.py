"""The OpenAPI document and the router agree about bodies: each bound, and fields in combination."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton_protocol.errors import InvalidRequest
from baton_router.anthropic.fields import ENDS_ANSWERED, ONE_FORMAT
from baton_router.anthropic.fields import TOOLS_AGREE as MESSAGES_TOOLS_AGREE
from baton_router.anthropic.messages import MessagesCall
from baton_router.anthropic.tools import MAX_NAME as MESSAGES_MAX_NAME
from baton_router.batches.files import WrittenBytes
from baton_router.http.batch_routes import BatchFields
from baton_router.http.drain import parse_drain
from baton_router.http.file_routes import FileFields
from baton_router.http.node_sleep import SleepFields, WakeFields
from baton_router.http.openapi import BODIES
from baton_router.http.prefixes import PrefixFields
from baton_router.openai.batch_chat import BatchChatCall
from baton_router.openai.call import Call
from baton_router.openai.chat import ChatCall
from baton_router.openai.completions import CompletionCall
from baton_router.openai.fields.chat import BEST_OF_REPEATS, BOTH_ENDS, DOCUMENTS_TWICE
from baton_router.openai.fields.completions import BEST_OF_AGREES
from baton_router.openai.fields.generation import BEAMS_ALONE
from baton_router.openai.fields.table import read_fields, schema_of
from baton_router.openai.fields.tokens import DetokenizeFields
from baton_router.openai.sampling import check_alone
from baton_router.openai.structured_output import NAMES, ONE_AT_MOST
from baton_router.openai.tokenize_call import TokenizeCall
from baton_router.openai.tools import MAX_NAME, TOOLS_AGREE
from baton_router.pooling.embeddings import EmbeddingsCall
from baton_router.pooling.fields import LENGTHS_AGREE, SIDES
from baton_router.pooling.rerank import RerankCall
from baton_router.pooling.score import ScoreCall
from baton_router.responses import fields as responses
from baton_router.responses.call import ResponseCall
from baton_router.responses.fields import InputTokenFields
from baton_router.tokens.generate import GenerateCall
from baton_router.tokens.generate_fields import GENERATE_AGREES
from baton_router.tokens.scoring import ScoringCall
from tests.router.openai.bodies import USER, Json
from tests.router.openai.fields.schema_edges import edges

MAX_INT = (1 << 63) - 1
SCHEMAS = {name: schema_of(table) for name, table in BODIES.items()}
REQUIRED_FIELDS: dict[str, Json] = {
    "ChatRequest": {"messages": [USER]},
    "CompletionRequest": {"prompt": "x"},
    "ResponseRequest": {"input": "x"},
    "InputTokensRequest": {"input": "x"},
    "TokenizeRequest": {"messages": [USER]},
    "DetokenizeRequest": {"tokens": [1]},
    "BatchChatRequest": {"messages": [[USER]]},
    "GenerateRequest": {"token_ids": [1]},
    "ScoringRequest": {"query": "x", "items": ["y"], "label_token_ids": [1]},
    "EmbeddingRequest": {"input": "x"},
    "ScoreRequest": {"text_1": "x", "text_2": "y"},
    "RerankRequest": {"query": "x", "documents": ["y"]},
    "MessagesRequest": {"messages": [USER], "max_tokens": 5},
    "CountTokensRequest": {"messages": [USER]},
    "DrainRequest": {},
    "PrefixRequest": {"ttl_s": 60},
    "SleepRequest": {},
    "WakeRequest": {},
    "FileRequest": {"file": "", "purpose": "batch"},
    "BatchRequest": {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
}
# A required field excludes them.
NOT_BESIDE = {
    ("TokenizeRequest", "prompt"),
    *(("ScoreRequest", name) for names in SIDES[1:] for name in names),
}
OF_MESSAGES = ("MessagesRequest", "CountTokensRequest")
TOOLS = {"tools": [{"type": "function", "function": {"name": "x" * MAX_NAME}}]}
# Fields that another field requires for its whole range of values.
REQUIRED_BESIDE: dict[str, Json] = {
    "min_tokens": {"max_tokens": MAX_INT},
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "tool_choice": TOOLS,
    "parallel_tool_calls": TOOLS,
}
RESPONSE_TOOLS = {"tools": [{"type": "function", "name": "x" * MAX_NAME}]}
BESIDE_IN_RESPONSES: dict[str, Json] = {
    "min_tokens": {"max_output_tokens": MAX_INT},
    "top_logprobs": {},
    "background": {"store": True},
    "tool_choice": RESPONSE_TOOLS,
    "parallel_tool_calls": {},
}
CUSTOM: Json = {"name": "now", "input_schema": {}}
MESSAGES_BESIDE: Json = {"tool_choice": {"tools": [CUSTOM | {"name": "x" * MESSAGES_MAX_NAME}]}}
# Errors in these fields may name other members instead.
NAMED_INSTEAD = {"stream_options": ("include_usage", "continuous_usage_stats"), "best_of": ("n",)}
# Rules that JSON Schema cannot express, such as comparing two numbers, or that would be too many
# for tools that combine them. The document states them in words.
IN_WORDS = {
    "use_beam_search": BEAMS_ALONE,
    "min_tokens": "min_tokens is at most what max_tokens is, or is by default",
    **dict.fromkeys((*NAMES, "allowed_token_ids"), ONE_AT_MOST),
}
IN_WORDS_FOR_COMPLETIONS = {"best_of": BEST_OF_AGREES}
IN_WORDS_FOR_CHATS = {
    "best_of": BEST_OF_REPEATS,
    "continue_final_message": BOTH_ENDS,
    "documents": DOCUMENTS_TWICE,
    "tools": TOOLS_AGREE,
    "tool_choice": TOOLS_AGREE,
    "parallel_tool_calls": TOOLS_AGREE,
}
IN_WORDS_FOR_RESPONSES = {
    "min_tokens": responses.MIN_AGREES,
    "structured_outputs": responses.ONE_FORM,
    "allowed_token_ids": responses.ONE_FORM,
    "tools": responses.TOOLS_AGREE,
    "tool_choice": responses.TOOLS_AGREE,
}
IN_WORDS_FOR_GENERATE = {
    "sampling_params.prompt_logprobs": GENERATE_AGREES,
    "sampling_params.detokenize": GENERATE_AGREES,
}
IN_WORDS_FOR_SCORES = {names[1]: LENGTHS_AGREE for names in SIDES}
IN_WORDS_FOR_MESSAGES = {
    "messages": ENDS_ANSWERED,
    "output_format": ONE_FORMAT,
    **dict.fromkeys(("tools", "tool_choice", "tool_choice.name"), MESSAGES_TOOLS_AGREE),
}
STATED = {
    **IN_WORDS,
    **IN_WORDS_FOR_CHATS,
    **IN_WORDS_FOR_RESPONSES,
    **IN_WORDS_FOR_GENERATE,
    **IN_WORDS_FOR_SCORES,
    **IN_WORDS_FOR_MESSAGES,
}
TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
ANYTHING: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-5, 5) | TEXT | st.just([]) | st.just({})
)


def read_generation(read: Callable[[Json], Call]) -> Callable[[Json], None]:
    def check(body: Json) -> None:
        call = read(body)
        check_alone(call.sampling, call.default_max_tokens)

    return check


def read_upload(body: Json) -> object:
    """The bytes of a form's file are a text in the document; they are stored when it is read."""
    stored = {"file": WrittenBytes("file-1", 1)} if isinstance(body.get("file"), str) else {}
    return read_fields(FileFields, body | stored)


READERS: dict[str, Callable[[Json], object]] = {
    "ChatRequest": read_generation(ChatCall.from_body),
    "CompletionRequest": read_generation(CompletionCall.from_body),
    "ResponseRequest": read_generation(ResponseCall.from_body),
    "InputTokensRequest": lambda body: read_fields(InputTokenFields, body),
    "MessagesRequest": read_generation(MessagesCall.from_body),
    "CountTokensRequest": MessagesCall.counted,
    "TokenizeRequest": TokenizeCall.from_body,
    "BatchChatRequest": read_generation(BatchChatCall.from_body),
    "GenerateRequest": read_generation(GenerateCall.from_body),
    "ScoringRequest": read_generation(ScoringCall.from_body),
    "DetokenizeRequest": lambda body: read_fields(DetokenizeFields, body),
    "EmbeddingRequest": EmbeddingsCall.from_body,
    "ScoreRequest": ScoreCall.from_body,
    "RerankRequest": RerankCall.from_body,
    "DrainRequest": lambda body: parse_drain(msgspec.json.encode(body)),
    "PrefixRequest": lambda body: read_fields(PrefixFields, body),
    "SleepRequest": lambda body: read_fields(SleepFields, body),
    "WakeRequest": lambda body: read_fields(WakeFields, body),
    "FileRequest": read_upload,
    "BatchRequest": lambda body: read_fields(BatchFields, body),
}


def fields_of_bodies() -> Iterator[tuple[str, str]]:
    """All fields except messages and prompts, which have more than one bound."""
    for name, schema in SCHEMAS.items():
        for field in schema["properties"]:
            if field not in REQUIRED_FIELDS[name] and (name, field) not in NOT_BESIDE:
                yield name, field


@pytest.mark.parametrize(("name", "field"), list(fields_of_bodies()))
def test_a_value_at_a_bound_is_accepted_and_one_beyond_is_refused_by_name(
    name: str, field: str
) -> None:
    def read(value: Any) -> None:
        required = MESSAGES_BESIDE if name in OF_MESSAGES else REQUIRED_BESIDE
        if name in ("ResponseRequest", "InputTokensRequest"):
            required = REQUIRED_BESIDE | BESIDE_IN_RESPONSES
        if name == "InputTokensRequest":
            required = required | {"min_tokens": {}}  # it generates nothing
        beside = {"n": value} if field == "best_of" else required.get(field, {})
        if BODIES[name].FIELDS[field].use == "refused":
            beside = {}
        if name == "CompletionRequest" and field.startswith("max_") and value == 0:
            beside = {"echo": True}
        READERS[name](REQUIRED_FIELDS[name] | beside | {field: value})

    schema = SCHEMAS[name]["properties"][field]
    tried = list(edges(schema))
    for value, allowed in tried:
        assert jsonschema_rs.is_valid(schema, value) == allowed, value
        if allowed:
            read(value)
            continue
        with pytest.raises(InvalidRequest) as caught:
            read(value)
        param = caught.value.param or ""
        assert re.split(r"[.\[]", param)[0] in (field, *NAMED_INSTEAD.get(field, ())), value
    assert True in {allowed for _, allowed in tried}


def test_numbers_and_lists_are_bounded_on_both_sides() -> None:
    for name, field in fields_of_bodies():
        schema = SCHEMAS[name]["properties"][field]
        types = schema.get("type", [])
        if "integer" in types or ("number" in types and field != "deadline_s"):
            assert {"minimum", "maximum"} <= schema.keys(), field
        if "array" in types:
            assert "maxItems" in schema, field


def values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Mostly values that the schema allows. A later filter removes the others."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    if "anyOf" in schema:
        rest = {name: value for name, value in schema.items() if name != "anyOf"}
        return st.one_of([values({**rest, **branch}) for branch in schema["anyOf"]])
    types = schema.get("type", ["object"] if "properties" in schema else [])
    types = [types] if isinstance(types, str) else types
    return st.one_of([of_type(type_, schema) for type_ in types]) if types else ANYTHING


def of_type(type_: str, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    low, high = schema.get("minimum"), schema.get("maximum")
    match type_:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            edge_values = [value for value in (low, high, 1, 2) if value is not None]
            integers = st.integers(low, high) | st.sampled_from(edge_values)
            return integers | integers.filter(lambda value: abs(value) < 1 << 53).map(float)
        case "number":
            lowest = low if low is not None else -1e9
            highest = high if high is not None else 1e9
            return st.floats(lowest, highest) | st.integers(int(lowest), int(highest))
        case "string":
            if "pattern" in schema:
                return st.from_regex(schema["pattern"], fullmatch=True)
            return TEXT | st.just("x" * min(schema.get("maxLength", 9), 5000))
        case "array":
            shortest, longest = schema.get("minItems", 0), min(schema.get("maxItems", 4), 4)
            return st.lists(values(schema["items"]), min_size=shortest, max_size=longest)
        case "object":
            return objects(schema)
    raise AssertionError(type_)


def objects(schema: Mapping[str, Any]) -> st.SearchStrategy[Json]:
    properties = schema.get("properties", {})
    names = set(schema.get("required", ()))
    declared = st.fixed_dictionaries(
        {name: values(inner) for name, inner in properties.items() if name in names},
        optional={name: values(inner) for name, inner in properties.items() if name not in names},
    )
    other: st.SearchStrategy[Json] = st.dictionaries(TEXT, ANYTHING, max_size=2)
    for inner in schema.get("patternProperties", {}).values():
        other = st.dictionaries(st.integers(0, 9999).map(str), values(inner), max_size=2)
    if schema.get("additionalProperties"):
        other = st.dictionaries(TEXT, values(schema["additionalProperties"]), max_size=2)
    return st.tuples(other, declared).map(lambda pair: pair[0] | pair[1])


def some_fields(name: str) -> st.SearchStrategy[Json]:
    """A few fields at a time: most bodies then obey the rules, and pairs of fields still occur."""
    properties = SCHEMAS[name]["properties"]
    field_names = st.lists(st.sampled_from(sorted(properties)), max_size=6, unique=True)
    return field_names.flatmap(
        lambda names: objects(
            {
                "properties": {
                    field: properties[field] for field in {*names, *REQUIRED_FIELDS[name]}
                },
                "required": list(REQUIRED_FIELDS[name]),
            }
        )
    )


def refusal(name: str, body: Json) -> InvalidRequest | None:
    try:
        READERS[name](body)
    except InvalidRequest as error:
        return error
    return None


@pytest.mark.parametrize("count", [60, pytest.param(800, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_body_that_the_document_allows_is_not_refused(name: str, count: int) -> None:
    validator = jsonschema_rs.validator_for(SCHEMAS[name])
    tried = 0

    @given(some_fields(name).filter(validator.is_valid))
    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    def check(body: Json) -> None:
        nonlocal tried
        tried += 1
        refused = refusal(name, body)
        assert refused is None or refused.param in STATED, (
            refused.message,
            body,
        )

    check()
    assert tried > count // 2


def test_the_document_states_the_rules_of_responses_in_words() -> None:
    documented = {rule.get("description") for rule in SCHEMAS["ResponseRequest"]["allOf"]}
    assert documented >= set(IN_WORDS_FOR_RESPONSES.values())


WORDS: dict[str, dict[str, str]] = {
    "ChatRequest": IN_WORDS | IN_WORDS_FOR_CHATS,
    "CompletionRequest": IN_WORDS | IN_WORDS_FOR_COMPLETIONS,
    **dict.fromkeys(OF_MESSAGES, IN_WORDS_FOR_MESSAGES),
}


@pytest.mark.parametrize("name", WORDS)
def test_the_document_states_rules_beyond_json_schema_in_words(name: str) -> None:
    documented = {rule["description"] for rule in SCHEMAS[name]["allOf"] if "description" in rule}
    assert documented == set(WORDS[name].values())


OUTPUT: Json = {"type": "function_call_output", "call_id": "c"}
CALLED: Json = {"type": "function_call", "call_id": "c", "name": "now"}
WORD: Json = {"type": "input_text", "text": "x"}
IMAGE: Json = {"type": "input_image", "image_url": "x"}
RESPONSE_TOOL: Json = {"type": "function", "name": "now"}
ALLOWED: Json = {"type": "allowed_tools", "mode": "auto", "tools": [RESPONSE_TOOL]}
NOW: Json = {"name": "now", "arguments": "{}"}
LISTED: Json = {"name": "now", "arguments": []}
TOOL: Json = {"type": "function", "function": {"name": "now", "parameters": None}}
USED: Json = {"type": "tool_use", "id": "c", "name": "now", "input": {}}
ASSISTANT: Json = {"role": "assistant", "content": None}
CASES: list[tuple[str, Json, bool]] = [
    ("ChatRequest", {"stream_options": {}}, True),
    ("ChatRequest", {"stream_options": {}, "stream": False}, True),
    ("CompletionRequest", {"stream_options": {}, "stream": False}, True),
    ("ChatRequest", {"stream_options": {"include_usage": False}}, False),
    ("ChatRequest", {"stream_options": {"include_usage": True}, "stream": True}, True),
    ("ChatRequest", {"top_logprobs": 0}, True),
    ("ChatRequest", {"top_logprobs": 1}, False),
    ("ChatRequest", {"top_logprobs": 1, "logprobs": True}, True),
    ("ChatRequest", {"detokenize": False}, False),
    ("ChatRequest", {"detokenize": False, "return_token_ids": True}, True),
    ("ChatRequest", {"detokenize": False, "return_token_ids": True, "stop": "x"}, False),
    ("ChatRequest", {"detokenize": False, "return_token_ids": True, "stop": []}, True),
    ("ChatRequest", {"prompt_logprobs": 0, "stream": True}, False),
    ("ChatRequest", {"prompt_logprobs": None, "stream": True}, True),
    ("CompletionRequest", {"max_tokens": 0}, False),
    ("CompletionRequest", {"max_tokens": 0, "echo": True}, True),
    ("CompletionRequest", {"max_tokens": 0, "max_completion_tokens": 1}, False),
    ("CompletionRequest", {"max_tokens": "x", "max_completion_tokens": 1}, False),
    ("CompletionRequest", {"prompt": [16.0, 1]}, True),
    ("CompletionRequest", {"prompt": [[16.0], [1]]}, True),
    ("CompletionRequest", {"prompt": [16.5]}, False),
    ("CompletionRequest", {"stop_token_ids": [16.0]}, True),
    ("ChatRequest", {"chat_template_kwargs": {"tokenize": True}}, False),
    ("ChatRequest", {"chat_template_kwargs": {"enable_thinking": True}}, True),
    ("ChatRequest", {"documents": None, "chat_template_kwargs": {"documents": []}}, True),
    ("ChatRequest", {"documents": [{"title": "x"}], "chat_template_kwargs": {}}, True),
    ("ChatRequest", {"documents": ["x"]}, False),
    ("ChatRequest", {"continue_final_message": True}, True),
    ("CompletionRequest", {"truncate_prompt_tokens": -1}, True),
    ("CompletionRequest", {"truncate_prompt_tokens": -2}, False),
    ("CompletionRequest", {"nobody_knows_this": 1}, False),
    ("CompletionRequest", {"nobody_knows_this": None}, True),
    ("ChatRequest", {"stream": True, "stream_options": {"include_usages": True}}, False),
    ("ChatRequest", {"messages": [{"role": "user", "content": "x", "contents": "y"}]}, True),
    ("ChatRequest", {"messages": [{"role": "user", "contents": "y"}]}, False),
    ("ChatRequest", {"messages": [{**ASSISTANT, "prefix": True}]}, False),
    ("ChatRequest", {"messages": [{**ASSISTANT, "prefix": False, "audio": None}]}, True),
    ("ChatRequest", {"messages": [{**ASSISTANT, "audio": {"id": "x"}}]}, False),
    ("ChatRequest", {"messages": [{**ASSISTANT, "content": [{"type": "refusal"}]}]}, False),
    ("ChatRequest", {"messages": [{**ASSISTANT, "content": [{"type": "thinking"}]}]}, True),
    ("ChatRequest", {"messages": [{**ASSISTANT, "content": [{"type": "image_url"}]}]}, False),
    ("ChatRequest", {"messages": [{**ASSISTANT, "content": [{"text": "x"}]}]}, False),
    ("ChatRequest", {"messages": [{"role": "user", "content": "x", "name": "y"}]}, True),
    ("ChatRequest", {"response_format": {"type": "json_object", "triggers": None}}, True),
    ("ChatRequest", {"response_format": {"type": "json_object", "triggers": ["x"]}}, False),
    ("ChatRequest", {"response_format": {"json_schema": {"schema": {}}}}, False),
    ("ChatRequest", {"response_format": {"type": "json_schema", "json_schema": {}}}, False),
    ("CompletionRequest", {"structured_outputs": {"regex": "a", "json": None}}, True),
    ("CompletionRequest", {"structured_outputs": {"regex": "a", "json": {}}}, False),
    ("CompletionRequest", {"structured_outputs": {}}, False),
    ("CompletionRequest", {"guided_choice": ["a", ""]}, False),
    ("CompletionRequest", {"guided_json": {}, "response_format": {"type": "text"}}, True),
    ("ChatRequest", {"tools": []}, False),
    ("ChatRequest", {"tools": [TOOL], "tool_choice": TOOL}, True),
    ("ChatRequest", {"tools": [TOOL], "tool_choice": "required"}, True),
    ("ChatRequest", {"tools": [TOOL, TOOL]}, False),
    ("ChatRequest", {"tools": [{**TOOL, "type": "custom"}]}, False),
    ("ChatRequest", {"tools": [{**TOOL, "cache_control": {}, "defer_loading": True}]}, True),
    ("ChatRequest", {"tools": [{**TOOL, "input_schema": {"type": "object"}}]}, False),
    ("ChatRequest", {"cache_control": {"type": "ephemeral"}}, True),
    ("ChatRequest", {"cache_control": "ephemeral"}, False),
    ("ChatRequest", {"tools": [{**TOOL, "function": {"name": "a b"}}]}, False),
    ("ChatRequest", {"tools": [TOOL], "tool_choice": {"type": "function"}}, False),
    ("ChatRequest", {"tool_choice": "any"}, False),
    ("ChatRequest", {"messages": [{**ASSISTANT, "tool_calls": [{"function": {}}]}]}, False),
    ("ChatRequest", {"messages": [{**ASSISTANT, "tool_calls": {}}]}, False),
    ("ChatRequest", {"messages": [{**ASSISTANT, "tool_calls": [{"function": NOW}]}]}, True),
    ("ChatRequest", {"messages": [{**ASSISTANT, "tool_calls": [{"function": LISTED}]}]}, False),
    ("ChatRequest", {"thinking_token_budget": 0, "reasoning_effort": "xhigh"}, True),
    ("ChatRequest", {"thinking_token_budget": -2}, False),
    ("ChatRequest", {"reasoning_effort": "most"}, False),
    ("CompletionRequest", {"tools": []}, False),
    ("ResponseRequest", {"messages": []}, False),
    ("ResponseRequest", {"max_tokens": 1}, False),
    ("ResponseRequest", {"n": 1}, False),
    ("ResponseRequest", {"input": []}, False),
    ("ResponseRequest", {"input": [{"role": "user", "content": "x"}]}, True),
    ("ResponseRequest", {"input": [{"role": "user"}]}, False),
    ("ResponseRequest", {"input": [{"role": "robot", "content": "x"}]}, False),
    ("ResponseRequest", {"input": [{"type": "item_reference", "id": "x"}]}, False),
    ("ResponseRequest", {"input": [{"type": "web_search_call", "id": "x"}]}, False),
    ("ResponseRequest", {"input": [{**OUTPUT, "output": "x"}]}, True),
    ("ResponseRequest", {"input": [{**OUTPUT, "output": [IMAGE]}]}, False),
    ("ResponseRequest", {"input": [{**OUTPUT, "output": [WORD]}]}, True),
    ("ResponseRequest", {"input": [{**CALLED, "arguments": "{}"}]}, True),
    ("ResponseRequest", {"input": [{**CALLED, "arguments": {}}]}, False),
    ("ResponseRequest", {"input": [{"type": "reasoning", "summary": []}]}, True),
    ("ResponseRequest", {"tools": []}, True),
    ("ResponseRequest", {"tools": [{"type": "web_search"}]}, False),
    ("ResponseRequest", {"tools": [RESPONSE_TOOL], "tool_choice": RESPONSE_TOOL}, True),
    ("ResponseRequest", {"tools": [RESPONSE_TOOL], "tool_choice": ALLOWED}, True),
    ("ResponseRequest", {"tools": [RESPONSE_TOOL], "tool_choice": {"type": "mcp"}}, False),
    ("ResponseRequest", {"parallel_tool_calls": False}, True),
    ("ResponseRequest", {"text": {"format": {"type": "json_schema"}}}, False),
    ("ResponseRequest", {"text": {"format": {"type": "json_schema", "schema": {}}}}, True),
    ("ResponseRequest", {"text": {"verbosity": "high"}}, False),
    ("ResponseRequest", {"reasoning": {"effort": "high", "summary": "auto"}}, True),
    ("ResponseRequest", {"include": ["reasoning.encrypted_content"]}, True),
    ("ResponseRequest", {"include": ["web_search_call.results"]}, False),
    ("ResponseRequest", {"background": True}, False),
    ("ResponseRequest", {"background": True, "store": True}, True),
    ("ResponseRequest", {"background": True, "store": True, "stream": True}, True),
    ("ResponseRequest", {"stream_options": {"include_obfuscation": False}}, False),
    ("ResponseRequest", {"stream": True, "stream_options": {"include_usage": True}}, True),
    ("ResponseRequest", {"stream": True, "stream_options": {"include_obfuscation": True}}, False),
    ("ResponseRequest", {"conversation": "conv_1"}, False),
    ("ResponseRequest", {"prompt": {"id": "pmpt_1"}}, False),
    ("InputTokensRequest", {"max_output_tokens": 1}, False),
    ("InputTokensRequest", {"instructions": "x", "previous_response_id": "resp_1"}, True),
    ("CompletionRequest", {"reasoning_effort": "low"}, False),
    ("MessagesRequest", {"max_tokens": None}, False),
    ("MessagesRequest", {"tools": [CUSTOM], "tool_choice": {"type": "tool"}}, False),
    ("MessagesRequest", {"tools": [{**CUSTOM, "type": "web_search_20250305"}]}, False),
    ("MessagesRequest", {"tools": [{"name": "now"}]}, False),
    ("MessagesRequest", {"messages": [{"role": "user", "content": [USED]}]}, False),
    ("MessagesRequest", {"messages": [{"role": "assistant", "content": [USED]}, USER]}, True),
    ("MessagesRequest", {"system": [{"type": "image"}]}, False),
    ("MessagesRequest", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
    ("CountTokensRequest", {"max_tokens": 5}, False),
    ("TokenizeRequest", {"prompt": "x"}, False),
    ("TokenizeRequest", {"messages": None, "prompt": ""}, True),
    ("TokenizeRequest", {"messages": None}, False),
    ("TokenizeRequest", {"messages": None, "prompt": "x", "tools": [TOOL]}, False),
    ("TokenizeRequest", {"tools": [TOOL], "return_token_strs": True}, True),
    ("TokenizeRequest", {"chat_template": "x"}, False),
    ("TokenizeRequest", {"temperature": 0.5}, False),
    ("DetokenizeRequest", {"tokens": [16.0]}, True),
    ("DetokenizeRequest", {"tokens": [-1]}, False),
    ("DetokenizeRequest", {"tokens": [[1]]}, False),
    ("DrainRequest", {"reason": "x" * 201}, False),
    ("DrainRequest", {"reason": "two\nlines"}, False),
    ("DrainRequest", {"reason": "Stra\u00dfe, \u00a0\u65e5"}, True),
    ("DrainRequest", {"replaced_by": "A"}, False),
    ("DrainRequest", {"replaced_by": "a-1"}, True),
]


@pytest.mark.parametrize(("name", "changes", "valid"), CASES)
def test_document_and_parser_agree_on_fields_that_depend_on_each_other(
    name: str, changes: Json, valid: bool
) -> None:
    body = REQUIRED_FIELDS[name] | changes
    assert jsonschema_rs.validator_for(SCHEMAS[name]).is_valid(body) == valid
    assert (refusal(name, body) is None) == valid

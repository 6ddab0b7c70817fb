"""Structured output: every request form reaches the node as a grammar, or is refused."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from pydantic import BaseModel

from baton_protocol import STRUCTURED_SINCE
from baton_protocol.errors import InvalidRequest
from baton_protocol.link import PrefillJob, RunJob
from baton_router.auth import Tenant
from baton_router.nodes.model_grammars import ModelGrammars
from baton_router.openai.chat import ChatCall
from baton_router.openai.completions import CompletionCall
from baton_router.openai.structured_output import KINDS, MAX_STRUCTURES, NAMES, TYPES
from baton_router.requests.tokenize import MAX_GRAMMARS_BYTES, prepare
from baton_text.artifacts import byte_artifacts
from baton_text.grammars.constraints import grammar_of
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammars import COMPILED_KEPT, MAX_COMPILE_S, Grammars
from baton_text.grammars.limits import (
    MAX_CHOICES,
    MAX_EBNF_BYTES,
    MAX_GRAMMAR_BYTES,
    MAX_JSON_DEPTH,
)
from baton_text.tokenizer import Tokenizer
from tests.router.openai.bodies import USER, Json
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.servings import make_serving
from tests.support.waiting import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [USER]
BODIES: dict[str, Json] = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "Hi"}}
PERSON: Json = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANN = '{"name": "Ann", "age": 3}'
TAG: Json = {
    "structures": [{"begin": "<call=f>", "schema": PERSON, "end": "</call>"}],
    "triggers": ["<call"],
}
CALLED = 'so <call=f>{"name":"A","age":1}</call> done'
LARK, EBNF = 'start: ("a" | "b")+', 'root ::= "x" [0-9]+'


def schema(**more: Any) -> Json:
    json_schema = {"name": "person", "schema": PERSON} | more
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def outputs(**kinds: Any) -> Json:
    return {"structured_outputs": kinds}


# Request fields, a text that matches, and one that does not.
ACCEPTED: list[tuple[Json, str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
    ({"response_format": {"type": "json_object", "json_schema": None}}, "{}", "1"),
    (schema(), ANN, '{"name": "Ann"}'),
    (schema(strict=True, description="of a person"), ANN, "{}"),
    (schema(strict=False, name=None), ANN, "{}"),
    ({"response_format": {"type": "structural_tag", **TAG}}, CALLED, "<call=f>{}</call>"),
    (outputs(json=PERSON), ANN, "{}"),
    (outputs(json=json.dumps(PERSON)), ANN, "{}"),
    (outputs(json={}), "[1]", "[1"),
    (outputs(json_object=True), "{}", "[]"),
    (outputs(regex=r"\d{3}-[a-z]+"), "123-ab", "12-ab"),
    (outputs(choice=["yes", "no"]), "yes", "ye"),
    (outputs(grammar=LARK), "abba", "abc"),
    (outputs(grammar=EBNF), "x12", "x"),
    (outputs(structural_tag=TAG), CALLED, "<call=f>{}</call>"),
    (outputs(structural_tag=json.dumps(TAG)), "no call", "<call=g>"),
    (outputs(regex="a|b", json=None, disable_fallback=True, whitespace_pattern=None), "a", "ab"),
    (outputs(regex="a", disable_any_whitespace=False), "a", "b"),
    ({"guided_json": PERSON}, ANN, "{}"),
    ({"guided_json": json.dumps(PERSON)}, ANN, "{}"),
    ({"guided_regex": "a+"}, "aaa", "ab"),
    ({"guided_choice": ["left", "right"]}, "right", "r"),
    ({"guided_grammar": LARK}, "ab", "c"),
    ({"guided_json": PERSON, "response_format": {"type": "text"}}, ANN, "{}"),
    (
        {
            **outputs(regex="[a-z]+"),
            **{"min_tokens": 1, "stop": ["x"], "ignore_eos": True, "n": 2, "seed": 1},
            **{"frequency_penalty": 1, "logit_bias": {"7": 2}, "prompt_logprobs": 1},
            **{"bad_words": ["bad"], "temperature": 0.5},
        },
        "abc",
        "1",
    ),
]


def matches(grammar: str, text: str) -> bool:
    matcher = Grammars(Tokenizer.from_artifacts(byte_artifacts(259))).matcher(grammar)
    return matcher.accept(text.encode()) and matcher.complete


@pytest.mark.integration
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_form_reaches_both_nodes_as_a_grammar(
    running: Any, decode: FakeNode, prefill: FakeNode, path: str
) -> None:
    async with running(decode, prefill, handoff="always") as client:
        for fields, matching, other in ACCEPTED:
            decode.got.clear()
            prefill.got.clear()
            status, answer, _ = await client.post(path, BODIES[path] | {"max_tokens": 4} | fields)
            assert status == 200, answer
            jobs = prefill.got_of(PrefillJob) + decode.got_of(RunJob)
            grammars = [job.request.params.structured.grammar for job in jobs]
            assert set(grammars) == {grammars[0]}
            assert matches(grammars[0], matching), fields
            assert not matches(grammars[0], other), fields


@pytest.mark.integration
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None, "guided_json": None, "guided_choice": None},
    ],
)
async def test_a_request_for_text_has_no_grammar_and_compiles_none(
    running: Any, decode: FakeNode, fields: Json
) -> None:
    async with running(decode) as client:
        status, answer, _ = await client.post(CHAT, BODIES[CHAT] | fields)
        assert status == 200, answer
        assert await client.figure("baton_router_grammar_compiled_total") == 0
    [job] = decode.got_of(RunJob)
    assert job.request.params.structured is None


DEEP: Json = {}
for _ in range(100):
    DEEP = {"properties": {"a": DEEP}}
REFUSED: list[tuple[Json, str, str]] = [
    # Wrong form.
    ({"response_format": "json"}, "response_format", '"json"; it must be an object'),
    ({"response_format": {"type": "yaml"}}, "response_format.type", '"yaml"; use one of text'),
    (
        {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        "response_format.schema",
        "its fields are type",
    ),
    (schema(schema="{}"), "response_format.json_schema.schema", "it must be an object"),
    (schema(strict="yes"), "response_format.json_schema.strict", '"yes"; it must be true or false'),
    (schema(name=5), "response_format.json_schema.name", "5; it must be a string"),
    (schema(scheme={}), "response_format.json_schema.scheme", "name, description, strict"),
    (
        {"response_format": {"type": "structural_tag", "format": {}}},
        "response_format.format",
        "type, structures, triggers",
    ),
    (outputs(), "structured_outputs", "has none of them; it must have exactly one of json"),
    (outputs(json={}, regex="a"), "structured_outputs", "json and regex; it must have exactly one"),
    (outputs(xml="a"), "structured_outputs.xml", "json, json_object, regex"),
    (outputs(json=[1]), "structured_outputs.json", "[1]; it must be a JSON schema"),
    (outputs(json_object=False), "structured_outputs.json_object", "it must be true"),
    (outputs(regex=""), "structured_outputs.regex", "not empty"),
    (outputs(choice="yes"), "structured_outputs.choice", "a list with at least one string"),
    (outputs(choice=[""]), "structured_outputs.choice", "may be empty"),
    (outputs(structural_tag={**TAG, "a": 1}), "structured_outputs.structural_tag.a", "structures"),
    (
        outputs(regex="a", whitespace_pattern=" *"),
        "structured_outputs.whitespace_pattern",
        "leave it out",
    ),
    ({"guided_choice": []}, "guided_choice", "at least one string"),
    ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice", f"at most {MAX_CHOICES}"),
    ({"guided_choice": ["a" * MAX_GRAMMAR_BYTES, "b"]}, "guided_choice", str(MAX_GRAMMAR_BYTES)),
    ({"guided_regex": ["a"]}, "guided_regex", "not empty"),
    ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex", str(MAX_GRAMMAR_BYTES)),
    (
        {"guided_json": {"const": "x" * MAX_GRAMMAR_BYTES}},
        "guided_json",
        f"at most {MAX_GRAMMAR_BYTES}",
    ),
    # Two constraints.
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_regex and guided_json"),
    (
        {**schema(), **outputs(regex="a")},
        "structured_outputs",
        "structured_outputs and response_format both",
    ),
    (
        {"guided_regex": "a", "allowed_token_ids": [97]},
        "allowed_token_ids",
        "allowed_token_ids and guided_regex",
    ),
    # Grammars that do not compile.
    (schema(schema={"type": "objekt"}), "response_format", "objekt"),
    (schema(schema={"type": "x" * 100_000}), "response_format", "xxx"),
    (outputs(regex="(" + "a" * 100_000), "structured_outputs", "structured_outputs.regex: "),
    (schema(schema={"$ref": "#/missing"}), "response_format", "/missing"),
    (schema(schema=DEEP), "response_format", "deeper than 64"),
    (
        schema(
            schema={
                "$ref": "#/$defs/d0",
                "$defs": {
                    **{f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(2_000)},
                    "d2000": {"type": "string"},
                },
            }
        ),
        "response_format",
        "nesting levels together; the limit is 1000",
    ),
    (
        outputs(grammar="\n".join(["start: r0", *(f"r{n}: r{n + 1}" for n in range(5_000))])),
        "structured_outputs",
        "rules; the limit is 1000",
    ),
    (
        {"response_format": {"type": "structural_tag", **TAG, "triggers": ["<x"]}},
        "response_format",
        "none of the triggers",
    ),
    (outputs(regex="(a"), "structured_outputs", "structured_outputs.regex: "),
    (outputs(grammar="start: missing"), "structured_outputs", "missing"),
    (outputs(structural_tag="{"), "structured_outputs", "not valid JSON"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": "[1]"}, "guided_json", "a schema must be an object"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "EBNF"),
]


@pytest.mark.integration
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_invalid_structured_output_is_refused_before_a_job_is_sent(
    running: Any, decode: FakeNode, path: str
) -> None:
    async with running(decode) as client:
        for fields, param, message in REFUSED:
            status, answer, _ = await client.post(path, BODIES[path] | fields)
            assert (status, answer["error"].get("param")) == (400, param), answer
            assert message in answer["error"]["message"], answer
            assert len(answer["error"]["message"]) < 1000
    assert decode.got_of(RunJob) == []


@pytest.mark.parametrize("parse", [ChatCall.parse, CompletionCall.parse])
def test_a_schema_keeps_the_order_of_its_properties(parse: Any) -> None:
    ordered = {"properties": {"z": {}, "a": {}}, "required": ["z", "a"]}
    body = BODIES[CHAT] if parse == ChatCall.parse else BODIES[COMPLETIONS]
    call = parse(msgspec.json.encode(body | {"guided_json": ordered}))
    assert call.grammar.value == '{"properties":{"z":{},"a":{}},"required":["z","a"]}'


@pytest.mark.integration
async def test_a_grammar_is_compiled_once_and_later_requests_are_cache_hits(
    running: Any, decode: FakeNode
) -> None:
    async with running(decode) as client:
        for _ in range(3):
            status, answer, _ = await client.post(CHAT, BODIES[CHAT] | schema())
            assert status == 200, answer
        assert await client.figure("baton_router_grammar_compiled_total") == 1
        assert await client.figure("baton_router_grammar_hits_total") == 2
        assert await client.figure("baton_router_grammar_compile_seconds_total") > 0


async def test_concurrent_requests_for_a_new_grammar_share_one_compilation() -> None:
    model = make_serving().model
    texts = await asyncio.gather(*(model.grammar("regex", "a+") for _ in range(50)))
    assert set(texts) == {grammar_of("regex", "a+")}
    assert (model.grammars.counts.compiled, model.grammars.counts.hits) == (1, 0)
    with pytest.raises(GrammarError):
        await model.grammar("regex", "(")
    assert await model.grammar("regex", "a+") == texts[0]
    assert model.grammars.counts.hits == 1


async def test_an_evicted_grammar_is_compiled_again() -> None:
    model = make_serving().model
    for count in range(1, COMPILED_KEPT + 2):
        await model.grammar("regex", f"a{{{count}}}")
    await model.grammar("regex", "a{1}")
    assert (model.grammars.counts.compiled, model.grammars.counts.hits) == (COMPILED_KEPT + 2, 0)


async def test_a_compilation_continues_after_its_client_disconnects() -> None:
    model = make_serving().model
    check = asyncio.create_task(model.grammar("regex", "[a-z]{100}"))
    await asyncio.sleep(0)  # the check starts
    check.cancel()
    await until(lambda: model.grammars.counts.compiled == 1)
    with pytest.raises(asyncio.CancelledError):
        await check


async def test_a_tokenizer_that_grammars_cannot_read_is_an_error_that_says_so() -> None:
    class Unreadable(Tokenizer):
        def to_json(self) -> str:
            return "{}"

    tokenizer = Unreadable.from_artifacts(byte_artifacts(259))
    with pytest.raises(GrammarError, match="tokenizer cannot be used with grammars"):
        await ModelGrammars().text(tokenizer, "regex", "a")


async def test_a_call_of_many_prompts_with_a_large_grammar_is_refused() -> None:
    choices = ["a" * 20_000, "b"]
    body = {"prompt": ["Hi"] * 1024, "guided_choice": choices}
    call = CompletionCall.parse(msgspec.json.encode(body))
    facts: Json = {"tenant": Tenant(), "deadline": 60.0, "rng": random.Random(0)}
    with pytest.raises(
        InvalidRequest, match="for each of 1024 prompts; one call may have at most"
    ) as caught:
        await prepare(call, make_serving(), "r", **facts)
    assert caught.value.param == "prompt"
    few = CompletionCall.parse(msgspec.json.encode(body | {"prompt": ["Hi"] * 8}))
    assert len(await prepare(few, make_serving(), "r", **facts)) == 8


# --- nodes of an older version --------------------------------------------------------------------


@pytest.fixture
async def older() -> AsyncIterator[FakeNode]:
    async with FakeNode("decode-9", "decode", protocol=STRUCTURED_SINCE - 1) as node:
        yield node


@pytest.mark.integration
async def test_a_node_that_does_not_support_grammars_gets_no_request_with_one(
    running: Any, decode: FakeNode, older: FakeNode
) -> None:
    async with running(decode, older) as client:
        for _ in range(8):
            status, answer, _ = await client.post(CHAT, BODIES[CHAT] | schema())
            assert status == 200, answer
    assert len(decode.got_of(RunJob)) == 8
    assert older.got_of(RunJob) == []


@pytest.mark.integration
async def test_if_no_node_supports_grammars_the_503_names_the_needed_version(
    running: Any, older: FakeNode
) -> None:
    async with running(older, unready_wait_s=0) as client:
        status, answer, _ = await client.post(CHAT, BODIES[CHAT] | schema())
        assert (status, answer["error"]["code"]) == (503, "unavailable"), answer
        assert (
            f"decode-9 cannot run it: structured output needs protocol version {STRUCTURED_SINCE}"
            in (answer["error"]["message"])
        )
        assert (await client.post(CHAT, BODIES[CHAT]))[0] == 200


# --- the official client --------------------------------------------------------------------------


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def client(running: Any, decode: FakeNode) -> Any:
    """`async with client() as api`: the official client of a router."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[openai.AsyncOpenAI]:
        async with (
            running(decode) as router,
            openai.AsyncOpenAI(
                base_url=router.url + "/v1", api_key="any", max_retries=0
            ) as official,
        ):
            yield official

    return opened


def grammars_at(node: FakeNode) -> Iterator[str]:
    for job in node.got_of(RunJob):
        yield job.request.params.structured.grammar


@pytest.mark.integration
async def test_the_official_client_parses_an_answer_into_a_pydantic_model(
    client: Any, decode: FakeNode
) -> None:
    decode.script.reply = ANN.encode()
    async with client() as api:
        answer = await api.chat.completions.parse(
            model="fake-model", messages=MESSAGES, response_format=Person
        )
        assert answer.choices[0].message.parsed == Person(name="Ann", age=3)
        async with api.chat.completions.stream(
            model="fake-model", messages=MESSAGES, response_format=Person
        ) as stream:
            streamed = await stream.get_final_completion()
        assert streamed.choices[0].message.parsed == Person(name="Ann", age=3)
    for grammar in grammars_at(decode):
        assert matches(grammar, ANN)
        assert not matches(grammar, '{"name": "Ann", "age": "3"}')


@pytest.mark.integration
async def test_the_official_client_sends_response_formats_and_extensions(
    client: Any, decode: FakeNode
) -> None:
    formats = [schema(strict=True), {"response_format": {"type": "json_object"}}]
    extensions = [outputs(choice=["yes", "no"]), {"guided_regex": "a+"}]
    async with client() as api:
        for fields in formats:
            await api.chat.completions.create(model="fake-model", messages=MESSAGES, **fields)
        for fields in extensions:
            await api.completions.create(model="fake-model", prompt="Hi", extra_body=fields)
        with pytest.raises(openai.BadRequestError) as caught:
            await api.chat.completions.create(
                model="fake-model", messages=MESSAGES, **schema(schema={"type": "objekt"})
            )
    assert caught.value.param == "response_format"
    grammars = list(grammars_at(decode))
    expected = [(ANN, "{}"), ("{}", "[]"), ("yes", "y"), ("aa", "b")]
    for grammar, (matching, other) in zip(grammars, expected, strict=True):
        assert matches(grammar, matching)
        assert not matches(grammar, other)


# --- docs/structured-output.md --------------------------------------------------------------------

PAGE = (Path(__file__).parents[3] / "docs" / "structured-output.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.integration
async def test_the_page_s_python_examples_run_and_send_the_described_grammars(
    running: Any, decode: FakeNode
) -> None:
    decode.script.reply = b'{"name": "Ann", "born": 3}'
    async with running(decode) as router:
        blocks = [block for block in BLOCK.findall(PAGE) if "baton_engine" not in block]
        program = "\n".join(blocks).replace("http://localhost:8000", router.url)
        await asyncio.to_thread(exec, program, {"__name__": "__main__"})
    answers = ['{"name": "Ann", "born": 3}', "{}", "1909-07-25", "friendly", "1 + 22", "Rain."]
    grammars = list(grammars_at(decode))
    for number, grammar in enumerate(grammars):
        assert matches(grammar, answers[number]), answers[number]
    assert len(grammars) == len(answers)


@pytest.mark.parametrize(
    "limit",
    [
        f"{MAX_GRAMMAR_BYTES:,} bytes",
        f"| a grammar in EBNF | {MAX_EBNF_BYTES:,} bytes",
        f"| {MAX_JSON_DEPTH} |",
        f"| choices | {MAX_CHOICES:,} |",
        f"| structures and triggers, each | {MAX_STRUCTURES:,} |",
        f"{MAX_COMPILE_S:g} seconds",
        f"of one call together | {MAX_GRAMMARS_BYTES:,} bytes",
        f"The {COMPILED_KEPT} that were used last",
    ],
)
def test_the_page_states_the_limits(limit: str) -> None:
    assert limit in PAGE


def test_the_page_lists_every_form() -> None:
    for kind in KINDS:
        assert f"`structured_outputs.{kind}`" in PAGE
    for name in (*NAMES, *TYPES):
        assert f"`{name}" in PAGE, name

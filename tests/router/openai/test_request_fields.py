"""A body holds the fields of one table and no other, and the documents show that table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from baton_protocol.errors import InvalidRequest
from baton_protocol.link import DrainNode, ResumeNode, RunJob
from baton_router.http.drain import read_drain
from baton_router.http.field_docs import COMMAND, table, with_table
from baton_router.http.openapi import BODIES
from baton_router.openai.body_reader import FIELDS, MEMBERS, Body, Fields
from baton_router.openai.chat import ChatCall
from baton_router.openai.completions import CompletionCall
from tests.support.nodes.fake_node import FakeNode

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
Json = dict[str, Any]
MESSAGE: Json = {"role": "user", "content": "Hi"}
PART: Json = {"type": "text", "text": "Hi"}


def chat(**more: Any) -> None:
    ChatCall.read(Fields({"messages": [MESSAGE], **more}))


def completion(**more: Any) -> None:
    CompletionCall.read(Fields({"prompt": "Hi", **more}))


def drain(**more: Any) -> None:
    read_drain(Fields(more))


def refusal(read: Any, body: Json) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(**body)
    return caught.value


UNKNOWN: list[tuple[Any, Json, str, str]] = [
    (chat, {"nobody_knows_this": 1}, "nobody_knows_this", "leave it out"),
    (completion, {"nobody_knows_this": []}, "nobody_knows_this", "leave it out"),
    (drain, {"nobody_knows_this": 1}, "nobody_knows_this", "leave it out"),
    (chat, {"temprature": 1}, "temprature", "did you mean 'temperature'?"),
    (completion, {"max_new_tokens": 1}, "max_new_tokens", "did you mean 'max_tokens'?"),
    (drain, {"deadline": 5}, "deadline", "did you mean 'deadline_s'?"),
    (chat, {"Temperature": 0}, "Temperature", "did you mean 'temperature'?"),
    (chat, {"prompt": "Hi"}, "prompt", "but of /v1/completions"),
    (completion, {"messages": [MESSAGE]}, "messages", "but of /v1/chat/completions"),
    (completion, {"top_logprobs": 1}, "top_logprobs", "but of /v1/chat/completions"),
    (
        chat,
        {"messages": [MESSAGE, {**MESSAGE, "contents": "Hi"}]},
        "messages[1].contents",
        "did you mean 'content'?",
    ),
    (
        chat,
        {"messages": [{"role": "user", "content": [PART, {**PART, "lang": "en"}]}]},
        "messages[0].content[1].lang",
        "leave it out",
    ),
    *(
        (
            read,
            {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "did you mean 'include_usage'?",
        )
        for read in (chat, completion)
    ),
]


@pytest.mark.parametrize(("read", "body", "param", "told"), UNKNOWN)
def test_a_name_that_no_row_has_is_refused_at_each_level(
    read: Any, body: Json, param: str, told: str
) -> None:
    error = refusal(read, body)
    assert (error.param, error.reason) == (param, "unknown_parameter")
    assert repr(param) in error.message
    assert told in error.message


def without_values(value: Any, name: str) -> Any:
    """The same with null under this name."""
    if isinstance(value, dict):
        return {k: None if k == name else without_values(v, name) for k, v in value.items()}
    return [without_values(one, name) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("read", "body", "param", "told"), UNKNOWN)
def test_null_is_the_same_as_leaving_a_field_out_whatever_its_name(
    read: Any, body: Json, param: str, told: str
) -> None:
    read(**without_values(body, param.rpartition(".")[2]))


def test_an_unknown_name_of_a_megabyte_is_cut() -> None:
    """It is not compared with each field either, which would take minutes."""
    error = refusal(chat, {"temperatur" * 100_000: 1})
    assert len(error.message) < 300
    assert len(error.param or "") < 100


def test_no_name_is_told_as_a_meant_one_that_would_be_refused_then() -> None:
    assert "logits_processor" not in refusal(chat, {"logits_process": []}).message[30:]


@pytest.mark.parametrize(
    ("body", "schema"),
    [("chat", "ChatRequest"), ("completions", "CompletionRequest"), ("drain", "DrainRequest")],
)
def test_the_table_has_exactly_the_fields_that_are_read(body: Body, schema: str) -> None:
    told = BODIES[schema]
    assert set(told["properties"]) == set(MEMBERS[body, ""].fields)
    assert told["additionalProperties"] == {"type": "null"}
    for (of, path), members in MEMBERS.items():
        if of == body and path == "stream_options":
            inner = told["properties"][path]
            assert set(inner["properties"]) == set(members.fields)
            assert inner["additionalProperties"] == {"type": "null"}


def test_each_row_is_of_a_field_of_its_own_and_says_something() -> None:
    keys = [(field.name, body) for field in FIELDS for body in field.bodies]
    assert len(set(keys)) == len(keys)
    assert all(field.remark for field in FIELDS)
    for field in FIELDS:
        assert (field.does != "refused") or field.complaint.endswith("leave it out")


def test_the_page_has_the_table_that_is_generated() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), f"the table in docs/api.md is an old one; run: {COMMAND}"
    rows = re.findall(r"^\| `([^`]+)` \|", table(), re.MULTILINE)
    assert rows == [field.name for field in FIELDS]


@pytest.mark.integration
async def test_a_body_is_refused_before_anything_is_done(running: Any, decode: FakeNode) -> None:
    bodies = [
        ("/v1/chat/completions", {"messages": [MESSAGE], "temprature": 1}, "temprature"),
        ("/v1/completions", {"prompt": "Hi", "logit_bia": {}}, "logit_bia"),
        ("/nodes/decode-0/drain", {"deadlines": 1}, "deadlines"),
        ("/nodes/decode-0/resume", {"reason": "done"}, "reason"),
    ]
    async with running(decode) as client:
        for path, body, param in bodies:
            status, answer, _ = await client.post(path, body)
            assert (status, answer["error"]["code"]) == (400, "unknown_parameter")
            assert answer["error"]["param"] == param
        assert (await client.get("/pool"))[1]["nodes"][0]["state"] == "ready"
    assert decode.got_of(RunJob) == []
    assert decode.got_of(DrainNode) == decode.got_of(ResumeNode) == []

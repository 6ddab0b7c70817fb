"""Bodies accept exactly the fields of one table, and the documents show that table."""

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


@pytest.mark.parametrize(("read", "body", "param", "hint"), UNKNOWN)
def test_an_unknown_field_at_any_level_is_an_error_that_names_it(
    read: Any, body: Json, param: str, hint: str
) -> None:
    error = refusal(read, body)
    assert (error.param, error.reason) == (param, "unknown_parameter")
    assert repr(param) in error.message
    assert hint in error.message


def without_values(value: Any, name: str) -> Any:
    """The value with null for each member of this name."""
    if isinstance(value, dict):
        return {k: None if k == name else without_values(v, name) for k, v in value.items()}
    return [without_values(item, name) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("read", "body", "param", "hint"), UNKNOWN)
def test_an_unknown_field_that_is_null_is_ignored(
    read: Any, body: Json, param: str, hint: str
) -> None:
    read(**without_values(body, param.rpartition(".")[2]))


def test_an_unknown_name_of_a_megabyte_is_shortened_in_the_error() -> None:
    """It is also not compared with every field, because that would take minutes."""
    error = refusal(chat, {"temperatur" * 100_000: 1})
    assert len(error.message) < 300
    assert len(error.param or "") < 100


def test_an_unsupported_field_is_not_suggested_for_a_misspelled_one() -> None:
    assert "logits_processor" not in refusal(chat, {"logits_process": []}).message[30:]


@pytest.mark.parametrize(
    ("body", "schema"),
    [("chat", "ChatRequest"), ("completions", "CompletionRequest"), ("drain", "DrainRequest")],
)
def test_the_document_has_exactly_the_table_s_fields(body: Body, schema: str) -> None:
    documented = BODIES[schema]
    assert set(documented["properties"]) == set(MEMBERS[body, ""].fields)
    assert documented["additionalProperties"] == {"type": "null"}
    for (of, path), members in MEMBERS.items():
        if of == body and path == "stream_options":
            inner = documented["properties"][path]
            assert set(inner["properties"]) == set(members.fields)
            assert inner["additionalProperties"] == {"type": "null"}


def test_each_row_of_the_table_is_unique_and_has_a_remark() -> None:
    keys = [(field.name, body) for field in FIELDS for body in field.bodies]
    assert len(set(keys)) == len(keys)
    assert all(field.remark for field in FIELDS)
    for field in FIELDS:
        assert (field.does != "refused") or field.complaint.endswith("leave it out")


def test_the_api_page_contains_the_generated_table() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), f"the table in docs/api.md is outdated; run: {COMMAND}"
    rows = re.findall(r"^\| `([^`]+)` \|", table(), re.MULTILINE)
    assert rows == [field.name for field in FIELDS]


@pytest.mark.integration
async def test_a_body_with_an_unknown_field_has_no_effect(running: Any, decode: FakeNode) -> None:
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

"""Bodies accept exactly the fields of one table, and the documents show that table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_protocol.errors import InvalidRequest
from baton_protocol.link import DrainNode, ResumeNode, RunJob
from baton_router.http.drain import parse_drain
from baton_router.http.field_docs import (
    COMMAND,
    SECTIONS,
    documented_fields,
    sections_of,
    with_tables,
)
from baton_router.openai.fields.kinds import integer, text
from baton_router.openai.fields.table import (
    FieldTable,
    gives,
    optional,
    read_fields,
    refused,
    required,
    rule,
    schema_of,
)
from tests.router.openai.bodies import USER, Json, chat, completion, refusal
from tests.support.nodes.fake_node import FakeNode

DOCS = Path(__file__).parents[4] / "docs"


def drain(**fields: Any) -> None:
    parse_drain(msgspec.json.encode(fields))


UNKNOWN: list[tuple[Callable[..., object], Json, str, str]] = [
    (chat, {"nobody_knows_this": 1}, "nobody_knows_this", "leave it out"),
    (completion, {"nobody_knows_this": []}, "nobody_knows_this", "leave it out"),
    (drain, {"nobody_knows_this": 1}, "nobody_knows_this", "leave it out"),
    (chat, {"temprature": 1}, "temprature", "did you mean 'temperature'?"),
    (completion, {"max_new_tokens": 1}, "max_new_tokens", "did you mean 'max_tokens'?"),
    (drain, {"deadline": 5}, "deadline", "did you mean 'deadline_s'?"),
    (chat, {"Temperature": 0}, "Temperature", "did you mean 'temperature'?"),
    (chat, {"prompt": "Hi"}, "prompt", "but of /v1/completions"),
    (completion, {"messages": [USER]}, "messages", "but of /v1/chat/completions"),
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
    read: Callable[..., object], body: Json, param: str, hint: str
) -> None:
    error = refusal(read, **body)
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
    read: Callable[..., object], body: Json, param: str, hint: str
) -> None:
    read(**without_values(body, param.rpartition(".")[2]))


def test_an_unknown_name_of_a_megabyte_is_shortened_in_the_error() -> None:
    """It is also not compared with every field, because that would take minutes."""
    error = refusal(chat, **{"temperatur" * 100_000: 1})
    assert len(error.message) < 300
    assert len(error.param or "") < 100


def test_an_unsupported_field_is_not_suggested_for_a_misspelled_one() -> None:
    assert "logits_processor" not in refusal(chat, logits_process=[]).message[30:]


@pytest.mark.parametrize("table", [table for each in SECTIONS.values() for table in each.values()])
def test_each_refusal_says_what_to_do(table: type[FieldTable]) -> None:
    for name in table.REFUSED:
        with pytest.raises(InvalidRequest, match=r"leave it out$"):
            table.FIELDS[name].kind.read(name, "a value that asks for something")


def test_a_table_collects_the_rows_and_rules_of_its_bases() -> None:
    class Base(FieldTable):
        days = optional(integer(1, 14), "how many")
        humid = refused("only temperatures are known")

    class Weather(Base, route="/weather"):
        city = required(text(), "where")
        days = optional(integer(1, 3), "how many")

        @rule("days", schemas=[{"description": "no days in Oslo"}])
        def check_days(self) -> None:
            if self.city == "Oslo" and self.days is not None:
                raise InvalidRequest("no days in Oslo", param="days")

    weather = read_fields(Weather, {"city": "Paris", "days": 2.0, "humid": None})
    assert (weather.city, weather.days) == ("Paris", 2)
    assert gives(weather, "days")
    assert not gives(weather, "humid")
    assert read_fields(Weather, {"city": "Oslo"}).days is None
    for body, param in (
        ({}, "city"),
        ({"city": None}, "city"),
        ({"city": "Paris", "days": 4}, "days"),
        ({"city": "Oslo", "days": 1}, "days"),
        ({"city": "Paris", "humid": True}, "humid"),
        ({"city": "Paris", "day": 1}, "day"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            read_fields(Weather, body)
        assert caught.value.param == param
    schema = schema_of(Weather)
    assert schema["required"] == ["city"]
    assert schema["properties"]["days"]["maximum"] == 3
    assert schema["properties"]["humid"]["enum"][:2] == [None, False]
    assert schema["allOf"] == [{"description": "no days in Oslo"}]


def test_the_pages_contain_the_generated_tables() -> None:
    pages = [path.read_text() for path in DOCS.glob("*.md")]
    assert sorted(section for page in pages for section in sections_of(page)) == sorted(SECTIONS)
    for page in pages:
        assert page == with_tables(page), f"a table of fields is outdated; run: {COMMAND}"
    for section in SECTIONS:
        assert all(documented.definitions for documented in documented_fields(section))


@pytest.mark.integration
async def test_a_body_with_an_unknown_field_has_no_effect(running: Any, decode: FakeNode) -> None:
    bodies = [
        ("/v1/chat/completions", {"messages": [USER], "temprature": 1}, "temprature"),
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

"""The OpenAPI document agrees with the parsers: each field, each bound, each route."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from baton_protocol.errors import InvalidRequest
from baton_router.http.app import build_app
from baton_router.http.drain import read_drain
from baton_router.http.openapi import BODIES, OPERATIONS, document
from baton_router.openai.body_reader import Fields
from baton_router.openai.chat import ChatCall
from baton_router.openai.completions import CompletionCall
from baton_router.openai.endpoint import MAX_TOKENS_NAMES, check_alone
from baton_router.openai.tools import MAX_NAME
from tests.router.openai.schema_edges import edges
from tests.support.nodes.fake_node import FakeNode

MAX_INT = (1 << 63) - 1
REQUIRED_FIELDS: dict[str, dict[str, Any]] = {
    "ChatRequest": {"messages": [{"role": "user", "content": "x"}]},
    "CompletionRequest": {"prompt": "x"},
    "DrainRequest": {},
}
TOOLS = {"tools": [{"type": "function", "function": {"name": "x" * MAX_NAME}}]}
# Fields that another field requires for its whole range of values.
REQUIRED_BESIDE: dict[str, dict[str, Any]] = {
    "min_tokens": {"max_tokens": MAX_INT},
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "tool_choice": TOOLS,
    "parallel_tool_calls": TOOLS,
}


def read_generation(parse: Callable[[Fields], Any]) -> Callable[[Fields], object]:
    def read(fields: Fields) -> None:
        call = parse(fields)
        check_alone(call.sampling, call.default_max_tokens)

    return read


READERS: dict[str, Callable[[Fields], object]] = {
    "ChatRequest": read_generation(ChatCall.read),
    "CompletionRequest": read_generation(CompletionCall.read),
    "DrainRequest": read_drain,
}


def fields_of_bodies() -> Iterator[tuple[str, str]]:
    """All fields except messages and prompts, which have more than one bound."""
    for body, schema in BODIES.items():
        for field in schema["properties"]:
            if field not in REQUIRED_FIELDS[body]:
                yield body, field


class RecordingBody(dict[str, Any]):
    """A body that records which fields are read."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        seen = self.seen

        class Keys(set[str]):
            def isdisjoint(self, names: Iterable[Any], /) -> bool:
                seen.update(names)
                return super().isdisjoint(names)

        return Keys(super().keys())


@pytest.mark.parametrize("name", BODIES)
def test_the_document_has_exactly_the_fields_that_are_read(name: str) -> None:
    seen: set[str] = set()
    variants: list[dict[str, Any]] = [{}]
    if name != "DrainRequest":
        variants += [{"max_completion_tokens": 5}, {"stream": True, "n": 2, "logprobs": None}]
    for more in variants:
        body = RecordingBody(REQUIRED_FIELDS[name] | more)
        READERS[name](Fields(body))
        seen |= body.seen
    assert seen == set(BODIES[name]["properties"])
    assert all(BODIES[name]["properties"].values())
    assert BODIES[name].get("required", []) == list(REQUIRED_FIELDS[name])


@pytest.mark.parametrize(("name", "field"), list(fields_of_bodies()))
def test_a_value_at_a_bound_is_accepted_and_one_beyond_is_refused_by_name(
    name: str, field: str
) -> None:
    def read(value: Any) -> None:
        related = {"n": value} if field == "best_of" else REQUIRED_BESIDE.get(field, {})
        if name == "CompletionRequest" and field in MAX_TOKENS_NAMES and value == 0:
            related = {"echo": True}
        READERS[name](Fields(REQUIRED_FIELDS[name] | related | {field: value}))

    schema = BODIES[name]["properties"][field]
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


# Errors in these fields may name other members instead.
NAMED_INSTEAD = {"stream_options": ("include_usage", "continuous_usage_stats"), "best_of": ("n",)}


def test_numbers_and_lists_are_bounded_on_both_sides() -> None:
    for name, field in fields_of_bodies():
        schema = BODIES[name]["properties"][field]
        kinds = schema.get("type", [])
        if "integer" in kinds or ("number" in kinds and field != "deadline_s"):
            assert "minimum" in schema, field
            assert "maximum" in schema, field
        if "array" in kinds:
            assert "maxItems" in schema, field


@pytest.mark.integration
async def test_the_document_describes_exactly_the_routes(running: Any, decode: FakeNode) -> None:
    async with running(decode) as client:
        app = build_app(client.router.api)
        status, served, _ = await client.get("/openapi.json")
    routes = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert routes == {(operation.method, operation.path) for operation in OPERATIONS}
    assert (status, served) == (200, document())
    names = [operation.name for operation in OPERATIONS]
    assert len(set(names)) == len(names)


@pytest.mark.integration
async def test_exactly_the_documented_routes_require_a_key(
    running: Any, decode: FakeNode, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme sk-key-of-acme\n")
    needs_key: dict[str, bool] = {}
    async with running(decode, api_keys=str(keys)) as client:
        for operation in OPERATIONS:
            url = client.url + re.sub(r"{\w+}", "x", operation.path)
            async with client.session.request(operation.method, url) as response:
                needs_key[operation.name] = response.status == 401
    documented = {operation.name: operation.json()["security"] for operation in OPERATIONS}
    assert documented == {
        name: [{"key": []}, {}] if needed else [] for name, needed in needs_key.items()
    }
    assert set(needs_key.values()) == {True, False}


def test_every_reference_resolves_and_every_schema_is_valid_and_used() -> None:
    openapi = document()
    schemas = openapi["components"]["schemas"]
    text = str(openapi)
    assert set(re.findall(r"#/components/schemas/(\w+)", text)) <= set(schemas)
    for name, schema in schemas.items():
        jsonschema_rs.meta.validate(schema)
        assert f"#/components/schemas/{name}" in text, f"{name} is used nowhere"


def test_every_documented_status_is_in_the_api_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    table = page[page.index("\n## Errors") : page.index("\n## Metrics")]
    statuses = {status for each in OPERATIONS for status in each.json()["responses"]} - {"200"}
    assert {status for status in statuses if not re.search(rf"\b{status}\b", table)} == set()

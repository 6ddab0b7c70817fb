"""The OpenAPI document agrees with the application: each route, status, key and schema."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from baton_router.http.app import build_app
from baton_router.http.openapi import document
from baton_router.http.openapi_operations import OPERATIONS
from tests.support.nodes.fake_node import FakeNode


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
    statuses = {status for operation in OPERATIONS for status in operation.json()["responses"]} - {
        "200"
    }
    assert {status for status in statuses if not re.search(rf"\b{status}\b", table)} == set()

"""The OpenAPI document that a running router serves passes two third-party linters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton_router.http.openapi import document
from baton_router.server.router import Router
from baton_router.settings import RouterSettings
from tests.support.needs import needs
from tests.support.nodes.fake_node import FakeNode
from tests.support.project.api_linters import LINTERS, complaints

Json = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def npm() -> None:
    needs("npm")


@pytest.fixture
async def served(tmp_path: Path) -> Path:
    """The document of a running router, as a file."""
    file = tmp_path / "openapi.json"
    async with (
        FakeNode("decode-0", "decode") as node,
        Router(RouterSettings(port=0, nodes=(node.address,))) as router,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{router.port}/openapi.json") as response,
    ):
        assert response.status == 200
        file.write_text(await response.text())
    return file


@pytest.mark.parametrize("linter", LINTERS)
def test_the_linter_has_no_complaint_about_the_served_document(served: Path, linter: str) -> None:
    assert complaints(linter, served) == ""


def _remove_security(openapi: Json) -> None:
    del openapi["paths"]["/health"]["get"]["security"]


def _remove_tags(openapi: Json) -> None:
    del openapi["paths"]["/health"]["get"]["tags"]


@pytest.mark.parametrize(
    ("linter", "degrade", "rule"),
    [
        ("redocly", _remove_security, "security-defined"),
        ("spectral", _remove_tags, "operation-tags"),
    ],
)
def test_the_linter_names_the_rule_that_a_degraded_document_breaks(
    tmp_path: Path, linter: str, degrade: Callable[[Json], None], rule: str
) -> None:
    openapi = document()
    degrade(openapi)
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(openapi))
    assert rule in complaints(linter, file)

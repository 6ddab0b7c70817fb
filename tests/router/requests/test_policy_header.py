"""The header x-baton-policy: a request chooses its placement policy if the router allows it."""

from __future__ import annotations

from typing import Any

import pytest

from baton_router.requests.dispatcher import Dispatcher
from baton_router.requests.in_flight import InFlightRequest
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode

pytestmark = pytest.mark.integration

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "x" * 20, "max_tokens": 1}


async def rankings(
    client: pools.Client, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> tuple[int, list[Any]]:
    """Post one call: the answer's status, and the policy of each placement."""
    seen: list[Any] = []
    launch = Dispatcher._launch

    def record(self: Dispatcher, request: InFlightRequest, stored: Any) -> None:
        seen.append(self._placer._policy_of(request).ranking)
        launch(self, request, stored)

    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "_launch", record)
        status, _, _ = await client.post(COMPLETIONS, BODY, headers)
    return status, seen


async def test_the_policy_header_counts_only_if_the_router_allows_it(
    decode: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"x-baton-policy": "round-robin"}
    async with pools.running(decode, allow_policy_header=True, placement="random") as client:
        assert await rankings(client, monkeypatch, headers) == (200, ["round-robin"])
        assert await rankings(client, monkeypatch, {}) == (200, ["random"])
    async with pools.running(decode) as client:
        assert await rankings(client, monkeypatch, headers) == (200, ["cost"])
        assert await rankings(client, monkeypatch, {"x-baton-policy": "best"}) == (200, ["cost"])


async def test_an_unknown_policy_is_a_400_that_lists_the_policies(decode: FakeNode) -> None:
    async with pools.running(decode, allow_policy_header=True) as client:
        headers = {"x-baton-policy": "best"}
        status, body, _ = await client.post(COMPLETIONS, BODY, headers)
        assert (status, body["error"]["param"]) == (400, "x-baton-policy")
        assert body["error"]["message"] == (
            "x-baton-policy is 'best'; use cost, random, round-robin, least-request, prefix"
        )

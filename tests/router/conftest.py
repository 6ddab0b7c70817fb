"""Fixtures: fake nodes, and a router on a free port that is connected to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tests.router import pools
from tests.support.nodes.fake_node import FakeNode


@pytest.fixture
def running() -> Callable[..., AbstractAsyncContextManager[pools.Client]]:
    """`pools.running`."""
    return pools.running


@pytest.fixture
async def decode() -> AsyncIterator[FakeNode]:
    async with FakeNode("decode-0", "decode") as node:
        yield node


@pytest.fixture
async def prefill() -> AsyncIterator[FakeNode]:
    async with FakeNode("prefill-0", "prefill") as node:
        yield node


@pytest.fixture
async def other() -> AsyncIterator[FakeNode]:
    """A second decode node."""
    async with FakeNode("decode-1", "decode") as node:
        yield node

"""Fixtures: a router on a free port, connected to fake nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.router import pools
from tests.support.nodes.fake_node import FakeNode


@pytest.fixture
def running() -> pools.Running:
    return pools.running


@pytest.fixture
def half_answered() -> pools.RunningRequest:
    return pools.half_answered


@pytest.fixture
def handing_off() -> pools.RunningRequest:
    return pools.handing_off


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

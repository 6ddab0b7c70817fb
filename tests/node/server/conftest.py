"""A node's request table without sockets and engine."""

import pytest

from tests.support.nodes.request_tables import TableNode


@pytest.fixture
def node() -> TableNode:
    return TableNode()

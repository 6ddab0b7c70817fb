"""A Redis for the tests of what the operator reads from an index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operator.index_servers import redis_server


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with redis_server(tmp_path) as port:
        yield f"redis://127.0.0.1:{port}"

"""Where a run keeps the tests that it has collected, also those that -m leaves out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

COLLECTED = pytest.StashKey[Sequence[pytest.Item]]()

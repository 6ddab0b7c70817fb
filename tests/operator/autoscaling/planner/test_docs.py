"""docs/operations/scale.md has the table of reasons that the code generates."""

from __future__ import annotations

import re
from pathlib import Path

from baton_operator.autoscaling.planner.reasons import table

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "operations" / "scale.md").read_text()


def test_the_reasons_in_the_docs_are_the_generated_ones() -> None:
    found = re.search(
        r"^## Why the pool has as many nodes as it has\n(.*?)(?=^## |\Z)",
        PAGE,
        re.MULTILINE | re.DOTALL,
    )
    assert found is not None
    assert table() in found[1], (
        "regenerate them: python -m baton_operator.autoscaling.planner.reasons"
    )

"""A path counted in `parents` breaks silently when its file moves, so each one is checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    *("benchmarks", "cli", "decode_node", "docs", "engine", "kvstore", "models", "node"),
    *("operator", "prefill_node", "protocol", "router", "tests", "text"),
)
COUNTED = re.compile(r'\.parents\[(\d+)\]((?: / (?:"[^"]*"|BASE))*)')
FROM_FILE = re.compile(r"Path\(__file__\)(?:\.resolve\(\))?\Z")
NAME = re.compile(r'"([^"]*)"')
# Made by what reads them, so they need not be there.
MADE = {".pytest_cache"}
SOURCES = [
    path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    if path != Path(__file__) and ".parents[" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_path_counted_from_a_file_exists(source: Path) -> None:
    text = source.read_text(encoding="utf-8")
    found = list(COUNTED.finditer(text))
    assert len(found) == text.count(".parents[")
    for match in found:
        assert FROM_FILE.search(text[: match.start()]), f"count from __file__: {match.group()}"
        folder = source.parents[int(match.group(1))]
        assert folder.is_relative_to(ROOT)
        names = NAME.findall(match.group(2))
        if not MADE & set(names):
            assert folder.joinpath(*names).exists(), match.group()
        if not names:
            assert folder == ROOT, f"{match.group()} is {folder}"

"""The pictures of the live page show the page as it is now, are small, and are in a document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.project.page_digest import DIGEST, PICTURES, ROOT, page_digest

MOST_BYTES = 150_000
IMAGE = re.compile(r"!\[[^]]+\]\(([^)\s]+\.png)\)")
FILES = sorted(PICTURES.glob("*.png"))


def test_the_pictures_are_of_the_page_as_it_is() -> None:
    assert DIGEST.read_text().strip() == page_digest(), "run `make pictures`"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_picture_is_small(path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES


def test_each_picture_is_in_a_document() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        (document.parent / target).resolve()
        for document in documents
        for target in IMAGE.findall(document.read_text())
    }
    assert set(FILES) <= shown
    assert len(FILES) == 3

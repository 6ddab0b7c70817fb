"""`make docs` builds the site from docs/ without a warning, so every link in it resolves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_every_page_is_on_the_site(site: Path) -> None:
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).with_suffix("") for path in docs.rglob("*.md")}
    built = {path.relative_to(site).parent for path in site.rglob("index.html")}
    assert pages - {Path("index")} == built - {Path()}


def test_a_tested_block_is_shown_as_a_code_block(site: Path) -> None:
    assert '<code class="language-sh">baton --help' in (
        site / "operations" / "run" / "index.html"
    ).read_text(encoding="utf-8")


def test_a_link_to_a_file_outside_the_docs_is_its_text(site: Path) -> None:
    page = (site / "kubernetes" / "index.html").read_text(encoding="utf-8")
    assert "see node/Dockerfile" in page

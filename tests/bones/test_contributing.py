"""The worked examples of CONTRIBUTING.md: each patch applies to a copy of the repository, and its
Python block runs there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    *("protocol", "text", "kvstore", "engine", "node", "prefill_node", "decode_node"),
    *("router", "operator", "cli"),
)
EXAMPLE = re.compile(r"^### (Add .*?)\n(.*?)(?=^### |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = r"^```{}\n(.*?)^```$"
EXAMPLES = dict(EXAMPLE.findall((ROOT / "CONTRIBUTING.md").read_text()))


def block(example: str, language: str) -> str:
    [text] = re.findall(BLOCK.format(language), EXAMPLES[example], re.MULTILINE | re.DOTALL)
    return str(text)


def apply(patch: str, folder: Path) -> dict[Path, str | None]:
    """Apply a patch without line numbers; each hunk must match exactly one place of its file.
    Return what each file was, None if it was not there."""
    before_patch: dict[Path, str | None] = {}
    for part in re.split(r"^--- ", patch, flags=re.MULTILINE)[1:]:
        header, *hunks = part.split("@@\n")
        old, new = header.splitlines()
        path = folder / new.removeprefix("+++ b/")
        before_patch[path] = None if old == "/dev/null" else path.read_text()
        if old == "/dev/null":
            path.parent.mkdir(exist_ok=True)
            path.write_text("")
        text = path.read_text()
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] in " -")
            after = "".join(line[1:] for line in lines if line[0] in " +")
            assert text.count(before) == 1, f"{path.name}: {before}"
            text = text.replace(before, after)
        path.write_text(text)
    return before_patch


@pytest.fixture(scope="module")
def whole_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    for name in (*ROOMS, "tests/support", "tests/operator/golden"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


@pytest.fixture
def changed(example: str, whole_copy: Path) -> Iterator[Path]:
    """A copy of the files that the examples change or import, with the patch of this example."""
    before_patch = apply(block(example, "diff"), whole_copy)
    yield whole_copy
    for path, text in before_patch.items():
        if text is None:
            path.unlink()
        else:
            path.write_text(text)


def test_contributing_has_an_example_of_each_kind() -> None:
    kinds = (
        *("placement policy", "field of the API", "condition", "field of the spec"),
        *("tool parser", "model family"),
    )
    assert [name.split(maxsplit=2)[2] for name in EXAMPLES] == list(kinds)


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_worked_example_applies_and_does_what_it_says(example: str, changed: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(str(changed / room) for room in ROOMS)}
    done = subprocess.run(
        [sys.executable, "-c", block(example, "python")],
        cwd=changed,
        env=environ,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr

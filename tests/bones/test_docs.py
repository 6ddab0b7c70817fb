"""The documents say what is so: their commands run, links lead somewhere, lists are full.

Blocks fenced as "sh test" are run: with `baton` on the PATH, and $URL naming a running pool.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_protocol import errors
from tests.support.pool import Pool

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```sh test\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)\)")


def blocks() -> list[tuple[str, str]]:
    return [
        (f"{path.name}-{number}", block)
        for path in DOCUMENTS
        for number, block in enumerate(BLOCK.findall(path.read_text()))
    ]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Pool(["--engine", "sim"]) as pool:
        yield pool.url


@pytest.mark.parametrize(("name", "block"), blocks(), ids=lambda value: value[:24])
def test_a_documented_command_works(name: str, block: str, url: str, tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=tmp_path,
        env={**environ, "URL": url, "BATON_PORT": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
    # curl is content with an error's body.
    assert '"error"' not in done.stdout, f"{name}: {done.stdout}"


def test_some_commands_are_tested() -> None:
    assert len(blocks()) >= 4


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{path.name}: {target}"
        for path in DOCUMENTS
        for target in LINK.findall(path.read_text())
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert broken == []


def test_every_error_code_is_explained() -> None:
    text = (ROOT / "docs" / "reason-codes.md").read_text()
    for kind in _kinds(errors.BatonError):
        assert f"| {kind.status} | `{kind.code}` |" in text, kind.__name__


def test_every_placement_reason_is_explained() -> None:
    import typing

    from baton_router.placement import Reason

    text = (ROOT / "docs" / "reason-codes.md").read_text()
    for reason in typing.get_args(Reason):
        assert f"| `{reason}` |" in text


def test_every_room_has_its_sentence_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    for folder in ROOT.iterdir():
        if folder.is_dir() and not folder.name.startswith((".", "__")) and any(folder.rglob("*")):
            assert f"`{folder.name}/" in text or f"({folder.name}/" in text, folder.name


def _kinds(base: type[errors.BatonError]) -> list[type[errors.BatonError]]:
    found = []
    for kind in base.__subclasses__():
        if kind.__module__ == "baton_protocol.errors":
            found += [kind, *_kinds(kind)]
    return found

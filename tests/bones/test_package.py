"""The wheel for a package registry: its metadata, page and bytes; and the chart's metadata."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree
from zipfile import ZipFile

import pytest
import yaml

from baton_router.page.asset_table import read_assets
from tests.support.needs import needs
from tests.support.project.dockerfiles import in_context
from tests.support.project.wheel import ROOT, build_wheel

LINK = re.compile(r"\]\(([^)\s]+)\)")


def run(*args: str) -> str:
    """The command's output. A failed command fails the test."""
    # If make runs these tests, its own flags are in the environment.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        args, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long  # `make check` does the same
def test_deptry_and_pyroma_pass_as_make_check_runs_them() -> None:
    """deptry checks that every import is declared, pyroma that the metadata is complete."""
    needs("make")
    planned = re.findall(r"^\S+/(deptry|pyroma) (.*)$", run("make", "-n", "check"), re.MULTILINE)
    assert [name for name, _ in planned] == ["deptry", "deptry", "pyroma"]
    for name, args in planned:
        run(str(Path(sys.executable).with_name(name)), *args.split())


@pytest.mark.integration
def test_package_and_chart_name_the_same_authors_and_no_address(package: Distribution) -> None:
    chart = yaml.safe_load((ROOT / "charts/baton/Chart.yaml").read_text())
    authors = package.metadata.get_all("Author", [])
    assert authors
    assert chart["maintainers"] == [{"name": name} for name in authors]
    assert {"Home-page", "Project-URL", "Author-email"} & {*package.metadata} == set()
    assert {"home", "sources"} & {*chart} == set()


def test_nothing_names_a_page_or_a_mailbox_of_the_api_group_s_domain() -> None:
    """Nobody answers there: the domain is only part of names in Kubernetes."""
    rooms = [one for one in ROOT.iterdir() if one.is_dir() and not one.name.startswith(".")]
    files = [*ROOT.glob("*.*"), *(path for room in rooms for path in room.rglob("*.*"))]
    kinds = {".md", ".py", ".toml", ".tpl", ".txt", ".yaml", ".yml"}
    address = re.compile(r"(?:https?://|@)(?:[\w-]+\.)*baton\.dev")
    read = [path for path in files if path.suffix in kinds and path.is_file()]
    assert len(read) > 1000
    assert [path for path in read if address.search(path.read_text(errors="replace"))] == []


def test_the_chart_s_icon_is_an_embedded_svg() -> None:
    chart = yaml.safe_load((ROOT / "charts/baton/Chart.yaml").read_text())
    kind, _, picture = chart["icon"].partition(",")
    assert kind == "data:image/svg+xml"
    assert ElementTree.fromstring(unquote(picture)).tag == "{http://www.w3.org/2000/svg}svg"


def test_a_page_of_the_readme_alone_has_its_absolute_links_only(package: Distribution) -> None:
    """Others lead to files of the repository, and tests/bones/test_docs.py checks their targets."""
    written = LINK.findall((ROOT / "README.md").read_text())
    shown = LINK.findall(package.metadata["Description"])
    assert any("://" not in link for link in written)
    assert shown == [link for link in written if "://" in link]
    assert "see quick start." in package.metadata["Description"]


@pytest.mark.integration
def test_each_package_of_the_wheel_is_marked_as_typed(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if name.startswith("baton_")}
    packages = {name for name in packages if not name.endswith(".dist-info")}
    assert len(packages) == 10
    assert {name for name in packages if f"{name}/py.typed" not in names} == set()


@pytest.mark.integration
def test_the_wheel_has_the_files_of_the_live_page(wheel: Path) -> None:
    folder, zipped = "baton_router/page/assets/", ZipFile(wheel)
    packed = {
        name.removeprefix(folder): zipped.read(name)
        for name in zipped.namelist()
        if name.startswith(folder)
    }
    assert packed == {name: asset.plain for name, asset in read_assets().items()}


@pytest.mark.integration
def test_the_wheel_has_the_same_bytes_in_an_image_and_in_a_checkout(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not depend on the files' times and modes, nor on other files beside them."""
    patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]

    def left_out(folder: str, names: Iterable[str]) -> list[str]:
        inside = Path(folder).relative_to(ROOT)
        return [name for name in names if not in_context(patterns, str(inside / name))]

    context = tmp_path / "context"
    shutil.copytree(ROOT, context, ignore=left_out)
    for path in context.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
        os.utime(path, (1_000_000_000, 1_000_000_000))
    [second] = set(re.findall(r"SOURCE_DATE_EPOCH=(\d+)", (ROOT / "node/Dockerfile").read_text()))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", second)
    assert build_wheel(tmp_path / "wheel", context).read_bytes() == wheel.read_bytes()

"""The documents are true: their commands run, their links resolve, their lists are complete.

This module runs the blocks fenced as "sh test", with `baton` on the PATH and $URL naming a running
pool. tests/cluster/test_node_docs.py runs those fenced as "sh cluster".
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton_cli.commands.up import reserve_port
from baton_cli.local_pool.machine import decide_dtype
from baton_cli.options.flag import flags_of
from baton_cli.options.records import CommonOptions, NodeOptions, RouterOptions
from baton_engine.config.model_config import compute_dtype
from baton_operator.autoscaling.planner.reasons import ScalingReason
from baton_operator.metrics import Metrics
from baton_protocol import errors
from baton_router.placement.placement import PlacementReason
from baton_router.requests.attempt import Cause
from baton_router.settings import RequestSettings
from baton_text.parsers.registry import TOOL_PARSERS
from tests.support.clients.http import exchange, text_of
from tests.support.pools.baton_up import Pool

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPERATIONS = sorted((ROOT / "docs" / "operations").glob("*.md"))
BLOCK = re.compile(r"^```sh test\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"^\| `(--[a-z-]+)` \| `?([^`|]+?)`? \|", re.MULTILINE)
METRIC = re.compile(r"`(baton_(?!operator_)\w+_(?:total|seconds|ready))`")
OPERATOR_METRIC = re.compile(r"`(baton_operator_\w+)`")
CODE = re.compile(r'(?:\bcode=|\b4\d\d: )"([a-z_]+)"')
ROW = re.compile(r"^\| ([45]\d\d) \| `([a-z_]+)` \|", re.MULTILINE)
ROOMS = (
    *("protocol", "text", "kvstore", "engine", "node", "prefill_node", "decode_node"),
    *("router", "operator", "cli"),
)
ANSWERING = ("router", "node", "prefill_node", "decode_node")
SOURCES = [path for room in ANSWERING for path in sorted((ROOT / room).rglob("*.py"))]
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
ELEMENT_ID = re.compile(r'<a id="([a-z-]+)"></a>')
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    return [
        (f"{path.parent.name}/{path.name}-{number}", block)
        for path in DOCUMENTS
        for number, block in enumerate(BLOCK.findall(path.read_text()))
    ]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Pool(["--engine", "sim"]) as pool:
        yield pool.url


@pytest.mark.integration
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
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
    # curl exits with 0 on an HTTP error.
    assert '"error":{' not in done.stdout, f"{name}: {done.stdout}"


def test_the_documents_hold_tested_commands() -> None:
    assert len(blocks()) >= 4


def test_links_between_documents_resolve_to_pages_and_headings() -> None:
    broken = []
    others = [*ROOT.glob("*.md"), *(ROOT / room / "README.md" for room in ROOMS)]
    for path in dict.fromkeys([*DOCUMENTS, *sorted(others)]):
        for link in LINK.findall(FENCED.sub("", path.read_text())):
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            if "://" in link or (target.exists() and (not anchor or anchor in _anchors(target))):
                continue
            broken.append(f"{path.relative_to(ROOT)}: {link}")
    assert broken == []


def test_every_error_code_is_explained() -> None:
    text = (ROOT / "docs" / "reason-codes.md").read_text()
    for kind in _kinds(errors.BatonError):
        assert f"| {kind.status} | `{kind.code}` |" in text, kind.__name__


def test_every_error_code_in_the_sources_is_documented() -> None:
    """Including codes that no error class declares."""
    text = (ROOT / "docs" / "reason-codes.md").read_text()
    codes = {code for path in SOURCES for code in CODE.findall(path.read_text())}
    assert {"model_not_found", "draining", "history_lost"} <= codes
    assert {code for code in codes if f"`{code}`" not in text} == set()


def test_every_row_of_the_error_table_is_an_existing_error() -> None:
    text = (ROOT / "docs" / "reason-codes.md").read_text()
    classes = {(str(kind.status), kind.code) for kind in _kinds(errors.BatonError)}
    named = {code for path in SOURCES for code in CODE.findall(path.read_text())}
    rows = ROW.findall(text)
    assert len(rows) > 15
    assert {row for row in rows if row not in classes and row[1] not in named} == set()
    assert len({code for _, code in rows}) == len(rows)


def test_every_client_error_names_an_existing_section() -> None:
    named = {code for path in SOURCES for code in CODE.findall(path.read_text())}
    rows = ROW.findall((ROOT / "docs" / "reason-codes.md").read_text())
    client_errors = {code for status, code in rows if status.startswith("4")}
    prose = {"foreign_origin", "foreign_host", "admin_key_required"}
    prose |= {"model_not_found", "request_not_found"}
    assert (client_errors | prose) - errors.SECTIONS.keys() == set()
    classes = {kind.code for kind in _kinds(errors.BatonError)}
    assert errors.SECTIONS.keys() <= named | classes
    for code, section in errors.SECTIONS.items():
        page, _, anchor = section.partition("#")
        assert anchor in _anchors(ROOT / errors.DOCS / page), f"{code}: {section}"


def test_no_advice_names_what_the_engine_lacks() -> None:
    """The README's comparison says that it lacks it, with its "no" in bold; the page about vLLM's
    flags with "none"."""
    lacking = re.compile(r"tensor[- ]parallel", re.IGNORECASE)
    advice = [line for reason in ScalingReason for line in (reason.meaning, reason.remedy)]
    pages = [line for path in DOCUMENTS for line in path.read_text().splitlines()]
    found = [line for line in (*advice, *pages) if lacking.search(line)]
    assert [line for line in found if "**no**" not in line and "| none |" not in line] == []


def test_the_page_on_tools_lists_every_parser_of_calls() -> None:
    page = (ROOT / "docs" / "tools.md").read_text()
    rows = page.partition("| `--tool-parser` |")[2].partition("\n\n")[0].splitlines()
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(TOOL_PARSERS)


@pytest.mark.parametrize(
    ("dtype", "alone", "in_a_pool"),
    [
        ("float32", "float32", "float32"),
        ("float16", "float32", "bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_the_help_of_dtype_says_what_auto_is(dtype: str, alone: str, in_a_pool: str) -> None:
    checkpoint: Any = SimpleNamespace(dtype=dtype)
    assert compute_dtype(checkpoint, "auto") == alone
    assert decide_dtype("auto", "cuda", {"dtype": dtype}, frozenset()) == in_a_pool
    [text] = {flag.help for flag in flags_of(NodeOptions) if flag.option == "--dtype"}
    assert "the checkpoint's, float32 for float16" in text
    assert "of `baton up`: bfloat16 if the device computes in it" in text


def test_every_placement_reason_is_explained() -> None:
    text = (ROOT / "docs" / "reason-codes.md").read_text()
    for reason in typing.get_args(PlacementReason):
        assert f"| `{reason}` |" in text


def test_every_cause_of_a_further_attempt_is_explained() -> None:
    text = "".join(path.read_text() for path in OPERATIONS)
    for cause in _literals(Cause):
        assert f"`{cause}`" in text, cause


def test_failure_flags_are_documented_with_their_defaults() -> None:
    documented = dict(FLAG.findall("".join(path.read_text() for path in OPERATIONS)))
    known = [*flags_of(RouterOptions), *flags_of(NodeOptions)]
    assert documented == {
        item.option: item.show(item.default) or "none"
        for item in known
        if item.option in documented
    }
    common = {item.name for item in flags_of(CommonOptions)} | {"handoff", "handoff_min_tokens"}
    serving = {item.option for item in flags_of(RequestSettings) if item.name not in common}
    assert serving < documented.keys()


@pytest.mark.integration
def test_every_documented_metric_is_on_a_metrics_page(url: str) -> None:
    pages = text_of(url, "/metrics")
    for node in exchange(url, "/pool").body["nodes"]:
        if node["state"] == "ready":  # a documented command kills a node
            pages += text_of(node["address"], "/metrics")
    documented = {name for path in DOCUMENTS for name in METRIC.findall(path.read_text())}
    assert len(documented) > 10
    assert {name for name in documented if name not in pages} == set()


@pytest.mark.integration
def test_every_router_metric_is_documented(url: str) -> None:
    text = "".join(path.read_text() for path in DOCUMENTS)
    metrics = set(
        re.findall(r"^# TYPE (baton_router_\w+) ", text_of(url, "/metrics"), re.MULTILINE)
    )
    metrics = {name for name in metrics if not name.endswith("_created")}
    assert {name for name in metrics if name not in text} == set()


@pytest.mark.integration
def test_the_documents_name_exactly_the_operator_s_metrics() -> None:
    with reserve_port("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
    stop = Metrics().serve("127.0.0.1", port)
    page = text_of(f"http://127.0.0.1:{port}", "/metrics")
    stop()
    metrics = set(re.findall(r"^# TYPE (baton_operator_\w+) ", page, re.MULTILINE))
    documented = {name for path in DOCUMENTS for name in OPERATOR_METRIC.findall(path.read_text())}
    assert documented == {name for name in metrics if not name.endswith("_created")}


def test_the_readme_names_every_top_level_folder() -> None:
    text = (ROOT / "README.md").read_text()
    for folder in ROOT.iterdir():
        if folder.is_dir() and not folder.name.startswith((".", "__")) and any(folder.rglob("*")):
            assert f"`{folder.name}/" in text or f"({folder.name}/" in text, folder.name


@pytest.mark.parametrize("room", ROOMS)
def test_a_package_s_readme_fits_on_a_screen_and_names_its_folders(room: str) -> None:
    text = (ROOT / room / "README.md").read_text()
    assert len(text.splitlines()) <= 45
    folders = {path.parent.name for path in (ROOT / room / f"baton_{room}").glob("*/__init__.py")}
    assert {folder for folder in folders if f"`{folder}/`" not in text} == set()
    for name in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
        assert any((base / name).exists() for base in (ROOT / room / f"baton_{room}", ROOT)), name


@pytest.mark.parametrize("name", ["benchmarks", "tests"])
def test_the_readme_of_the_tests_and_of_the_benchmarks_names_each_folder(name: str) -> None:
    text = (ROOT / name / "README.md").read_text()
    assert len(text.splitlines()) <= 45
    folders = {
        path.name
        for path in (ROOT / name).iterdir()
        if path.is_dir() and not path.name.startswith((".", "__"))
    }
    assert {folder for folder in folders if f"`{folder}/`" not in text} == set()
    for file in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
        assert (ROOT / name / file).exists(), file


def _anchors(page: Path) -> set[str]:
    """All valid fragments of links to this page."""
    text = FENCED.sub("", page.read_text())
    return {_anchor(one) for one in HEADING.findall(text)} | set(ELEMENT_ID.findall(text))


def _anchor(heading: str) -> str:
    """The fragment that GitHub gives to this heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _literals(hint: Any) -> tuple[str, ...]:
    """The strings of a Literal, or of a union of Literals."""
    parts = typing.get_args(hint)
    return tuple(
        text for part in parts for text in ((part,) if isinstance(part, str) else _literals(part))
    )


def _kinds(base: type[errors.BatonError]) -> list[type[errors.BatonError]]:
    kinds = []
    for kind in base.__subclasses__():
        if kind.__module__ == "baton_protocol.errors":
            kinds += [kind, *_kinds(kind)]
    return kinds

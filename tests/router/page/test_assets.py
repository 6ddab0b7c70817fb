"""The live page's files: small, complete, without anything that its Content-Security-Policy
forbids, and without text that is read as HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import baton_router

ASSETS = Path(baton_router.__file__).parent / "page" / "assets"
FILES = sorted(ASSETS.iterdir())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
MOST_BYTES = 150_000
IMPORT = re.compile(r'^import .* from "\./([\w.]+)";$', re.MULTILINE)
# Ways by which text becomes HTML, code or a stylesheet.
READ_AS_CODE = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\(|"
    r"new Function|createContextualFragment|\.cssText|javascript:"
)
OTHER_HOST = re.compile(r"""["'(]\s*(?:https?:)?//[a-z]""")


class Tags(HTMLParser):
    """The elements of a document, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def elements() -> list[tuple[str, dict[str, str | None]]]:
    return Tags((ASSETS / "index.html").read_text()).elements


def test_the_whole_page_is_under_150_kilobytes() -> None:
    assert sum(path.stat().st_size for path in FILES) < MOST_BYTES


def test_the_page_has_no_inline_script_and_no_inline_style() -> None:
    for tag, attributes in elements():
        assert tag != "style"
        assert tag != "script" or attributes.get("src"), attributes
        assert [name for name in attributes if name == "style" or name.startswith("on")] == []


def test_the_page_loads_its_own_files_only_by_relative_addresses() -> None:
    named = {
        attributes[name]
        for _, attributes in elements()
        for name in ("src", "href")
        if name in attributes
    }
    files = {address for address in named if address and not address.startswith("#")}
    assert files <= {f"page/{path.name}" for path in FILES}
    for path in FILES:
        namespace = path.read_text().replace('"http://www.w3.org/2000/svg"', '""')
        assert OTHER_HOST.findall(namespace) == [], path.name


def test_each_script_is_preloaded_and_each_import_exists() -> None:
    preloaded = {
        a["href"] for tag, a in elements() if tag == "link" and a["rel"] == "modulepreload"
    }
    assert preloaded == {f"page/{path.name}" for path in SCRIPTS if path.name != "app.js"}
    for path in SCRIPTS:
        for name in IMPORT.findall(path.read_text()):
            assert (ASSETS / name).is_file(), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_never_reads_text_as_code(path: Path) -> None:
    assert READ_AS_CODE.findall(path.read_text()) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_says_first_why_it_exists(path: Path) -> None:
    assert path.read_text().startswith("// ")

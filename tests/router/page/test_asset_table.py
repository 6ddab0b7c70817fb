"""The files of the live page: which are served, and that they name only each other."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

from baton_router.page.asset_table import INDEX, read_assets

# What a page may name: a file of its own, relative, so that it also works below a proxy's path.
LINK = re.compile(r"""(?:src|href)=["']([^"']*)["']""")


def test_both_forms_of_each_file_have_the_same_content() -> None:
    assets = read_assets()
    assert INDEX in assets
    for name, asset in assets.items():
        assert gzip.decompress(asset.compressed) == asset.plain, name
    assert len({asset.etag for asset in assets.values()}) == len(assets)


def test_the_page_names_only_files_of_its_own_by_relative_links() -> None:
    assets = read_assets()
    links = LINK.findall(assets[INDEX].plain.decode())
    files = [link for link in links if not link.startswith(("data:", "#"))]
    assert files
    assert {link for link in files if link.removeprefix("page/") not in assets} == set()
    assert all(link.startswith("page/") for link in files)


def test_files_of_unknown_types_and_folders_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "folder.js").mkdir()
    for name in ("index.html", "a.js", ".index.html.swp", ".hidden.js", "notes.txt", "js"):
        (tmp_path / name).write_text(name)
    assert sorted(read_assets(tmp_path)) == ["a.js", "index.html"]

"""Which sources the pictures in docs/pictures show.

In: the sources, and the digests that `make pictures` wrote beside its pictures. Out: the digests of
the sources as they are now.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.pictures.figure_tables import tables

ROOT = Path(__file__).resolve().parents[3]
PICTURES = ROOT / "docs" / "pictures"
ASSETS = ROOT / "router" / "baton_router" / "page" / "assets"
TERMINAL = ROOT / "cli" / "baton_cli" / "terminal"
# What `baton top` looks like.
SCREEN = ("pool_lines.py", "pool_screen.py", "text.py")
# How figures are drawn.
PLOTS = ("figure_plots.py", "figure_tables.py")


def files_of(paths: Iterable[Path]) -> list[tuple[str, bytes]]:
    return [(path.name, path.read_bytes()) for path in paths]


def figure_sources() -> list[tuple[str, bytes]]:
    drawn = [(name, repr(rows).encode()) for name, rows in tables().items()]
    return [*drawn, *files_of(Path(__file__).with_name(name) for name in PLOTS)]


# By the name of the digest's file, and of the module here that draws.
SOURCES = {
    "page": lambda: files_of(sorted(ASSETS.iterdir())),
    "top": lambda: files_of(TERMINAL / name for name in SCREEN),
    "figure_plots": figure_sources,
}


def digest_file(name: str) -> Path:
    return PICTURES / f"{name}.sha256"


def digest_of(sources: Sequence[tuple[str, bytes]]) -> str:
    """The digest of sources, names included."""
    digest = hashlib.sha256()
    for name, content in sources:
        digest.update(f"{name}\n{len(content)}\n".encode() + content)
    return digest.hexdigest()


def write_digest(name: str) -> None:
    digest_file(name).write_text(digest_of(SOURCES[name]()) + "\n")

"""The files of the live page, read once.

In: the folder `assets/` beside this module. Out: each file by its name, with its media type, a
digest as ETag, and its bytes, also compressed. What is not in the table is not served.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import PurePath

INDEX = "index.html"
# Media types by suffix. Other files of the folder, such as an editor's, are left out.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file. `etag` is the same for both forms of its bytes."""

    content_type: str
    etag: str
    plain: bytes
    compressed: bytes


def read_assets(folder: Traversable | None = None) -> Mapping[str, Asset]:
    """The files of this folder, by default those of the page."""
    folder = resources.files(__package__).joinpath("assets") if folder is None else folder
    return {
        file.name: _asset(content_type, file.read_bytes())
        for file in folder.iterdir()
        if (content_type := _type_of(file.name)) is not None and file.is_file()
    }


def _type_of(name: str) -> str | None:
    return None if name.startswith(".") else TYPES.get(PurePath(name).suffix)


def _asset(content_type: str, data: bytes) -> Asset:
    # Weak, as one tag names two forms of the same content.
    etag = f'W/"{hashlib.sha256(data).hexdigest()[:32]}"'
    return Asset(content_type, etag, data, gzip.compress(data, mtime=0))

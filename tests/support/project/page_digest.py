"""Which version of the live page the pictures in docs/pictures show.

In: the page's files, and the digest that `make pictures` wrote beside its pictures. Out: the digest
of the files as they are now.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PICTURES = ROOT / "docs" / "pictures"
DIGEST = PICTURES / "page.sha256"
ASSETS = ROOT / "router" / "baton_router" / "page" / "assets"


def page_digest() -> str:
    """The digest of the page's files, names included."""
    digest = hashlib.sha256()
    for path in sorted(ASSETS.iterdir()):
        digest.update(f"{path.name}\n{path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()

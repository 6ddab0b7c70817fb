"""The user's cache folder, in which converted models are kept."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache() -> Path:
    """The user's cache directory. A relative XDG_CACHE_HOME counts as unset (XDG base dir spec)."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"

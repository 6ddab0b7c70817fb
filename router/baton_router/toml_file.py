"""Reads a TOML file that a flag names.

In: the flag and the path. Out: the file's tables, or a StartError with one line naming the place.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from baton_router.errors import StartError


def read_toml(flag: str, path: str) -> dict[str, Any]:
    """Raise StartError if the file cannot be read or is not TOML."""
    try:
        return tomllib.loads(Path(path).read_text("utf-8-sig"))
    except OSError as error:
        raise StartError(f"{flag} {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise StartError(f"{flag} {path} is not UTF-8 text; save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise StartError(f"{flag} {path} is not valid TOML: {error}") from None

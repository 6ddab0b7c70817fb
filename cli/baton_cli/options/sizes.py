"""Sizes as people write them: 1GiB, 512MiB, 2GB, 4096."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Return the number of bytes; raise ValueError if `text` is not a size."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write 1GiB, 512MiB, 2GB or a number of bytes")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def show_size(size: int) -> str:
    """Format `size` (bytes) exactly, in the largest binary unit that divides it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit.lower()]
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def about_size(size: float) -> str:
    """Format `size` (bytes) rounded, for messages: 1.4 GiB, 312 MiB."""
    if size >= _UNITS["gib"]:
        return f"{size / _UNITS['gib']:.1f} GiB"
    return f"{size / _UNITS['mib']:.0f} MiB"

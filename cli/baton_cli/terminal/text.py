"""Text of models, clients and routers, made safe to show; and tables of it.

A terminal obeys escape codes in what it prints: they move the cursor, change titles and keys, or
write to the clipboard. So a control character is shown as the escape that Python would write.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Control characters but newline and tab, marks that reverse the direction of text, surrogates.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_BREAKS = str.maketrans({"\n": r"\n", "\t": r"\t"})


def visible(text: str) -> str:
    """The text with its control characters escaped, except newlines and tabs."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def visible_line(text: str) -> str:
    """The same with newlines and tabs escaped, too."""
    return visible(text).translate(_BREAKS)


def align(rows: Sequence[Sequence[str]], names: int) -> list[str]:
    """The rows as lines: the first `names` columns aligned to the left, the figures after them to
    the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < names else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

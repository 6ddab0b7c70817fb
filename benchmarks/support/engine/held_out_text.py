"""Text that no model of 2024 was trained on: prose of this repository's documents.

What the demo model was trained on is not listed file by file, but it was published before these
documents were written. `held_out.txt` has the paragraphs of docs/kv-exchange.md, placement.md,
security.md and structured-output.md without code, tables and headings. It is a copy, so that
figures of different days are of the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton_text.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("held_out.txt")


def windows(tokenizer: Tokenizer, count: int, length: int) -> Sequence[Sequence[int]]:
    """`count` windows of `length` tokens, spread evenly over the text."""
    ids = tokenizer.encode(TEXT.read_text())
    assert len(ids) >= count * length, f"the text has only {len(ids)} tokens"
    stride = (len(ids) - length) // max(1, count - 1)
    return [ids[number * stride :][:length] for number in range(count)]

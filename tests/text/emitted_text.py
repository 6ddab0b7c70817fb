"""E(ids, stop) from all ids at once: the model of `Detokenizer`, which works in increments."""

from __future__ import annotations

from collections.abc import Sequence

from baton_text.detokenizer import Emitted, TextReader, TextSettings
from baton_text.tokenizer import Tokenizer


def emitted(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    settings: TextSettings,
    *,
    context: Sequence[int] = (),
    finished: bool = False,
) -> Emitted:
    """E(ids, stop) after `context`. With `finished`, no ids will follow: no text is held back."""
    whole, all_ends = _characters(tokenizer, [*context, *ids], settings.skip_special, finished)
    start = all_ends[len(context) - 1] if context else 0
    text, ends = whole[start:], [end - start for end in all_ends[len(context) :]]
    if settings.min_ids >= len(ids):
        exempt = len(text)
    else:
        exempt = ends[settings.min_ids - 1] if settings.min_ids else 0
    hits = []
    for stop in settings.stop:
        start = text.find(stop, max(0, exempt - len(stop) + 1))
        if start >= 0:
            hits.append((start + len(stop), start, stop))
    if hits:
        end, start, stop = min(hits)
        used = 1 + next((i for i, length in enumerate(ends) if length >= end), len(ids) - 1)
        return Emitted(text[: end if settings.include_stop else start], stop, used)
    if finished or settings.include_stop:
        return Emitted(text, None, len(ids))
    held = max((_overlap(text, stop) for stop in settings.stop), default=0)
    return Emitted(text[: len(text) - held], None, len(ids))


def _characters(
    tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool, finished: bool
) -> tuple[str, list[int]]:
    """The decoded text, and its length in characters after each id."""
    reader = TextReader(tokenizer, skip_special)
    text = ""
    ends = []
    for token_id in ids:
        text += reader.push(token_id)
        ends.append(len(text))
    return text + (reader.finish() if finished else ""), ends


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)

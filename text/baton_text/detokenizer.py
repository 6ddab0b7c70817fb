"""E(ids, stop): the text that may be shown once `ids` are known, and its increments.

In: ids as they are generated, stop strings. Out: text that is never taken back.

E is the decoded text without
  - a character whose last bytes are still missing,
  - a tail that may be the beginning of a stop string,
  - a stop string that occurred, and everything after it.
It depends on the ids alone, not on how they arrived: whoever takes over a stream in the middle
sends E(all ids) minus E(ids known before), and nothing is doubled or lost.

An answer that continues its prompt (a completion) is decoded behind the prompt's last ids, its
`context`: some tokenizers drop the space before the first token of a text, and the prompt may end
within a character. The text of the context is not shown, and stop strings are not looked for in it.

A stop string occurs where its last character becomes known; if several end at the same character,
the longest counts. Each id is turned into bytes once and each character looked at once per stop
string, so the cost is linear. `emitted` is the definition, `Detokenizer` the same in increments.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton_text.tokenizer import Tokenizer

# What the error handler "surrogateescape" makes of a byte that is not UTF-8.
_ESCAPED = re.compile("[\udc80-\udcff]")
_UNKNOWN = "\ufffd"


# Bytes of a UTF-8 character before its last.
_OPEN_BYTES = 3


class Emitted(NamedTuple):
    """Text that may be shown now, the stop string that ended it, and how many ids belong to it.

    `used_ids` is the number of ids given unless a stop string was found among them; it counts the
    id that completed the stop string.
    """

    text: str
    stop: str | None = None
    used_ids: int = 0


@dataclass(frozen=True)
class TextSettings:
    """What a request asks of its text.

    A stop string that is complete within the first `min_ids` ids does not count (min_tokens).
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_ids: int = 0

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise ValueError("a stop string is empty")


def emitted(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    settings: TextSettings,
    *,
    context: Sequence[int] = (),
    finished: bool = False,
) -> Emitted:
    """E(ids, stop) behind `context`, by its definition. `finished`: no more ids come, so nothing is
    held back.

    Costs a pass over all ids; for a stream use `Detokenizer`.
    """
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
        used = 1 + next((i for i, known in enumerate(ends) if known >= end), len(ids) - 1)
        return Emitted(text[: end if settings.include_stop else start], stop, used)
    if finished or settings.include_stop:
        return Emitted(text, None, len(ids))
    held = max((_overlap(text, stop) for stop in settings.stop), default=0)
    return Emitted(text[: len(text) - held], None, len(ids))


def _characters(
    tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool, finished: bool
) -> tuple[str, list[int]]:
    """The decoded text, and how many of its characters are known after each id."""
    reader = TextReader(tokenizer, skip_special)
    text = ""
    ends = []
    for token_id in ids:
        text += reader.push(token_id)
        ends.append(len(text))
    return text + (reader.finish() if finished else ""), ends


def context_of(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool) -> tuple[int, ...]:
    """The end of `ids` that decides how the ids behind them are decoded, as a few ids: enough of
    those that are shown to hold an unfinished character and what is stripped from a text's start.
    """
    enough = 1 + _OPEN_BYTES + tokenizer.spelling.strip_count
    tail: list[int] = []
    for token_id in reversed(ids):
        if tokenizer.piece(token_id, skip_special=skip_special):
            tail.append(token_id)
            if len(tail) == enough:
                break
    return tuple(reversed(tail))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class TextReader:
    """Ids to characters: whole ones, each as soon as its last byte is known."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        spelling = tokenizer.spelling
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._errors = spelling.errors
        self._decoder = codecs.getincrementaldecoder("utf-8")(spelling.errors)
        self._first = True
        self._strip_char = spelling.strip_char
        self._strip_left = spelling.strip_count

    def push(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if piece is None:
            return ""
        self._first = False
        return self._shown(self._decoder.decode(piece))

    def read(self, ids: Iterable[int]) -> str:
        """What pushing each of them gives, in a seventh of the time."""
        pieces = []
        for token_id in ids:
            piece = self._piece(token_id)
            if piece is not None:
                self._first = False
                pieces.append(piece)
        return self._shown(self._decoder.decode(b"".join(pieces)))

    def broken_off(self, token_id: int) -> int:
        """As how many characters the unfinished last character would show, if this id came next and
        did not go on with it; 0 if it does go on with it."""
        begun, _ = self._decoder.getstate()
        piece = self._piece(token_id) if begun else None
        if not piece:
            return 0
        try:
            codecs.utf_8_decode(begun + piece[:1], "strict", False)
        except UnicodeDecodeError:
            return len(begun.decode("utf-8", self._errors))
        return 0

    def finish(self) -> str:
        """What an incomplete last character shows as."""
        return self._shown(self._decoder.decode(b"", True))

    def _piece(self, token_id: int) -> bytes | None:
        return self._tokenizer.piece(token_id, first=self._first, skip_special=self._skip_special)

    def _shown(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip_char:
                self._strip_left = 0
            else:
                self._strip_left -= 1
                text = text[1:]
        return text if text.isascii() else _ESCAPED.sub(_UNKNOWN, text)


class StopMatcher:
    """Looks for one stop string, character by character (Knuth, Morris, Pratt 1977).

    `length` is how many characters of the stop string the text now ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._shorter = [0] * (len(stop) + 1)  # next shorter border of each beginning
        border = 0
        for index in range(1, len(stop)):
            while border and stop[index] != stop[border]:
                border = self._shorter[border]
            border += stop[index] == stop[border]
            self._shorter[index + 1] = border

    def step(self, char: str) -> bool:
        """Take the next character; True if the stop string ends with it."""
        length = self.length
        if length == len(self.stop):
            length = self._shorter[length]
        while length and char != self.stop[length]:
            length = self._shorter[length]
        self.length = length + (char == self.stop[length])
        return self.length == len(self.stop)

    @property
    def pending(self) -> int:
        """Characters that may be the beginning of a stop string (never a whole one)."""
        whole = self.length == len(self.stop)
        return self._shorter[self.length] if whole else self.length


class Detokenizer:
    """E(ids, stop) in increments, for one choice of one request.

    `known` are ids whose text somebody else has shown: pushes return what comes after it. They
    count towards `min_ids`. `context` are ids before the text, of which nothing is shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        known: Sequence[int] = (),
        min_ids: int = 0,
        context: Sequence[int] = (),
    ) -> None:
        self._settings = TextSettings(tuple(stop), include_stop, skip_special, min_ids)
        self._reader = TextReader(tokenizer, skip_special)
        self._matchers = [StopMatcher(text) for text in self._settings.stop]
        self._held = ""
        self._count = 0
        self.stopped: str | None = None
        self._reader.read(context)
        self.push(known)

    def push(self, ids: Sequence[int]) -> Emitted:
        """Text that these ids allow to be shown. After a stop string: nothing, and no id used."""
        if not self._matchers:
            return Emitted("".join(map(self._reader.push, ids)), None, len(ids))
        shown: list[str] = []
        for used, token_id in enumerate(ids, start=1):
            if self.stopped is not None:
                return Emitted("".join(shown), self.stopped, used - 1)
            self._count += 1
            shown.append(self._take(self._reader.push(token_id)))
        return Emitted("".join(shown), self.stopped, len(ids))

    def finish(self) -> str:
        """No more ids come: the text that was held back. `stopped` may be set by it."""
        if self.stopped is not None:
            return ""
        if not self._matchers:
            return self._reader.finish()
        text = self._take(self._reader.finish())
        held, self._held = self._held, ""
        return text + held

    def _take(self, text: str) -> str:
        """Add characters; return those that may be shown now."""
        counts = self._count > self._settings.min_ids
        for index, char in enumerate(text):
            ended = [matcher.stop for matcher in self._matchers if matcher.step(char)]
            if ended and counts:
                self.stopped = max(ended, key=len)
                cut = 0 if self._settings.include_stop else len(self.stopped)
                whole = self._held + text[: index + 1]
                self._held = ""
                return whole[: len(whole) - cut]
        whole = self._held + text
        held = 0 if self._settings.include_stop else max(m.pending for m in self._matchers)
        self._held = whole[len(whole) - held :]
        return whole[: len(whole) - held]

"""E(ids, stop): the text that may be shown for `ids`, and its increments.

In: ids as they are generated, stop strings. Out: text that is never retracted.

E is the decoded text without
  - a character whose last bytes are still missing,
  - a tail that may be the start of a stop string,
  - a stop string that occurred, and everything after it.
E depends only on the ids, not on how they are batched. A node that takes over a stream sends E(all
ids) minus E(ids known before), so no text is duplicated or lost.

An answer that continues its prompt (a completion) is decoded after the prompt's last ids, its
`context`, because some tokenizers drop the space before the first token of a text, and because the
prompt may end within a character. Text of the context is not shown, and stop strings do not match
in it.

A stop string occurs at its last character; if several end at the same character, the longest
counts. Each id is converted to bytes once, and each character takes at most two comparisons per
stop string on average, so the cost is linear.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton_text.tokenizer import Tokenizer

# The error handler "surrogateescape" decodes a byte that is not UTF-8 to one of these.
_ESCAPED = re.compile("[\udc80-\udcff]")
_UNKNOWN = "\ufffd"
# Maximum number of bytes of an incomplete UTF-8 character.
_OPEN_BYTES = 3


class Emitted(NamedTuple):
    """Text that may be shown now.

    stop      the stop string that ended the text, or None
    used_ids  number of ids up to and including the one that completed the stop string; all given
              ids if there is no stop
    """

    text: str
    stop: str | None = None
    used_ids: int = 0


@dataclass(frozen=True)
class TextSettings:
    """A request's settings for its text.

    stop          stop strings; none may be empty
    include_stop  show the stop string that ended the text
    skip_special  do not show special tokens
    min_ids       ignore stop strings that are complete within this many ids (min_tokens)
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_ids: int = 0

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise ValueError("a stop string must not be empty")


def context_of(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool) -> tuple[int, ...]:
    """The last shown ids of a prompt that affect how the ids after it are decoded.

    These are enough ids to contain an unfinished character and the characters that are stripped
    from the start of a text.
    """
    enough = 1 + _OPEN_BYTES + tokenizer.spelling.strip_count
    tail: list[int] = []
    for token_id in reversed(ids):
        if tokenizer.piece(token_id, skip_special=skip_special):
            tail.append(token_id)
            if len(tail) == enough:
                break
    return tuple(reversed(tail))


class TextReader:
    """Decodes ids to complete characters, each as soon as its last byte arrives."""

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
        """The joined results of pushing each id, in a seventh of the time."""
        pieces = []
        for token_id in ids:
            piece = self._piece(token_id)
            if piece is not None:
                self._first = False
                pieces.append(piece)
        return self._shown(self._decoder.decode(b"".join(pieces)))

    def broken_off(self, token_id: int) -> int:
        """How many characters the unfinished last character would show if `token_id` came next;
        0 if the id continues that character, or if there is none."""
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
        """End the ids; return the replacement text of an incomplete last character."""
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
    """Searches for one stop string, character by character (Knuth, Morris, Pratt 1977).

    `length` is the length of the longest prefix of the stop string that the text now ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._shorter = [0] * (len(stop) + 1)  # length of each prefix's longest border
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
        """Number of characters at the end that may start another match (a proper prefix)."""
        whole = self.length == len(self.stop)
        return self._shorter[self.length] if whole else self.length


class Detokenizer:
    """E(ids, stop) in increments, for one choice of one request.

    known     ids whose text another node has shown; pushes return the text after it. These ids
              count towards `min_ids`.
    context   ids before the text that are decoded but not shown
    stopped   the stop string that ended the text, or None
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

    def push_id(self, token_id: int) -> str:
        """Take one more id; return the new text."""
        if not self._matchers:
            return self._reader.push(token_id)
        return self.push((token_id,)).text

    def push(self, ids: Sequence[int]) -> Emitted:
        """Take more ids; return the new text. After a stop string: no text and no used ids."""
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
        """End the ids; return the text that was held back. May set `stopped`."""
        if self.stopped is not None:
            return ""
        if not self._matchers:
            return self._reader.finish()
        text = self._take(self._reader.finish())
        held, self._held = self._held, ""
        return text + held

    def _take(self, text: str) -> str:
        """Take decoded text; return the text that may be shown now."""
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

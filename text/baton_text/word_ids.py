"""Encodes a text word by word, and remembers the ids of words, which come again in other texts.

In: a text. Out: its ids, which are those of its words one after another, because a text is divided
only where that changes no id (see `division`). For a text of known words this takes a seventh of
the time that the library takes for the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain

from tokenizers import Tokenizer as Backend

from baton_text.division import Division

Ids = Sequence[int]

# Remembered words, of about 200 bytes each. When there are more, all are forgotten: those that come
# again are soon known again.
MOST_WORDS = 1 << 15
# Characters of a word that is remembered: what is longer rarely comes again.
LONGEST_WORD = 40


class WordIds:
    """The ids of one tokenizer's words, without the special tokens around a text. Threads may share
    it. `shared` returns the same ids as objects that all prompts share."""

    def __init__(
        self, backend: Backend, division: Division, shared: Callable[[Ids], list[int]]
    ) -> None:
        self._backend = backend
        self._division = division
        self._shared = shared
        self._known: dict[str, Ids] = {}

    def encode(self, text: str) -> list[int] | None:
        """The ids of `text`; None if most of it is long words, which are better encoded whole."""
        words = self._division.words(text)
        try:
            return list(chain.from_iterable(map(self._known.__getitem__, words)))
        except KeyError:
            pass
        known = {word: self._known.get(word) for word in words}
        missing = [word for word, ids in known.items() if ids is None]
        if 2 * sum(len(word) for word in missing if len(word) > LONGEST_WORD) > len(text):
            return None
        ids = known | self._encode_words(missing)
        return list(chain.from_iterable(ids[word] or () for word in words))

    def _encode_words(self, words: list[str]) -> dict[str, Ids]:
        """The ids of each of these words, which are in the order of the text. Remembers them.

        One after another they are a text that is divided at the same places. So they are encoded
        together, and an id belongs to the word in which its characters begin."""
        gap = " " if self._division.drops_space else ""
        begins = [0, *accumulate(len(word) + len(gap) for word in words)]
        [encoding] = self._backend.encode_batch([gap.join(words)], add_special_tokens=False)
        ids: dict[str, list[int]] = {word: [] for word in words}
        last, at = len(words) - 1, 0
        for index, (start, _) in zip(self._shared(encoding.ids), encoding.offsets, strict=True):
            while at < last and start >= begins[at + 1] - len(gap):
                at += 1
            ids[words[at]].append(index)
        found: dict[str, Ids] = {word: tuple(indices) for word, indices in ids.items()}
        if len(self._known) + len(found) > MOST_WORDS:
            self._known.clear()
        self._known.update({w: each for w, each in found.items() if len(w) <= LONGEST_WORD})
        return found

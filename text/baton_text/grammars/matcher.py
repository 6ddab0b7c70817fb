"""Matcher: the state of one answer in a grammar.

A Matcher is never sent or stored: a node that takes over an answer creates one from the grammar
text and replays the tokens (0.1 ms per 200 tokens).
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from baton_text.grammars.errors import explain
from baton_text.grammars.unique_keys import Keys


class Matcher:
    """The state of one answer in its grammar.

    `accept` consumes the answer's tokens in order; `mask` returns the tokens that may follow. Not
    thread-safe; `copy` is cheap. `keys` follows the JSON objects of the answer, if it has any."""

    __slots__ = ("_blocked", "_keys", "_matcher")

    def __init__(self, matcher: LLMatcher, keys: Keys | None = None) -> None:
        self._matcher = matcher
        self._keys = keys
        self._blocked = False  # every key that may follow is there already

    def copy(self) -> Matcher:
        copied = Matcher(self._matcher.deep_copy(), self._keys and self._keys.copy())
        copied._blocked = self._blocked
        return copied

    def accept(self, ids: Sequence[int]) -> bool:
        """Consume `ids`; return whether all match. After False the matcher is `stopped`."""
        if self._keys is not None:
            self._keys.accept(ids)
        return bool(self._matcher.consume_tokens(list(ids)))

    def count_accepted(self, ids: Sequence[int]) -> int:
        """How many leading `ids` would match; does not consume them."""
        return int(self._matcher.validate_tokens(list(ids)))

    @property
    def stopped(self) -> bool:
        """Whether only EOS may follow."""
        return self._blocked or bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return not self._matcher.is_error() and bool(self._matcher.is_accepting())

    @property
    def error(self) -> str:
        """Why the matcher cannot continue; "" unless it failed. Some dead ends show only after
        `mask`."""
        if self._matcher.is_error():
            return explain(self._matcher.get_error())
        return "an object has each key already that may follow" if self._blocked else ""

    def forced(self) -> list[int]:
        """The next tokens as far as the grammar allows one text only, divided into tokens as the
        tokenizer divides that text."""
        return [] if self.stopped else list(self._matcher.compute_ff_tokens())

    def mask(self) -> bytes:
        """One bit per id, least significant bit first: 1 if the id may follow.

        Padded to 32-bit words, for the vocabulary and up to 32 more ids. EOS is set if the answer
        may end here."""
        mask = bytes(self._matcher.compute_bitmask())
        if self._keys is None:
            return mask
        unique = self._keys.unique(mask, self._matcher)
        if unique is not mask and not any(unique):
            self._blocked = True
            return self._keys.eos_mask(len(mask))
        return unique

"""A completion's prompt as `echo` shows it.

In: the prompt as the client gave it, and its ids. Out: its text, and where in it each of its
tokens begins. A prompt of text is shown as it was written. A prompt of ids is the text of all of
them, special ones included: `skip_special_tokens` is about what is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from baton_protocol.request import TokenLogprob
from baton_router.openai.endpoint import Prompt, TextPrompt
from baton_text.detokenizer import TextReader
from baton_text.offsets import TextOffsets, offsets_in
from baton_text.tokenizer import Tokenizer


class Echo:
    """`first` is the prompt's first token, which has no probability. With `answered` an answer
    follows, which completes a character that a prompt of ids only begins."""

    def __init__(
        self, given: Prompt, ids: Sequence[int], tokenizer: Tokenizer, *, answered: bool
    ) -> None:
        self._given = given
        self._ids = ids
        self._tokenizer = tokenizer
        raw = tokenizer.token_bytes(ids[0])
        self.first = TokenLogprob(ids[0], 0.0, text=tokenizer.token_text(ids[0]), raw=raw)
        if isinstance(given, TextPrompt):
            self.text = given.text
        else:
            reader = TextReader(tokenizer, skip_special=False)
            self.text = reader.read(ids) + ("" if answered else reader.finish())

    @cached_property
    def offsets(self) -> list[int]:
        """Of each token in `text`. Takes 2 us a token, so long prompts want a thread."""
        if isinstance(self._given, TextPrompt):
            given = self._given
            return offsets_in(self._tokenizer, given.text, self._ids, given.add_special_tokens)
        placed = TextOffsets(self._tokenizer, skip_special=False)
        return [placed.push(token_id) for token_id in self._ids]

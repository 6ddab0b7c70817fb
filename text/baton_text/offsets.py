"""Where in a text the text of each token begins.

In: ids, and the text where a client wrote it itself. Out: for each id, how many characters of the
text stand before its own.

Tokens that share a character begin where the character does. A token that is not shown (special and
skipped, or unknown to the tokenizer) takes no room: it stands where the next one begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_text.detokenizer import TextReader
from baton_text.tokenizer import Tokenizer


class TextOffsets:
    """The offsets of ids in the text that a TextReader makes of them, id by id.

    `context` are ids before the text, of which nothing is shown, as a Detokenizer has them.
    `before` counts characters that stand before the text. `length` is how many characters there
    are so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool = True,
        context: Sequence[int] = (),
        before: int = 0,
    ) -> None:
        self._reader = TextReader(tokenizer, skip_special)
        self._reader.read(context)
        self.length = before

    def push(self, token_id: int) -> int:
        """The offset of the next id. It completes the character that earlier ids began, or else
        stands behind what they show of it."""
        offset = self.length + self._reader.broken_off(token_id)
        self.length += len(self._reader.push(token_id))
        return offset


def offsets_in(
    tokenizer: Tokenizer, text: str, ids: Sequence[int], add_special_tokens: bool
) -> list[int]:
    """The offsets of `ids` in the `text` that was encoded to them.

    Where the tokens do not spell the text as it is (a tokenizer may lower its case, compose its
    characters, not know them), the library says which characters each came from. Tokens that were
    put around the text stand at its ends.
    """
    before, after = tokenizer.around if add_special_tokens else ((), ())
    own = ids[len(before) : len(ids) - len(after)]
    reader = TextReader(tokenizer, skip_special=False)
    if reader.read(own) + reader.finish() == text:
        spelled = TextOffsets(tokenizer, skip_special=False)
        inner = [spelled.push(token_id) for token_id in own]
    else:
        inner = _from_spans(text, tokenizer.spans(text))
    return [0] * len(before) + inner + [len(text)] * len(after)


def _from_spans(text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
    """A token begins where its span does, before the spaces that no span holds. All tokens that
    came from one character have its span."""
    offsets = []
    offset = end = 0
    for first, last in spans:
        spaces = text[end:first]
        spaces = spaces[len(spaces.rstrip()) :]
        offset = max(offset, first - len(spaces))
        end = max(end, last)
        offsets.append(offset)
    return offsets

"""Find the offset of each token's text in a text.

In: ids, and the text if the client wrote it. Out: for each id, the number of characters before its
own text.

Tokens that share a character have the offset of that character. A token that is not shown (a
skipped special token, or an unknown id) has the offset of the next token.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_text.detokenizer import TextReader
from baton_text.tokenizer import Tokenizer


class TextOffsets:
    """The offsets of ids in the text that a TextReader decodes from them, id by id.

    context   ids before the text that are decoded but not shown, as in Detokenizer
    before    number of characters before the text
    length    number of characters so far, including `before`
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
        """Take the next id; return its offset. An id that does not continue the unfinished
        character before it starts after the replacement text of that character."""
        offset = self.length + self._reader.broken_off(token_id)
        self.length += len(self._reader.push(token_id))
        return offset


def offsets_in(
    tokenizer: Tokenizer, text: str, ids: Sequence[int], add_special_tokens: bool
) -> list[int]:
    """The offsets of `ids` in `text`, from which they were encoded.

    If the tokens do not spell the text exactly (a tokenizer may lowercase it, compose characters or
    not know them), the offsets come from the spans that the library reports. Special tokens around
    the text have the offsets of its ends.
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
    """Offsets from spans: a token starts at its span, or before the spaces that precede the span
    and belong to no other. Tokens of one character all have that character's span."""
    offsets = []
    offset = end = 0
    for first, last in spans:
        spaces = text[end:first]
        spaces = spaces[len(spaces.rstrip()) :]
        offset = max(offset, first - len(spaces))
        end = max(end, last)
        offsets.append(offset)
    return offsets

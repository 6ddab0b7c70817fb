"""Splits the text of an answer's choices into reasoning, content and calls, for every dialect.

In: deltas of a stream, or whole choices. Out: pieces, ids of calls, and how a choice finished. An
answer without an AnswerParsing is content alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_protocol.link import Delta
from baton_protocol.sampling import FinishReason
from baton_router.openai.answer_parsing import AnswerParsing, ChoiceReader
from baton_router.openai.answers import ChatFinish
from baton_router.openai.call import Json
from baton_router.openai.choice_output import ChoiceOutput
from baton_text.parsers.parser import Piece, PieceKind
from baton_text.tokenizer import Tokenizer


class AnswerPieces:
    """`answer_id` identifies the answer: its calls' ids derive from it. `special_tokens_requested`:
    the client set `skip_special_tokens`."""

    def __init__(
        self,
        parsing: AnswerParsing | None,
        tokenizer: Tokenizer,
        sampling: Json,
        answer_id: str,
        *,
        special_tokens_requested: bool = False,
    ) -> None:
        self._parsing = parsing if sampling["detokenize"] else None
        self._tokenizer = tokenizer
        self._answer_id = answer_id
        self._readers: dict[int, ChoiceReader] = {}
        reads_special = self._parsing is not None and self._parsing.reads_special
        skips = sampling["skip_special_tokens"]
        self._sees_markers = not (reads_special and special_tokens_requested and skips)
        # The text has special tokens only for the parser, and the client wants its stop included.
        self._hides_end = (
            reads_special
            and not special_tokens_requested
            and sampling["include_stop_str_in_output"]
        )

    @property
    def is_content(self) -> bool:
        """Whether all text of each choice is content."""
        return self._parsing is None

    @property
    def separates_reasoning(self) -> bool:
        """Whether the model's reasoning is separated from its content."""
        return self._parsing is not None and self._parsing.reasoning_parser is not None

    def of_delta(self, index: int, delta: Delta) -> Sequence[Piece]:
        """The pieces that a delta of this choice adds; at its end, also those held back."""
        return self._pieces(index, delta.text, delta.ids, delta.finish)

    def of_choice(self, index: int, choice: ChoiceOutput) -> Sequence[Piece]:
        """The pieces of a whole choice."""
        return self._pieces(index, choice.text, choice.ids, choice.finish_reason)

    def finish(self, index: int, finish: FinishReason) -> ChatFinish:
        """How the choice finished, once all its pieces are read."""
        if self._parsing is None or not self._parsing.calls_end:
            return finish
        return "tool_calls" if self.ends_in_calls(index, finish) else finish

    def ends_in_calls(self, index: int, finish: FinishReason) -> bool:
        """Whether the choice ended by itself with calls that are whole, once all its pieces are
        read."""
        if finish != "stop" or self._parsing is None:
            return False
        return self._reader(index, self._parsing).has_whole_calls

    def call_id(self, index: int, number: int) -> str:
        """The id of a choice's call."""
        assert self._parsing is not None, "calls are parsed"
        return self._reader(index, self._parsing).call_id(number)

    def _pieces(
        self, index: int, text: str, ids: Sequence[int], finish: FinishReason | None
    ) -> Sequence[Piece]:
        if self._parsing is None:
            return [Piece("content", text, 0)] if text else ()
        if self._hides_end and finish == "stop" and ids and ids[-1] in self._tokenizer.special_ids:
            text = text.removesuffix(self._tokenizer.token_text(ids[-1]))
        return self._reader(index, self._parsing).read_text(text, ended=finish is not None)

    def _reader(self, index: int, parsing: AnswerParsing) -> ChoiceReader:
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = ChoiceReader(
                parsing, f"{self._answer_id}/{index}", sees_markers=self._sees_markers
            )
        return reader


def text_of(pieces: Sequence[Piece], kind: PieceKind) -> str:
    """The text of all pieces of this kind."""
    return "".join(piece.text for piece in pieces if piece.kind == kind)

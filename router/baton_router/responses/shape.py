"""Turns the deltas of an answer into a Response, and into the events of its stream.

An answer in one piece is made from the same pieces, so it is what the last event of a stream holds.

Logprobs belong to tokens, and a message's text may lack some, such as those of reasoning: an event
has the logprobs of all tokens since the last event with text.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs
from baton_protocol.sampling import FinishReason
from baton_router.openai.answer_pieces import AnswerPieces
from baton_router.openai.answers import Usage
from baton_router.openai.choice_output import ChoiceOutput
from baton_router.openai.logprobs import chat_logprobs
from baton_router.responses.event_log import EventLog
from baton_router.responses.events import end_event, text_event_bytes
from baton_router.responses.output_events import OutputEvents
from baton_router.responses.records import (
    IncompleteDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from baton_text.parsers.parser import Piece


class ResponseShape(OutputEvents):
    """The JSON of one answer. `response` is its state before the first token; `answered` gets its
    last one. `logprobs` is the number of likely tokens beside each; None: no logprobs. `log` gets
    the events of a stream."""

    def __init__(
        self,
        response: Response,
        pieces: AnswerPieces,
        *,
        logprobs: int | None,
        encrypts: bool,
        answered: list[Response],
        log: EventLog | None = None,
    ) -> None:
        super().__init__(response, encrypts=encrypts, log=log)
        self._pieces = pieces
        self._logprobs = logprobs
        self._answered = answered
        self._finish: FinishReason | None = None
        self._flows = False  # all that follows before the end is text of the open message

    # --- a stream ---------------------------------------------------------------------------------

    def event(self, index: int, delta: Delta) -> bytes:
        if self._flows and delta.finish is None:
            return self._text_event(delta.text)
        if not self._begun:
            self._begin()
        self._note_scores(delta.logprobs)
        for piece in self._pieces.of_delta(index, delta):
            self._add(index, piece)
        if delta.finish is not None:
            self._finish_output(delta.finish)
        elif self._item is not None and self._pieces.is_content and self._logprobs is None:
            self._flows = True
        return self._taken()

    def _text_event(self, text: str) -> bytes:
        """The event of a text that needs no other one."""
        if not text:
            return b""
        self._texts.append(text)
        delta = self._text_delta
        delta.sequence_number, delta.delta = self._next(), text
        data = text_event_bytes(delta)
        if self._log is not None:
            self._log.add(data)
        return data

    def end(self, usage: Usage | None) -> bytes:
        assert usage is not None, "the options include usage"
        self._show(end_event(self._complete(usage), self._next()))
        return self._taken()

    def error_event(self, error: ErrorRecord) -> bytes:
        if not self._begun:
            self._begin()
        if self._item is not None:
            self._close("incomplete")
        response = msgspec.structs.replace(
            self._response,
            status="failed",
            error=ResponseError(code=error.code, message=error.message),
        )
        self._show(end_event(response, self._next()))
        return self._taken()

    # --- an answer in one piece -------------------------------------------------------------------

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes:
        [choice] = choices
        self._note_scores(choice.logprobs)
        for piece in self._pieces.of_choice(0, choice):
            self._add(0, piece)
        self._finish_output(choice.finish_reason)
        return msgspec.json.encode(self._complete(usage))

    # --- both -------------------------------------------------------------------------------------

    def _add(self, index: int, piece: Piece) -> None:
        kind, text, number = piece
        if kind == "content":
            self._add_text(text)
        elif kind == "reasoning":
            self._add_reasoning(text)
        elif kind == "call":
            self._open_call(self._pieces.call_id(index, number), text)
        else:
            self._add_arguments(text)

    def _finish_output(self, finish: FinishReason) -> None:
        self._finish = finish
        if self._item is None and not self._response.output:
            self._open_message()  # clients expect an item
        if self._item is not None:
            self._close("completed" if finish == "stop" else "incomplete")

    def _complete(self, usage: Usage) -> Response:
        """The response at its end."""
        stopped = self._finish == "stop"
        response = msgspec.structs.replace(
            self._response,
            status="completed" if stopped else "incomplete",
            incomplete_details=None if stopped else IncompleteDetails(reason="max_output_tokens"),
            usage=ResponseUsage.of(usage),
        )
        self._answered.append(response)
        return response

    def _note_scores(self, positions: Sequence[PositionLogprobs]) -> None:
        if self._logprobs is not None:
            self._unshown += chat_logprobs(positions, self._logprobs).content

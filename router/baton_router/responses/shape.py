"""Turns the deltas of an answer into a Response, and into the events of its stream.

An answer in one piece is made from the same pieces, so it is what the last event of a stream holds.
Ids of items derive from the response's id and their position, so any router gives the same.

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
from baton_router.openai.answers import ChatPosition, Usage
from baton_router.openai.choice_output import ChoiceOutput
from baton_router.openai.logprobs import chat_logprobs
from baton_router.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemAdded,
    ItemDone,
    OutputTextDelta,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    TextDone,
    event_bytes,
    text_event_bytes,
)
from baton_router.responses.items import encoded_reasoning
from baton_router.responses.records import (
    ID_PREFIX,
    FunctionCall,
    IncompleteDetails,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseUsage,
)
from baton_text.parsers.parser import Piece


class ResponseShape:
    """The JSON of one answer. `response` is its state before the first token; `answered` gets its
    last one. `logprobs` is the number of likely tokens beside each; None: no logprobs."""

    def __init__(
        self,
        response: Response,
        pieces: AnswerPieces,
        *,
        logprobs: int | None,
        encrypts: bool,
        answered: list[Response],
    ) -> None:
        self._response = response
        self._pieces = pieces
        self._logprobs = logprobs
        self._encrypts = encrypts
        self._answered = answered
        self._name = response.id.removeprefix(ID_PREFIX)
        self._events: list[bytes] = []
        self._number = 0
        self._item: OutputItem | None = None  # the one that is not done
        self._texts: list[str] = []  # of this item
        self._scores: list[ChatPosition] = []  # of this item
        self._unshown: list[ChatPosition] = []  # logprobs of tokens that no event has shown
        self._finish: FinishReason | None = None
        self._begun = False
        self._flows = False  # all that follows before the end is text of the open message
        # Reused for every event, since most of its fields stay the same.
        self._text_delta = OutputTextDelta(
            sequence_number=0,
            item_id="",
            output_index=0,
            content_index=0,
            delta="",
            logprobs=[],
        )

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
        delta.sequence_number, delta.delta = self._number, text
        self._number += 1
        return text_event_bytes(delta)

    def end(self, usage: Usage | None) -> bytes:
        assert usage is not None, "the options include usage"
        response = self._complete(usage)
        kind = ResponseCompleted if response.status == "completed" else ResponseIncomplete
        self._show(kind(sequence_number=self._next(), response=response))
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
        self._show(ResponseFailed(sequence_number=self._next(), response=response))
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

    def _begin(self) -> None:
        self._begun = True
        self._show(ResponseCreated(sequence_number=self._next(), response=self._response))
        self._show(ResponseInProgress(sequence_number=self._next(), response=self._response))

    def _add(self, index: int, piece: Piece) -> None:
        kind, text, number = piece
        item = self._item
        if kind == "content":
            if not isinstance(item, OutputMessage):
                self._open_message()
            self._texts.append(text)
            delta = self._text_delta
            delta.sequence_number, delta.delta = self._next(), text
            if self._logprobs is not None:
                delta.logprobs, self._unshown = self._unshown, []
                self._scores += delta.logprobs
            self._show(delta)
        elif kind == "reasoning":
            if not isinstance(item, ReasoningItem):
                self._open_reasoning()
            self._texts.append(text)
            self._show(
                ReasoningDelta(
                    sequence_number=self._next(),
                    item_id=self._item_id("rs"),
                    output_index=self._at,
                    content_index=0,
                    delta=text,
                )
            )
        elif kind == "call":
            self._open_call(self._pieces.call_id(index, number), text)
        else:
            self._texts.append(text)
            self._show(
                ArgumentsDelta(
                    sequence_number=self._next(),
                    item_id=self._item_id("fc"),
                    output_index=self._at,
                    delta=text,
                )
            )

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

    # --- items ------------------------------------------------------------------------------------

    @property
    def _at(self) -> int:
        """The position of the item that is not done."""
        return len(self._response.output)

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._name}{self._at:04x}"

    def _open_message(self) -> None:
        self._open(OutputMessage(id="", role="assistant", status="in_progress", content=[]), "msg")
        self._show_part(OutputText(text="", annotations=[], logprobs=[]), "msg")
        self._text_delta.item_id = self._item_id("msg")
        self._text_delta.output_index = self._at

    def _open_reasoning(self) -> None:
        item = ReasoningItem(
            id="", status="in_progress", summary=[], content=[], encrypted_content=None
        )
        self._open(item, "rs")
        self._show_part(ReasoningText(text=""), "rs")

    def _open_call(self, call_id: str, name: str) -> None:
        item = FunctionCall(id="", status="in_progress", call_id=call_id, name=name, arguments="")
        self._open(item, "fc")

    def _open(self, item: OutputItem, kind: str) -> None:
        if self._item is not None:
            self._close("completed")
        item.id = self._item_id(kind)
        self._item, self._texts, self._scores = item, [], []
        self._show(ItemAdded(sequence_number=self._next(), output_index=self._at, item=item))

    def _show_part(self, part: OutputText | ReasoningText, kind: str) -> None:
        self._show(
            PartAdded(
                sequence_number=self._next(),
                item_id=self._item_id(kind),
                output_index=self._at,
                content_index=0,
                part=part,
            )
        )

    def _close(self, status: ItemStatus) -> None:
        item, at, text = self._item, self._at, "".join(self._texts)
        assert item is not None, "an item is open"
        part: OutputText | ReasoningText | None = None
        if isinstance(item, FunctionCall):
            item.arguments = text
            self._show(
                ArgumentsDone(
                    sequence_number=self._next(),
                    item_id=item.id,
                    output_index=at,
                    name=item.name,
                    arguments=text,
                )
            )
        elif isinstance(item, OutputMessage):
            scores, self._unshown = [*self._scores, *self._unshown], []
            part = OutputText(text=text, annotations=[], logprobs=scores)
            item.content = [part]
            self._show(
                TextDone(
                    sequence_number=self._next(),
                    item_id=item.id,
                    output_index=at,
                    content_index=0,
                    text=text,
                    logprobs=scores,
                )
            )
        else:
            part = ReasoningText(text=text)
            item.content = [part]
            item.encrypted_content = encoded_reasoning(text) if self._encrypts else None
            self._show(
                ReasoningDone(
                    sequence_number=self._next(),
                    item_id=item.id,
                    output_index=at,
                    content_index=0,
                    text=text,
                )
            )
        if part is not None:
            self._show(
                PartDone(
                    sequence_number=self._next(),
                    item_id=item.id,
                    output_index=at,
                    content_index=0,
                    part=part,
                )
            )
        item.status = status
        self._show(ItemDone(sequence_number=self._next(), output_index=at, item=item))
        self._response.output.append(item)
        self._item = None

    # --- events -----------------------------------------------------------------------------------

    def _next(self) -> int:
        number = self._number
        self._number += 1
        return number

    def _show(self, event: ResponseEvent) -> None:
        if self._begun:  # an answer in one piece has no events
            self._events.append(event_bytes(event))

    def _taken(self) -> bytes:
        """The events since the last call."""
        data = b"".join(self._events)
        self._events.clear()
        return data

    def _note_scores(self, positions: Sequence[PositionLogprobs]) -> None:
        if self._logprobs is not None:
            self._unshown += chat_logprobs(positions, self._logprobs).content

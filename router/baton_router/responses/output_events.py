"""The items of a response's output as they grow, and the events that show it.

In: texts, thoughts and calls in their order. Out: the items, and events if a stream has begun.
Ids of items derive from the response's id and their position, so any router gives the same.
"""

from __future__ import annotations

from baton_router.openai.answers import ChatPosition
from baton_router.responses.event_log import EventLog
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
    ResponseCreated,
    ResponseEvent,
    ResponseInProgress,
    TextDone,
    event_bytes,
)
from baton_router.responses.items import encoded_reasoning
from baton_router.responses.records import (
    ID_PREFIX,
    FunctionCall,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
)


class OutputEvents:
    """The output of `response`, to which items are added. `encrypts`: reasoning has
    `encrypted_content`. `log` gets all events, and may have the first one already."""

    def __init__(self, response: Response, *, encrypts: bool, log: EventLog | None = None) -> None:
        self._response = response
        self._encrypts = encrypts
        self._log = log
        self._name = response.id.removeprefix(ID_PREFIX)
        self._events: list[bytes] = []
        self._number = 0 if log is None else log.count
        self._item: OutputItem | None = None  # the one that is not done
        self._texts: list[str] = []  # of this item
        self._scores: list[ChatPosition] = []  # of this item
        self._unshown: list[ChatPosition] = []  # logprobs of tokens that no event has shown
        self._begun = False
        # Reused for every event, since most of its fields stay the same.
        self._text_delta = OutputTextDelta(
            sequence_number=0,
            item_id="",
            output_index=0,
            content_index=0,
            delta="",
            logprobs=[],
        )

    def _begin(self) -> None:
        self._begun = True
        if not self._number:
            self._show(ResponseCreated(sequence_number=self._next(), response=self._response))
        self._show(ResponseInProgress(sequence_number=self._next(), response=self._response))

    def _add_text(self, text: str) -> None:
        if not isinstance(self._item, OutputMessage):
            self._open_message()
        self._texts.append(text)
        delta = self._text_delta
        delta.sequence_number, delta.delta = self._next(), text
        if self._unshown or delta.logprobs:
            delta.logprobs, self._unshown = self._unshown, []
            self._scores += delta.logprobs
        self._show(delta)

    def _add_reasoning(self, text: str) -> None:
        if not isinstance(self._item, ReasoningItem):
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

    def _add_arguments(self, text: str) -> None:
        self._texts.append(text)
        self._show(
            ArgumentsDelta(
                sequence_number=self._next(),
                item_id=self._item_id("fc"),
                output_index=self._at,
                delta=text,
            )
        )

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
        if self._log is not None:
            self._log.add(data)
        return data

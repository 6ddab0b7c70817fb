"""The events of a streamed response, as records, and their bytes.

Each event has its type twice, as clients expect it: as the event's name, and in its data. The
numbers of a stream's events begin at 0 and have no gaps.
"""

from __future__ import annotations

from baton_router.openai.answers import ChatPosition, Closed, one_line
from baton_router.responses.records import OutputItem, OutputText, ReasoningText, Response

Part = OutputText | ReasoningText


class _Numbered(Closed):
    sequence_number: int


class _OfResponse(_Numbered):
    response: Response


class ResponseCreated(_OfResponse, tag_field="type", tag="response.created"):
    pass


class ResponseInProgress(_OfResponse, tag_field="type", tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, tag_field="type", tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, tag_field="type", tag="response.incomplete"):
    pass


class ResponseFailed(_OfResponse, tag_field="type", tag="response.failed"):
    pass


class _OfItem(_Numbered):
    output_index: int
    item: OutputItem


class ItemAdded(_OfItem, tag_field="type", tag="response.output_item.added"):
    pass


class ItemDone(_OfItem, tag_field="type", tag="response.output_item.done"):
    pass


class _InItem(_Numbered):
    item_id: str
    output_index: int


class _InPart(_InItem):
    content_index: int


class PartAdded(_InPart, tag_field="type", tag="response.content_part.added"):
    part: Part


class PartDone(_InPart, tag_field="type", tag="response.content_part.done"):
    part: Part


class OutputTextDelta(_InPart, tag_field="type", tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatPosition]


class TextDone(_InPart, tag_field="type", tag="response.output_text.done"):
    text: str
    logprobs: list[ChatPosition]


class ReasoningDelta(_InPart, tag_field="type", tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_InPart, tag_field="type", tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_InItem, tag_field="type", tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_InItem, tag_field="type", tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class StreamError(_Numbered, tag_field="type", tag="error"):
    """An error of a stream that has shown nothing of a response yet."""

    code: str
    message: str
    param: str | None


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | OutputTextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | StreamError
)


def event_bytes(event: ResponseEvent) -> bytes:
    """The event as a server-sent event with its type as its name."""
    return b"event: %b\ndata: %b\n\n" % (_NAMES[type(event)], one_line(event))


def text_event_bytes(event: OutputTextDelta) -> bytes:
    """The same for the event that most streams consist of."""
    return b"event: response.output_text.delta\ndata: %b\n\n" % one_line(event)


def end_event(response: Response, number: int) -> ResponseEvent:
    """The last event of a stream that ends with this response."""
    if response.status == "completed":
        return ResponseCompleted(sequence_number=number, response=response)
    if response.status == "incomplete":
        return ResponseIncomplete(sequence_number=number, response=response)
    return ResponseFailed(sequence_number=number, response=response)


_NAMES = {kind: str(kind.__struct_config__.tag).encode() for kind in ResponseEvent.__args__}
# How the last event of a stream begins.
ENDS = tuple(
    b"event: %b\n" % _NAMES[kind]
    for kind in (ResponseCompleted, ResponseIncomplete, ResponseFailed)
)

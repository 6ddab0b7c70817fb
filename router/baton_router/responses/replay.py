"""The events of a response that has ended and whose stream was not kept.

In: the response. Out: the events of a stream that ends with it, in which each text is one delta.
The same response gives the same events, so a client can ask for those after one that it has.
"""

from __future__ import annotations

import msgspec

from baton_router.responses.events import end_event
from baton_router.responses.output_events import OutputEvents
from baton_router.responses.records import (
    FunctionCall,
    OutputItem,
    OutputMessage,
    ReasoningItem,
    Response,
)


class ReplayedResponse(OutputEvents):
    def __init__(self, ended: Response) -> None:
        begun = msgspec.structs.replace(
            ended,
            status="in_progress",
            output=[],
            usage=None,
            error=None,
            incomplete_details=None,
        )
        reasoning = [item for item in ended.output if isinstance(item, ReasoningItem)]
        super().__init__(begun, encrypts=any(item.encrypted_content for item in reasoning))
        self._ended = ended

    def events(self) -> bytes:
        """All events. Call once."""
        self._begin()
        for item in self._ended.output:
            self._replay(item)
        self._show(end_event(self._ended, self._next()))
        return self._taken()

    def _replay(self, item: OutputItem) -> None:
        if isinstance(item, FunctionCall):
            self._open_call(item.call_id, item.name)
            if item.arguments:
                self._add_arguments(item.arguments)
        elif isinstance(item, OutputMessage):
            self._open_message()
            for text in item.content:
                self._unshown = list(text.logprobs)
                if text.text:
                    self._add_text(text.text)
        else:
            self._open_reasoning()
            for thought in item.content:
                if thought.text:
                    self._add_reasoning(thought.text)
        self._close(item.status)

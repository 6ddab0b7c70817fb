"""Encodes the answer to one call: server-sent events, or one JSON object.

In: the deltas of the call's requests. Out: bytes. What takes long runs in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from baton_protocol.errors import ErrorRecord
from baton_router.openai.answers import CommonFields, CompletionTokensDetails, Usage
from baton_router.openai.call import Call, Shape
from baton_router.openai.choice_output import ChoiceOutput
from baton_router.openai.dialect import Dialect
from baton_router.requests.context import RequestContext
from baton_router.requests.long_work import LONG_PROMPT, in_thread_if_long
from baton_router.requests.output_queue import Batch
from baton_router.requests.prepared import Prepared

LONG_VECTORS = 1 << 18  # bytes; writing their numbers takes some milliseconds


class AnswerEncoder:
    """Encode only after the context has requests in flight."""

    def __init__(
        self, dialect: Dialect, call: Call, prepared: Sequence[Prepared], context: RequestContext
    ) -> None:
        self._dialect = dialect
        self._call = call
        self._prompts = [item.request.prompt_ids for item in prepared]
        self._parsing = prepared[0].parsing
        self._params = prepared[0].request.params
        self._scored = self._params.prompt_logprobs is not None
        self._context = context
        self._id = dialect.prefix + context.id
        self._created = int(time.time())
        self._shape: Shape | None = None
        self._collected = [ChoiceOutput() for _ in range(self._params.n * len(prepared))]

    # --- a stream ---------------------------------------------------------------------------------

    async def encode(self, batch: Batch) -> bytes:
        """The events of a batch."""
        if self.is_slow(batch):
            return await asyncio.to_thread(self.encode_now, batch)
        return self.encode_now(batch)

    def encode_now(self, batch: Batch) -> bytes:
        shape, n = self._shape or self._get_shape(), self._params.n
        return b"".join([shape.event(slot * n + delta.choice, delta) for slot, delta in batch])

    def is_slow(self, batch: Batch) -> bool:
        """Whether to encode in a thread: a long prompt's logprobs take half a second."""
        if self._scored and any(delta.prompt_logprobs for _, delta in batch):
            return True
        return self._shape is None and self._prompts_are_long()

    async def encode_end(self) -> bytes:
        """The last bytes of a stream that did not fail."""
        usage = await self._final_usage() if self._call.options.include_usage else None
        return self._get_shape().end(usage)

    def error_event(self, error: ErrorRecord) -> bytes:
        """The last bytes of a stream that failed."""
        if self._shape is None:
            return self._dialect.error_event(error)
        return self._shape.error_event(error)

    # --- an answer in one piece -------------------------------------------------------------------

    def collect(self, batch: Batch) -> None:
        for slot, delta in batch:
            self._collected[slot * self._params.n + delta.choice].add(delta)

    async def encode_whole(self) -> bytes:
        """The JSON of everything that was collected."""
        choices, usage = self._collected, await self._final_usage()
        scored = any(choice.logprobs or choice.prompt_logprobs for choice in choices)
        scored |= sum(len(choice.vector) for choice in choices) > LONG_VECTORS
        if scored or self._prompts_are_long():
            return await asyncio.to_thread(lambda: self._get_shape().answer(choices, usage))
        return self._get_shape().answer(choices, usage)

    # --- both -------------------------------------------------------------------------------------

    def _get_shape(self) -> Shape:
        """Make the shape at the first output, as a request may switch its model until then."""
        if self._shape is None:
            serving = self._context.in_flight[0].prepared.serving
            common = CommonFields(
                id=self._id,
                created=self._created,
                model=serving.name,
                system_fingerprint=serving.kind.fingerprint,
            )
            tokenizer = serving.model.tokenizer
            self._shape = self._call.shape(common, self._prompts, tokenizer, self._parsing)
        return self._shape

    def _prompts_are_long(self) -> bool:
        """Whether making the shape is slow: echoing the text of 100,000 ids takes 0.1 s."""
        requests = self._context.in_flight
        return sum(len(request.record.request.prompt_ids) for request in requests) > LONG_PROMPT

    async def _final_usage(self) -> Usage:
        """The call's usage, with reasoning tokens if the model's reasoning is separated."""
        usage, requests = self._context.usage(), self._context.in_flight
        if self._parsing is None:
            return usage
        choices = [ids for request in requests for ids in request.record.outputs]
        count = partial(
            self._parsing.reasoning_tokens,
            requests[0].prepared.serving.model.tokenizer,
            choices,
            skip_special=self._params.skip_special_tokens,
        )
        reasoning_tokens = await in_thread_if_long(sum(map(len, choices)), count)
        if reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(
                reasoning_tokens=reasoning_tokens
            )
        return usage

"""POST /v1/responses: a parsed body, and how it becomes a conversation.

In: a JSON body, and what was kept of the response that it continues. Out: a ResponseCall.
`RESPONSES` is the dialect; its routes are in `http/responses`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton_protocol.errors import ErrorRecord, InvalidRequest
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.answer_parsing import AnswerParsing
from baton_router.openai.answers import CommonFields
from baton_router.openai.call import Json, Options, Prompt, PromptIds, Truncation
from baton_router.openai.conversation import Conversation
from baton_router.openai.dialect import Dialect
from baton_router.openai.fields.table import gives, read_fields
from baton_router.openai.json_body import decode_object
from baton_router.openai.reasoning import requested_reasoning
from baton_router.openai.sampling import shared_values
from baton_router.openai.tools import requested_tools
from baton_router.responses.event_log import EventLog
from baton_router.responses.events import StreamError, event_bytes
from baton_router.responses.fields import (
    ANY_TEXT,
    ENCRYPTED,
    LOGPROBS,
    InputTokenFields,
    PromptFields,
    ResponseFields,
    shown_tools,
)
from baton_router.responses.items import messages_of
from baton_router.responses.records import ID_PREFIX, Response, ResponseStatus
from baton_router.responses.shape import ResponseShape
from baton_text.tokenizer import Tokenizer

NAMES = {"prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCall(Conversation):
    """A parsed body. `items` are its input; those of `previous`, the response that it continues,
    come before them (see `continued`). `echoed` are the fields of Response that repeat the body's.
    `encrypts`: reasoning has `encrypted_content`. `answered` gets the response at its end, `log`
    the events of a stream that is kept. `created`: when one in the background was asked for."""

    items: list[Json]
    instructions: str | None
    previous: str | None
    keeps: bool
    background: bool
    encrypts: bool
    echoed: Json
    answered: list[Response] = field(default_factory=list)
    log: EventLog | None = None
    created: int | None = None

    @classmethod
    def parse(cls, data: bytes | bytearray) -> ResponseCall:
        """Raise InvalidRequest naming the first wrong field; MalformedBody."""
        return cls.from_body(decode_object(data))

    @classmethod
    def from_body(cls, body: Json) -> ResponseCall:
        """Raise InvalidRequest naming the first wrong field."""
        fields = read_fields(ResponseFields, body)
        sampling = shared_values(fields)
        if fields.max_output_tokens is not None:
            sampling["max_tokens"] = fields.max_output_tokens
        included = fields.include or frozenset()
        if LOGPROBS in included or fields.top_logprobs:
            sampling["logprobs"] = fields.top_logprobs or 0
        return cls._of_fields(
            fields,
            sampling,
            grammar=next(iter(fields.grammars), None),
            keeps=fields.store,
            background=fields.background,
            encrypts=ENCRYPTED in included,
            echoed=_echoed(fields),
            log=EventLog() if fields.store and fields.stream else None,
        )

    @classmethod
    def of_prompt(cls, data: bytes | bytearray) -> ResponseCall:
        """The call with the prompt of this body, whose tokens are to be counted."""
        fields = read_fields(InputTokenFields, decode_object(data))
        return cls._of_fields(
            fields,
            shared_values(fields),
            grammar=None,
            keeps=False,
            background=False,
            encrypts=False,
            echoed={},
        )

    @classmethod
    def _of_fields(cls, fields: PromptFields, sampling: Json, **more: Any) -> ResponseCall:
        chosen, reasoning = fields.tool_choice, fields.reasoning
        effort = None if reasoning is None else reasoning.effort
        return cls(
            options=Options(
                model=fields.model,
                stream=fields.stream,
                include_usage=True,
                continuous_usage=False,
                return_token_ids=False,
            ),
            sampling=sampling,
            bad_words=fields.bad_words or (),
            special_tokens_requested=gives(fields, "skip_special_tokens"),
            tools=requested_tools(
                fields.offered,
                None if chosen is None else chosen.choice,
                parallel=fields.parallel_tool_calls,
            ),
            reasoning=requested_reasoning(effort, None, included=True),
            names=NAMES,
            messages=_with_instructions(fields.instructions, fields.input),
            template_kwargs={},
            add_generation_prompt=True,
            add_special_tokens=False,
            continues_prompt=False,
            truncation=Truncation(None, True) if fields.truncation == "auto" else None,
            priority=fields.priority or 0,
            items=fields.input,
            instructions=fields.instructions,
            previous=fields.previous_response_id,
            **more,
        )

    def continued(self, earlier: Sequence[Json]) -> ResponseCall:
        """The call with the items of the response that it continues: input, then output."""
        items = [*earlier, *self.items]
        messages = _with_instructions(self.instructions, items)
        return replace(self, items=items, messages=messages, previous=None)

    def forget_prompts(self) -> None:
        Conversation.forget_prompts(self)
        if not self.keeps:  # else they are kept with the answer
            self.items.clear()

    def prompts(self, model: PoolModel) -> list[Prompt]:
        if self.previous is not None:
            raise InvalidRequest(
                "previous_response_id works in POST /v1/responses alone; send all items as input",
                param="previous_response_id",
            )
        return Conversation.prompts(self, model)

    def response(self, common: CommonFields, status: ResponseStatus) -> Response:
        """The response without output."""
        return Response(
            id=common.id,
            object="response",
            created_at=common.created if self.created is None else self.created,
            status=status,
            model=common.model,
            output=[],
            usage=None,
            error=None,
            incomplete_details=None,
            **self.echoed,
        )

    def shape(
        self,
        common: CommonFields,
        prompts: PromptIds,
        tokenizer: Tokenizer,
        parsing: AnswerParsing | None = None,
    ) -> ResponseShape:
        return ResponseShape(
            self.response(common, "in_progress"),
            self.pieces(common, tokenizer, parsing),
            logprobs=self.sampling.get("logprobs"),
            encrypts=self.encrypts,
            answered=self.answered,
            log=self.log,
        )


def _with_instructions(instructions: str | None, items: Sequence[Json]) -> list[Json]:
    first = [] if instructions is None else [{"role": "system", "content": instructions}]
    return first + messages_of(items)


def _echoed(fields: ResponseFields) -> Json:
    """The fields of Response that repeat those of the body."""
    chosen, reasoning = fields.tool_choice, fields.reasoning
    return {
        "background": fields.background,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": fields.store,
        "temperature": fields.temperature,
        "text": (fields.text or ANY_TEXT).shown,
        "tool_choice": "auto" if chosen is None else chosen.shown,
        "tools": shown_tools(fields.tools),
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": fields.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }


def _error_event(error: ErrorRecord) -> bytes:
    return event_bytes(
        StreamError(sequence_number=0, code=error.code, message=error.message, param=error.param)
    )


RESPONSES = Dialect(
    route="/v1/responses",
    endpoint="responses",
    operation="chat",
    prefix=ID_PREFIX,
    parse=ResponseCall.parse,
    error_event=_error_event,
)

"""POST /v1/messages: the body as a conversation, and the JSON of its answers.

In: a JSON body. Out: one prompt, rendered by the model's chat template, and Anthropic's `message`
objects or events. The answer's text is parsed into blocks: thinking, text and calls. A block ends
where one of another kind begins; each call is a block of its own.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby
from typing import Any

import msgspec

from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Delta
from baton_protocol.sampling import FinishReason
from baton_router.anthropic.answers import (
    NO_INPUT,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    Message,
    MessageDelta,
    MessageEnd,
    MessagesError,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignatureDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    event,
)
from baton_router.anthropic.fields import (
    ROUTE,
    CountFields,
    MessagesFields,
    PromptFields,
    ThinkingFields,
)
from baton_router.anthropic.tools import requested_tools
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.answer_parsing import AnswerParsing
from baton_router.openai.answer_pieces import AnswerPieces
from baton_router.openai.answers import CommonFields, Usage, one_line
from baton_router.openai.call import Json, Options, Prompt, PromptIds
from baton_router.openai.choice_output import ChoiceOutput
from baton_router.openai.conversation import Conversation
from baton_router.openai.dialect import Dialect
from baton_router.openai.fields.table import read_fields
from baton_router.openai.json_body import decode_object
from baton_router.openai.reasoning import RequestedReasoning
from baton_router.openai.sampling import PARAMETERS, with_defaults
from baton_text.conversation import RAW_ARGUMENTS
from baton_text.parsers.parser import Piece, PieceKind
from baton_text.tokenizer import Tokenizer

SIGNATURE_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesCall(Conversation):
    """A parsed body. The answer has at most `max_tokens`, and no more than the context leaves."""

    max_tokens: int

    @classmethod
    def parse(cls, data: bytes | bytearray) -> MessagesCall:
        """Raise InvalidRequest naming the first wrong field; MalformedBody."""
        return cls.from_body(decode_object(data))

    @classmethod
    def from_body(cls, body: Json) -> MessagesCall:
        """Raise InvalidRequest naming the first wrong field."""
        fields = read_fields(MessagesFields, body)
        given = vars(fields)
        sampling = {name: given[name] for name in given.keys() & PARAMETERS - {"max_tokens"}}
        if fields.stop_sequences:
            sampling["stop"] = fields.stop_sequences
        return cls._of(
            fields,
            sampling,
            stream=fields.stream,
            max_tokens=fields.max_tokens,
            priority=fields.priority or 0,
        )

    @classmethod
    def parse_counted(cls, data: bytes | bytearray) -> MessagesCall:
        """The call whose tokens are counted. Raise as `parse` does."""
        return cls.counted(decode_object(data))

    @classmethod
    def counted(cls, body: Json) -> MessagesCall:
        """Raise InvalidRequest naming the first wrong field."""
        fields = read_fields(CountFields, body)
        return cls._of(fields, {}, stream=False, max_tokens=0, priority=0)

    @classmethod
    def _of(
        cls, fields: PromptFields, sampling: Json, *, stream: bool, max_tokens: int, priority: int
    ) -> MessagesCall:
        continues = fields.messages[-1]["role"] == "assistant"
        system = [{"role": "system", "content": fields.system}] if fields.system else []
        effort = None if fields.output_config is None else fields.output_config.effort
        return cls(
            options=Options(
                model=fields.model,
                stream=stream,
                include_usage=True,
                continuous_usage=False,
                return_token_ids=False,
                generates=max_tokens > 0,
            ),
            sampling=with_defaults(sampling),
            bad_words=(),
            special_tokens_requested=False,
            grammar=fields.grammar,
            tools=requested_tools(fields.tools, fields.tool_choice),
            reasoning=_reasoning(fields.thinking, effort),
            messages=system + fields.messages,
            template_kwargs=fields.chat_template_kwargs or {},
            add_generation_prompt=not continues,
            add_special_tokens=False,
            continues_prompt=continues,
            truncation=None,
            priority=priority,
            names={"prompt": "messages"},
            # Not a parameter: a client must name a number, also if the context leaves fewer tokens.
            # Nodes must generate at least one.
            default_max_tokens=max(1, max_tokens),
            max_tokens=max_tokens,
        )

    def parsing(self, model: PoolModel, prompts: Sequence[Prompt]) -> AnswerParsing | None:
        call = self
        if model.reasoning_parser is None:  # then there is no thinking to bound
            call = replace(self, reasoning=replace(self.reasoning, budget=None))
        return Conversation.parsing(call, model, prompts)

    def shape(
        self,
        common: CommonFields,
        prompts: PromptIds,
        tokenizer: Tokenizer,
        parsing: AnswerParsing | None = None,
    ) -> MessagesShape:
        pieces = self.pieces(common, tokenizer, parsing)
        return MessagesShape(common, len(prompts[0]), self.max_tokens, pieces)


def _reasoning(thinking: ThinkingFields | None, effort: str | None) -> RequestedReasoning:
    kwargs: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if thinking is None:
        return RequestedReasoning(kwargs=kwargs)
    if thinking.type != "adaptive":
        kwargs["enable_thinking"] = thinking.type == "enabled"
    disabled = thinking.type == "disabled"
    included = not disabled and thinking.display != "omitted"
    budget = None if disabled else thinking.budget_tokens
    return RequestedReasoning(included, budget, kwargs, "thinking.budget_tokens")


class MessagesShape:
    """The JSON of one answer. In a stream it remembers the open block."""

    def __init__(
        self, common: CommonFields, prompt_tokens: int, max_tokens: int, pieces: AnswerPieces
    ) -> None:
        self._pieces = pieces
        self._max_tokens = max_tokens
        self._generated = 0
        self._stopped: MessageEnd | None = None
        self._message = Message(
            id=common.id,
            role="assistant",
            model=common.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=MessageUsage(input_tokens=prompt_tokens, output_tokens=0),
        )
        self._begun = False
        self._open: PieceKind | None = None  # of the last block's pieces
        self._index = -1  # of the last block
        self._signer = blake2b(digest_size=SIGNATURE_BYTES)
        # Reused for every event of text, as most of its fields stay the same.
        self._text = TextDelta(text="")
        self._delta = BlockDelta(index=0, delta=self._text)

    def event(self, index: int, delta: Delta) -> bytes:
        self._generated += len(delta.ids)
        data = b""
        if not self._begun:
            self._begun = True
            data = event(MessageStart(message=self._message))
        for piece in self._pieces.of_delta(index, delta):
            data += self._piece_event(index, piece)
        if delta.finish is not None:
            data += self._end_block()
            self._stopped = self._stop(index, delta.finish, delta.stop, self._generated)
        return data

    def end(self, usage: Usage | None) -> bytes:
        assert usage is not None, "Options.include_usage is set"
        assert self._stopped is not None, "a stream ends after its choice"
        ended = MessageDelta(delta=self._stopped, usage=MessageUsage.of(usage))
        return event(ended) + event(MessageStop())

    def error_event(self, error: ErrorRecord) -> bytes:
        return event(MessagesError.of(error))

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes:
        [choice] = choices
        message = self._message
        message.content = self._blocks(self._pieces.of_choice(0, choice))
        stopped = self._stop(0, choice.finish_reason, choice.stop, len(choice.ids))
        message.stop_reason, message.stop_sequence = stopped.stop_reason, stopped.stop_sequence
        message.usage = MessageUsage.of(usage)
        return msgspec.json.encode(message)

    # --- a stream ---------------------------------------------------------------------------------

    def _piece_event(self, index: int, piece: Piece) -> bytes:
        kind, text, number = piece
        if kind == "content" == self._open:
            self._text.text = text
            return b"event: content_block_delta\ndata: %b\n\n" % one_line(self._delta)
        if kind == "call":
            use = ToolUseBlock(id=self._pieces.call_id(index, number), name=text, input=NO_INPUT)
            return self._begin_block("arguments", use)
        if kind == "arguments":
            return event(BlockDelta(index=self._index, delta=InputDelta(partial_json=text)))
        if kind == "reasoning":
            begin = b""
            if self._open != "reasoning":
                self._signer = blake2b(digest_size=SIGNATURE_BYTES)
                begin = self._begin_block(kind, ThinkingBlock(thinking="", signature=""))
            self._signer.update(text.encode())
            return begin + event(BlockDelta(index=self._index, delta=ThinkingDelta(thinking=text)))
        begin = self._begin_block(kind, TextBlock(text=""))
        self._delta.index = self._index
        return begin + self._piece_event(index, piece)

    def _begin_block(self, kind: PieceKind, block: Block) -> bytes:
        data = self._end_block()
        self._open = kind
        self._index += 1
        return data + event(BlockStart(index=self._index, content_block=block))

    def _end_block(self) -> bytes:
        if self._open is None:
            return b""
        data = b""
        if self._open == "reasoning":
            signature = SignatureDelta(signature=_signature(self._signer.digest()))
            data = event(BlockDelta(index=self._index, delta=signature))
        self._open = None
        return data + event(BlockStop(index=self._index))

    # --- both -------------------------------------------------------------------------------------

    def _blocks(self, pieces: Sequence[Piece]) -> list[Block]:
        arguments: dict[int, list[str]] = {}
        for kind, text, number in pieces:
            if kind == "arguments":
                arguments.setdefault(number, []).append(text)
        blocks: list[Block] = []
        others = [piece for piece in pieces if piece.kind != "arguments"]
        for kind, run in groupby(others, key=lambda piece: piece.kind):
            if kind == "call":
                for _, name, number in run:
                    called = _input("".join(arguments.get(number, ())))
                    call_id = self._pieces.call_id(0, number)
                    blocks.append(ToolUseBlock(id=call_id, name=name, input=called))
                continue
            text = "".join(piece.text for piece in run)
            if kind == "content":
                blocks.append(TextBlock(text=text))
            else:
                digest = blake2b(text.encode(), digest_size=SIGNATURE_BYTES).digest()
                blocks.append(ThinkingBlock(thinking=text, signature=_signature(digest)))
        return blocks

    def _stop(
        self, index: int, finish: FinishReason, stop: str | int | None, generated: int
    ) -> MessageEnd:
        reason: StopReason = "end_turn"
        if finish == "length":
            fits = generated < self._max_tokens
            reason = "model_context_window_exceeded" if fits else "max_tokens"
        elif isinstance(stop, str):
            reason = "stop_sequence"
        elif self._pieces.ends_in_calls(index, finish):
            reason = "tool_use"
        return MessageEnd(stop_reason=reason, stop_sequence=stop if isinstance(stop, str) else None)


def _signature(digest: bytes) -> str:
    """A signature of thinking. Nothing checks it: clients need one, and a failover must not change
    it."""
    return b64encode(digest).decode()


def _input(text: str) -> msgspec.Raw:
    """The call's arguments as an object, whatever their text is."""
    try:
        if isinstance(msgspec.json.decode(text or "{}"), dict):
            return msgspec.Raw((text or "{}").encode())
    except (msgspec.MsgspecError, RecursionError):
        pass
    return msgspec.Raw(msgspec.json.encode({RAW_ARGUMENTS: text}))


def _failure(error: ErrorRecord, request_id: str) -> MessagesError:
    return MessagesError.of(error, request_id)


def _failure_event(error: ErrorRecord) -> bytes:
    return event(MessagesError.of(error))


MESSAGES = Dialect(
    route=ROUTE,
    endpoint="messages",
    operation="chat",
    prefix="msg_",
    parse=MessagesCall.parse,
    error_body=_failure,
    error_event=_failure_event,
    waiting=event(Ping()),
    id_header="request-id",
)

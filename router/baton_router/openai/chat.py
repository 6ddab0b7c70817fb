"""POST /v1/chat/completions: the body's fields, and the JSON of its answers.

In: a JSON body. Out: one prompt, rendered by the model's chat template, and
`chat.completion(.chunk)` objects. As in vLLM, `return_token_ids` puts the prompt's ids at the top
level (of a stream's first chunk) and `token_ids` into each choice; answers in one piece may have
`prompt_logprobs`. These fields are null if the client did not ask for them.

If the client sends tools, or the router can separate the model's reasoning, each choice's text is
parsed (see `answer_parsing`). An event then shows what its delta adds to reasoning, content and
calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
from msgspec import UNSET

from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs
from baton_router.openai.answer_parsing import AnswerParsing
from baton_router.openai.answer_pieces import AnswerPieces, text_of
from baton_router.openai.answers import (
    DONE,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatFinish,
    ChatLogprobs,
    ChatMessage,
    CommonFields,
    ErrorAnswer,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    event,
)
from baton_router.openai.call import Json, Options, PromptIds, Truncation
from baton_router.openai.choice_output import ChoiceOutput, prompt_positions
from baton_router.openai.conversation import Conversation
from baton_router.openai.dialect import Dialect
from baton_router.openai.fields.chat import ChatFields
from baton_router.openai.fields.table import gives, read_fields
from baton_router.openai.json_body import decode_object
from baton_router.openai.logprobs import chat_logprobs, prompt_logprobs, shown_logprobs
from baton_router.openai.reasoning import requested_reasoning
from baton_router.openai.sampling import limit_field, sampling_values
from baton_router.openai.stream_usage import StreamUsage
from baton_router.openai.tools import requested_tools
from baton_text.parsers.parser import Piece
from baton_text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall(Conversation):
    """A parsed chat body. `echoed` is the text put before each choice's generated text."""

    echoed: str = ""

    @classmethod
    def parse(cls, data: bytes | bytearray) -> ChatCall:
        """Raise InvalidRequest naming the first wrong field; MalformedBody."""
        return cls.from_body(decode_object(data))

    @classmethod
    def from_body(cls, body: Json) -> ChatCall:
        """Raise InvalidRequest naming the first wrong field."""
        fields = read_fields(ChatFields, body)
        return cls.from_fields(fields, fields.messages)

    @classmethod
    def from_fields(cls, fields: ChatFields, messages: list[Json], **more: Any) -> Self:
        """The call about this conversation; `more` are fields of a subclass."""
        sampling = sampling_values(fields)
        if fields.logprobs or fields.logprob_token_ids:
            sampling["logprobs"] = fields.top_logprobs or 0
        last, begins = messages[-1], fields.begins_answer
        echoes = fields.echo and (last["role"] == "assistant" or not begins)
        return cls(
            options=Options.from_fields(fields),
            sampling=sampling,
            bad_words=fields.bad_words or (),
            special_tokens_requested=gives(fields, "skip_special_tokens"),
            grammar=next(iter(fields.grammars()), None),
            tools=requested_tools(
                fields.tools, fields.tool_choice, parallel=fields.parallel_tool_calls
            ),
            reasoning=requested_reasoning(
                fields.reasoning_effort,
                fields.thinking_token_budget,
                included=fields.include_reasoning,
            ),
            names={"prompt": "messages", "max_tokens": limit_field(fields)},
            messages=messages,
            template_kwargs=fields.template_kwargs,
            add_generation_prompt=begins,
            add_special_tokens=fields.add_special_tokens,
            continues_prompt=fields.continue_final_message,
            truncation=Truncation.from_fields(fields),
            priority=fields.priority or 0,
            echoed=last["content"] if echoes else "",
            **more,
        )

    def shape(
        self,
        common: CommonFields,
        prompts: PromptIds,
        tokenizer: Tokenizer,
        parsing: AnswerParsing | None = None,
    ) -> ChatShape:
        if parsing is None or not self.sampling["detokenize"]:
            return ChatShape(self, common, prompts[0])
        return ParsedChatShape(self, common, prompts[0], self.pieces(common, tokenizer, parsing))


class ChatShape:
    """The JSON of an answer whose text is its content. It remembers which choices have begun."""

    def __init__(self, call: ChatCall, common: CommonFields, prompt_ids: Sequence[int]) -> None:
        self._common = common
        self._ids = call.options.return_token_ids
        self._names_are_ids = call.options.token_id_names
        self._echoed = call.echoed
        self._logprobs = shown_logprobs(call.sampling.get("logprobs"))
        self._prompt_logprobs = shown_logprobs(call.sampling.get("prompt_logprobs"))
        self._prompt_ids = prompt_ids
        self._begun: set[int] = set()
        counts = [len(prompt_ids)] * int(call.sampling.get("n", 1))
        self._usage = StreamUsage(call.options, counts)
        # Reused for every event, since most of its fields stay the same.
        self._chunk = ChatCompletionChunk(
            **common.shared(),
            object="chat.completion.chunk",
            choices=[],
            usage=self._usage.default,
        )

    def event(self, index: int, delta: Delta) -> bytes:
        self._usage.count_delta(index, delta)
        if not (delta.text or delta.finish or self._ids or self._logprobs is not None):
            return b""
        return self._event(index, delta, ChatDelta(content=delta.text), delta.finish)

    def _event(
        self, index: int, delta: Delta, shown: ChatDelta, finish: ChatFinish | None
    ) -> bytes:
        chunk, earlier = self._chunk, b""
        if index not in self._begun:
            earlier = self._begin_before(index, delta)
        chunk.prompt_token_ids = UNSET
        if index not in self._begun:
            chunk.prompt_token_ids = self._prompt_ids if self._ids and not self._begun else None
            shown.role = "assistant"
            if self._echoed:
                shown.content = self._echoed + (shown.content or "")
            self._begun.add(index)
        choice = ChatChunkChoice(
            index=index,
            delta=shown,
            logprobs=self._scores(delta.logprobs),
            finish_reason=finish,
            token_ids=delta.ids if self._ids else None,
            stop_reason=UNSET if delta.finish is None else delta.stop,
        )
        chunk.choices = [choice]
        if self._usage.continuous:
            chunk.usage = self._usage.usage_of(index)
        return earlier + event(chunk)

    def _begin_before(self, index: int, delta: Delta) -> bytes:
        """The first events of the choices before this one whose text is held back: clients such as
        OpenAI's count on the order in which choices begin."""
        missing = [each for each in range(index) if each not in self._begun]
        if not missing:
            return b""
        empty = Delta(delta.request, delta.attempt, delta.choice, 0)
        return b"".join(self._event(each, empty, ChatDelta(content=""), None) for each in missing)

    def end(self, usage: Usage | None) -> bytes:
        if usage is None:
            return DONE
        chunk = self._chunk
        chunk.choices, chunk.usage, chunk.prompt_token_ids = [], usage, UNSET
        return event(chunk) + DONE

    def error_event(self, error: ErrorRecord) -> bytes:
        return event(ErrorAnswer.of(error))

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes:
        scores = None
        if self._prompt_logprobs is not None:
            scores = prompt_logprobs(prompt_positions(choices), self._prompt_logprobs)
        answer = ChatCompletion(
            **self._common.shared(),
            object="chat.completion",
            choices=[self.choice(index, choice) for index, choice in enumerate(choices)],
            usage=usage,
            prompt_token_ids=self._prompt_ids if self._ids else None,
            prompt_logprobs=scores,
        )
        return msgspec.json.encode(answer)

    def choice(self, index: int, choice: ChoiceOutput) -> ChatChoice:
        """A whole choice of an answer in one piece."""
        message, finish = self._message(index, choice)
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._scores(choice.logprobs),
            finish_reason=finish,
            stop_reason=choice.stop,
            token_ids=choice.ids if self._ids else None,
        )

    def _message(self, index: int, choice: ChoiceOutput) -> tuple[ChatMessage, ChatFinish]:
        content = self._echoed + choice.text
        message = ChatMessage(role="assistant", content=content, refusal=None)
        return message, choice.finish_reason

    def _scores(self, positions: Sequence[PositionLogprobs]) -> ChatLogprobs | None:
        if self._logprobs is None:
            return None
        return chat_logprobs(positions, self._logprobs, self._names_are_ids)


class ParsedChatShape(ChatShape):
    """The JSON of an answer whose text is parsed into reasoning, content and calls."""

    def __init__(
        self,
        call: ChatCall,
        common: CommonFields,
        prompt_ids: Sequence[int],
        pieces: AnswerPieces,
    ) -> None:
        super().__init__(call, common, prompt_ids)
        self._pieces = pieces

    def event(self, index: int, delta: Delta) -> bytes:
        self._usage.count_delta(index, delta)
        finish = delta.finish
        shown = self._delta(index, self._pieces.of_delta(index, delta))
        if shown is None:
            if not (finish or self._ids or self._logprobs is not None):
                return b""
            shown = ChatDelta()
        ended = self._pieces.finish(index, finish) if finish else None
        return self._event(index, delta, shown, ended)

    def _message(self, index: int, choice: ChoiceOutput) -> tuple[ChatMessage, ChatFinish]:
        pieces = self._pieces.of_choice(index, choice)
        content = self._echoed + text_of(pieces, "content")
        reasoning = text_of(pieces, "reasoning")
        calls = self._calls(index, pieces)
        message = ChatMessage(
            role="assistant",
            content=content if content or not (calls or reasoning) else None,
            refusal=None,
            tool_calls=calls or UNSET,
        )
        if self._pieces.separates_reasoning:
            message.reasoning_content = message.reasoning = reasoning or None
        return message, self._pieces.finish(index, choice.finish_reason)

    def _delta(self, index: int, pieces: Sequence[Piece]) -> ChatDelta | None:
        """The content of an event for these pieces; None without pieces."""
        if not pieces:
            return None
        shown = ChatDelta()
        calls: dict[int, ToolCallDelta] = {}
        for kind, text, number in pieces:
            if kind == "content":
                shown.content = (shown.content or "") + text
            elif kind == "reasoning":
                shown.reasoning = shown.reasoning_content = (shown.reasoning or "") + text
            elif kind == "call":
                calls[number] = ToolCallDelta(
                    index=number,
                    id=self._pieces.call_id(index, number),
                    type="function",
                    function=FunctionDelta(name=text, arguments=""),
                )
            elif number in calls:
                calls[number].function.arguments += text
            else:
                calls[number] = ToolCallDelta(index=number, function=FunctionDelta(arguments=text))
        if calls:
            shown.tool_calls = list(calls.values())
        return shown

    def _calls(self, index: int, pieces: Sequence[Piece]) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for kind, text, number in pieces:
            if kind == "call":
                function = CalledFunction(name=text, arguments="")
                call_id = self._pieces.call_id(index, number)
                calls.append(ToolCall(id=call_id, type="function", function=function))
            elif kind == "arguments":
                calls[number].function.arguments += text
        return calls


CHAT = Dialect(
    route="/v1/chat/completions",
    endpoint="chat",
    operation="chat",
    prefix="chatcmpl-",
    parse=ChatCall.parse,
)

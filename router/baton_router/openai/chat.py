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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs
from baton_protocol.sampling import FinishReason
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.answer_parsing import AnswerParsing, ChoiceReader
from baton_router.openai.answers import (
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
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    event,
)
from baton_router.openai.call import Json, Options, Prompt, PromptIds, TextPrompt, Truncation
from baton_router.openai.choice_output import ChoiceOutput, prompt_positions
from baton_router.openai.fields.chat import ChatFields
from baton_router.openai.fields.table import gives, read_fields
from baton_router.openai.json_body import decode_object
from baton_router.openai.logprobs import chat_logprobs, prompt_logprobs, shown_logprobs
from baton_router.openai.reasoning import RequestedReasoning, requested_reasoning
from baton_router.openai.sampling import limit_field, sampling_values
from baton_router.openai.stream_usage import StreamUsage
from baton_router.openai.structured_output import RequestedGrammar
from baton_router.openai.tools import RequestedTools, calls_size, requested_tools
from baton_text.parsers.parser import Piece, PieceKind
from baton_text.tokenizer import Tokenizer

MESSAGE_CHARS = 30  # cost of rendering a message, in characters


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A parsed chat body. `echoed` is the text put before each choice's generated text.
    `special_tokens_requested`: the client set `skip_special_tokens`."""

    options: Options
    sampling: Json
    bad_words: tuple[str, ...]
    special_tokens_requested: bool
    grammar: RequestedGrammar | None
    tools: RequestedTools | None
    reasoning: RequestedReasoning
    messages: list[Json]
    template_kwargs: Json
    add_generation_prompt: bool
    add_special_tokens: bool
    continues_prompt: bool
    truncation: Truncation | None
    priority: int
    echoed: str
    names: Mapping[str, str]
    default_max_tokens: int | None = None

    @classmethod
    def parse(cls, data: bytes | bytearray) -> ChatCall:
        """Raise InvalidRequest naming the first wrong field; MalformedBody."""
        return cls.from_body(decode_object(data))

    @classmethod
    def from_body(cls, body: Json) -> ChatCall:
        """Raise InvalidRequest naming the first wrong field."""
        fields = read_fields(ChatFields, body)
        sampling = sampling_values(fields)
        if fields.logprobs:
            sampling["logprobs"] = fields.top_logprobs or 0
        last, begins = fields.messages[-1], fields.begins_answer
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
            messages=fields.messages,
            template_kwargs=fields.template_kwargs,
            add_generation_prompt=begins,
            add_special_tokens=fields.add_special_tokens,
            continues_prompt=fields.continue_final_message,
            truncation=Truncation.from_fields(fields),
            priority=fields.priority or 0,
            echoed=last["content"] if echoes else "",
        )

    @property
    def rendered(self) -> int:
        documents = self.template_kwargs.get("documents")
        return (
            sum(
                MESSAGE_CHARS + len(message["content"]) + calls_size(f"messages[{at}]", message)
                for at, message in enumerate(self.messages)
            )
            + (len(msgspec.json.encode(documents)) if documents else 0)
            + (0 if self.tools is None else self.tools.size)
        )

    def forget_prompts(self) -> None:
        self.messages.clear()
        self.template_kwargs.clear()

    def prompts(self, model: PoolModel) -> list[Prompt]:
        text = model.template.render(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continues_prompt,
            tools=None if self.tools is None else self.tools.template_forms(),
            **{**self.reasoning.kwargs, **self.template_kwargs},
        )
        return [TextPrompt(text, self.add_special_tokens)]

    def parsing(self, model: PoolModel, prompts: Sequence[Prompt]) -> AnswerParsing | None:
        [prompt] = prompts
        assert isinstance(prompt, TextPrompt), "a template makes text"
        final = self.messages[-1]["content"] if self.continues_prompt else None
        return AnswerParsing.for_chat(
            model, self.tools, self.reasoning, self.grammar, prompt.text, final
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
        return ParsedChatShape(self, common, prompts[0], tokenizer, parsing)


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
        chunk = self._chunk
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
        return event(chunk)

    def usage_event(self, usage: Usage) -> bytes:
        chunk = self._chunk
        chunk.choices, chunk.usage, chunk.prompt_token_ids = [], usage, UNSET
        return event(chunk)

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes:
        scores = None
        if self._prompt_logprobs is not None:
            scores = prompt_logprobs(prompt_positions(choices), self._prompt_logprobs)
        answer = ChatCompletion(
            **self._common.shared(),
            object="chat.completion",
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=usage,
            prompt_token_ids=self._prompt_ids if self._ids else None,
            prompt_logprobs=scores,
        )
        return msgspec.json.encode(answer)

    def _choice(self, index: int, choice: ChoiceOutput) -> ChatChoice:
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
        tokenizer: Tokenizer,
        parsing: AnswerParsing,
    ) -> None:
        super().__init__(call, common, prompt_ids)
        self._tokenizer = tokenizer
        self._parsing = parsing
        self._readers: dict[int, ChoiceReader] = {}
        chosen, skips = call.special_tokens_requested, call.sampling["skip_special_tokens"]
        self._sees_markers = not (parsing.reads_special and chosen and skips)
        # The text has special tokens only for the parser, and the client wants its stop included.
        self._hides_end = (
            parsing.reads_special
            and not call.special_tokens_requested
            and call.sampling["include_stop_str_in_output"]
        )

    def event(self, index: int, delta: Delta) -> bytes:
        self._usage.count_delta(index, delta)
        reader, finish = self._reader(index), delta.finish
        text = self._shown(delta.text, delta.ids, finish)
        shown = _delta_of(reader, reader.read_text(text, ended=finish is not None))
        if shown is None:
            if not (finish or self._ids or self._logprobs is not None):
                return b""
            shown = ChatDelta()
        return self._event(index, delta, shown, self._finish(reader, finish) if finish else None)

    def _message(self, index: int, choice: ChoiceOutput) -> tuple[ChatMessage, ChatFinish]:
        reader, finish = self._reader(index), choice.finish_reason
        pieces = reader.read_text(self._shown(choice.text, choice.ids, finish), ended=True)
        content = self._echoed + _text_of(pieces, "content")
        reasoning = _text_of(pieces, "reasoning")
        calls = _calls_of(reader, pieces)
        message = ChatMessage(
            role="assistant",
            content=content if content or not (calls or reasoning) else None,
            refusal=None,
            tool_calls=calls or UNSET,
        )
        if self._parsing.reasoning_parser is not None:
            message.reasoning_content = message.reasoning = reasoning or None
        return message, self._finish(reader, finish)

    def _reader(self, index: int) -> ChoiceReader:
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = ChoiceReader(
                self._parsing, f"{self._common.id}/{index}", sees_markers=self._sees_markers
            )
        return reader

    def _finish(self, reader: ChoiceReader, finish: FinishReason) -> ChatFinish:
        if finish != "stop" or not self._parsing.calls_end:
            return finish
        return "tool_calls" if reader.has_whole_calls else finish

    def _shown(self, text: str, ids: Sequence[int], finish: FinishReason | None) -> str:
        """The text, without its final special token if the client sees no special tokens."""
        if self._hides_end and finish == "stop" and ids and ids[-1] in self._tokenizer.special_ids:
            return text.removesuffix(self._tokenizer.token_text(ids[-1]))
        return text


def _delta_of(reader: ChoiceReader, pieces: Sequence[Piece]) -> ChatDelta | None:
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
            function = FunctionDelta(name=text, arguments="")
            calls[number] = ToolCallDelta(
                index=number, id=reader.call_id(number), type="function", function=function
            )
        elif number in calls:
            calls[number].function.arguments += text
        else:
            calls[number] = ToolCallDelta(index=number, function=FunctionDelta(arguments=text))
    if calls:
        shown.tool_calls = list(calls.values())
    return shown


def _text_of(pieces: Sequence[Piece], kind: PieceKind) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def _calls_of(reader: ChoiceReader, pieces: Sequence[Piece]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for kind, text, number in pieces:
        if kind == "call":
            function = CalledFunction(name=text, arguments="")
            calls.append(ToolCall(id=reader.call_id(number), type="function", function=function))
        elif kind == "arguments":
            calls[number].function.arguments += text
    return calls

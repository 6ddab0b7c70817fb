"""POST /v1/completions: the body's fields, and the JSON of its answers.

In: a JSON body whose prompt is a text, a list of texts, token ids or a list of id lists. Each
prompt is a request, and choices are numbered prompt * n + choice. Out: `text_completion` objects.
With `echo`, a choice's text (in a stream, its first chunk's) starts with the prompt, and its
logprobs with the prompt's. With `return_token_ids`, each choice (in a stream, its first chunk) has
`prompt_token_ids`, and each choice or chunk `token_ids`. With `prompt_logprobs`, each choice has
those. All three are null if the client did not ask for them, as in vLLM. With `best_of` above n, an
answer shows the n choices whose logprobs have the largest sums.

A token's `text_offset` depends only on the ids, not on nodes or deltas. Text after a stop string is
cut off. In an answer in one piece, the tokens there get the offset of the text's end; a stream,
which has sent such tokens before, gives the offsets they would have had.

`echo` repeats a text prompt as written. It shows a prompt of ids as the text of all ids, including
special ones: `skip_special_tokens` applies to generated text only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
from msgspec import UNSET

from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs, TokenLogprob
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.answer_parsing import AnswerParsing
from baton_router.openai.answers import (
    DONE,
    CommonFields,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    ErrorAnswer,
    Usage,
    event,
)
from baton_router.openai.call import (
    GENERATES,
    Json,
    Options,
    Prompt,
    PromptIds,
    Tasks,
    TextPrompt,
    Truncation,
)
from baton_router.openai.choice_output import ChoiceOutput, prompt_positions
from baton_router.openai.dialect import Dialect
from baton_router.openai.fields.completions import CompletionFields
from baton_router.openai.fields.table import gives, read_fields
from baton_router.openai.json_body import decode_object
from baton_router.openai.logprobs import completion_logprobs, prompt_logprobs, shown_logprobs
from baton_router.openai.sampling import limit_field, sampling_values
from baton_router.openai.stream_usage import StreamUsage
from baton_router.openai.structured_output import RequestedGrammar
from baton_text.detokenizer import TextReader, context_of
from baton_text.offsets import TextOffsets, offsets_in
from baton_text.tokenizer import Tokenizer

Positions = Sequence[PositionLogprobs]
DEFAULT_MAX_TOKENS = 16


class Echo:
    """The prompt as `echo` shows it. `first` is the prompt's first token, which has no probability.
    With `answered`, generated text follows, and it completes a character that the ids only
    begin."""

    def __init__(
        self, given: Prompt, ids: Sequence[int], tokenizer: Tokenizer, *, answered: bool
    ) -> None:
        self._given = given
        self._ids = ids
        self._tokenizer = tokenizer
        raw = tokenizer.token_bytes(ids[0])
        self.first = TokenLogprob(ids[0], 0.0, text=tokenizer.token_text(ids[0]), raw=raw)
        if isinstance(given, TextPrompt):
            self.text = given.text
        else:
            reader = TextReader(tokenizer, skip_special=False)
            self.text = reader.read(ids) + ("" if answered else reader.finish())

    @cached_property
    def offsets(self) -> list[int]:
        """The offset of each token in `text`. Takes 2 us per token: use a thread if long."""
        if isinstance(self._given, TextPrompt):
            given = self._given
            return offsets_in(self._tokenizer, given.text, self._ids, given.add_special_tokens)
        placed = TextOffsets(self._tokenizer, skip_special=False)
        return [placed.push(token_id) for token_id in self._ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """A parsed completion body. `logprobs` and `prompt_logprobs` are the client's own values;
    `echo` with `logprobs` may raise the latter in `sampling`. `shown` is the number of choices that
    the answer shows of each prompt, None for all."""

    options: Options
    sampling: Json
    bad_words: tuple[str, ...]
    special_tokens_requested: bool
    grammar: RequestedGrammar | None
    given: list[Prompt]
    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None
    shown: int | None
    truncation: Truncation | None
    priority: int
    names: Mapping[str, str]
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS
    continues_prompt: bool = True

    @classmethod
    def parse(cls, data: bytes | bytearray) -> CompletionCall:
        """Raise InvalidRequest naming the first wrong field; MalformedBody."""
        return cls.from_body(decode_object(data))

    @classmethod
    def from_body(cls, body: Json) -> CompletionCall:
        """Raise InvalidRequest naming the first wrong field."""
        fields = read_fields(CompletionFields, body)
        sampling = sampling_values(fields)
        # max_tokens 0 asks about the prompt alone, but nodes must generate at least one token.
        generates = sampling.get("max_tokens") != 0
        if not generates:
            sampling["max_tokens"] = 1
        names = {"max_tokens": limit_field(fields)}
        requested, logprobs = fields.prompt_logprobs, fields.logprobs
        if logprobs is None and fields.logprob_token_ids:
            logprobs = 0
        if logprobs is not None:
            sampling["logprobs"] = logprobs
            if fields.echo and (
                requested is None or shown_logprobs(requested) < shown_logprobs(logprobs)
            ):
                sampling["prompt_logprobs"] = logprobs
                names["prompt_logprobs"] = "logprobs"
        shown = None
        if fields.best_of is not None and fields.best_of > (fields.n or 1):
            shown, sampling["n"] = fields.n or 1, fields.best_of
            sampling.setdefault("logprobs", 0)  # their sums decide
        special = fields.add_special_tokens
        return cls(
            options=Options.from_fields(fields, generates=generates),
            sampling=sampling,
            bad_words=fields.bad_words or (),
            special_tokens_requested=gives(fields, "skip_special_tokens"),
            grammar=next(iter(fields.grammars()), None),
            given=[
                TextPrompt(prompt, special) if isinstance(prompt, str) else prompt
                for prompt in fields.prompt
            ],
            echo=fields.echo,
            logprobs=shown_logprobs(logprobs),
            prompt_logprobs=shown_logprobs(requested),
            shown=shown,
            truncation=Truncation.from_fields(fields),
            priority=fields.priority or 0,
            names=names,
        )

    @property
    def tasks(self) -> Tasks:
        return GENERATES

    @property
    def rendered(self) -> Sequence[int]:
        return ()

    def forget_prompts(self) -> None:
        if not self.echo:
            self.given.clear()

    def prompts(self, model: PoolModel) -> list[Prompt]:
        return list(self.given)

    def parsing(self, model: PoolModel, prompts: Sequence[Prompt]) -> None:
        """None: a completion is plain text."""

    def shape(
        self,
        common: CommonFields,
        prompts: PromptIds,
        tokenizer: Tokenizer,
        parsing: AnswerParsing | None = None,
    ) -> CompletionShape:
        echoes = None
        if self.echo:
            answered = self.options.generates
            pairs = zip(self.given, prompts, strict=True)
            echoes = [
                Echo(ids if self._may_be_cut(ids) else given, ids, tokenizer, answered=answered)
                for given, ids in pairs
            ]
        return CompletionShape(self, common, prompts, tokenizer, echoes)

    def _may_be_cut(self, ids: tuple[int, ...]) -> bool:
        return self.truncation is not None and self.truncation.may_have_cut(ids)


class CompletionShape:
    """The JSON of one answer. `echoes` are the prompts as shown, or None. It remembers which
    choices have begun, and the text offset of each choice that streams logprobs."""

    def __init__(
        self,
        call: CompletionCall,
        common: CommonFields,
        prompts: PromptIds,
        tokenizer: Tokenizer,
        echoes: Sequence[Echo] | None,
    ) -> None:
        options, sampling = call.options, call.sampling
        self._common = common
        self._n: int = sampling.get("n", 1)
        self._shown = self._n if call.shown is None else call.shown
        self._logprobs = call.logprobs
        self._prompt_logprobs = call.prompt_logprobs
        self._skip_special: bool = sampling["skip_special_tokens"]
        self._has_text: bool = sampling["detokenize"]
        self._ids = options.return_token_ids
        self._names_are_ids = options.token_id_names
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._scores: dict[int, Positions] = {}  # prompt logprobs by prompt
        self._begun: set[int] = set()
        self._contexts: dict[int, tuple[int, ...]] = {}  # by prompt
        self._offsets: dict[int, TextOffsets] = {}
        self._usage = StreamUsage(options, [len(ids) for ids in prompts for _ in range(self._n)])
        # Reused for every event, since most of its fields stay the same.
        self._chunk = CompletionChunk(
            **common.shared(),
            object="text_completion",
            choices=[],
            usage=self._usage.default,
        )

    def event(self, index: int, delta: Delta) -> bytes:
        self._usage.count_delta(index, delta)
        begins = index not in self._begun
        if begins:
            self._begun.add(index)
        if delta.prompt_logprobs:
            self._scores[index // self._n] = delta.prompt_logprobs
        echo = self._echo(index) if begins else None
        scored = self._logprobs is not None
        if not (delta.text or delta.finish or echo or self._ids or scored):
            return b""
        choice = CompletionChunkChoice(
            index=index,
            text=delta.text if echo is None else echo.text + delta.text,
            logprobs=self._event_logprobs(index, delta, echo, begins) if scored else None,
            finish_reason=delta.finish,
            prompt_token_ids=self._prompts[index // self._n] if self._ids and begins else None,
            token_ids=delta.ids if self._ids else None,
            stop_reason=UNSET if delta.finish is None else delta.stop,
        )
        self._chunk.choices = [choice]
        if self._usage.continuous:
            self._chunk.usage = self._usage.usage_of(index)
        return event(self._chunk)

    def end(self, usage: Usage | None) -> bytes:
        if usage is None:
            return DONE
        self._chunk.choices, self._chunk.usage = [], usage
        return event(self._chunk) + DONE

    def error_event(self, error: ErrorRecord) -> bytes:
        return event(ErrorAnswer.of(error))

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes:
        shown: list[CompletionChoice] = []
        for start in range(0, len(choices), self._n):
            mine = choices[start : start + self._n]
            scores = prompt_positions(mine)
            for index in self._best(mine):
                choice = self._choice(start + index, mine[index], scores)
                choice.index = len(shown)
                shown.append(choice)
        answer = Completion(
            **self._common.shared(),
            object="text_completion",
            choices=shown,
            usage=usage,
        )
        return msgspec.json.encode(answer)

    def _best(self, choices: Sequence[ChoiceOutput]) -> Sequence[int]:
        """The indexes of the choices to show, of one prompt's."""
        if self._shown == len(choices):
            return range(len(choices))
        sums = [sum(each.sampled.logprob for each in choice.logprobs) for choice in choices]
        return sorted(range(len(choices)), key=lambda index: -sums[index])[: self._shown]

    def _choice(self, index: int, choice: ChoiceOutput, scores: Positions) -> CompletionChoice:
        echo = self._echo(index)
        text = choice.text if echo is None else echo.text + choice.text
        logprobs = None
        if self._logprobs is not None:
            offsets = self._answer_offsets(index)
            logprobs = self._shown_logprobs(echo, scores, choice.logprobs, self._logprobs, offsets)
            logprobs.text_offset = [min(offset, len(text)) for offset in logprobs.text_offset]
        requested = self._prompt_logprobs
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop,
            prompt_logprobs=None if requested is None else prompt_logprobs(scores, requested),
            prompt_token_ids=self._prompts[index // self._n] if self._ids else None,
            token_ids=choice.ids if self._ids else None,
        )

    def _echo(self, index: int) -> Echo | None:
        return self._echoes[index // self._n] if self._echoes is not None else None

    def _event_logprobs(
        self, index: int, delta: Delta, echo: Echo | None, begins: bool
    ) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        if begins:
            self._offsets[index] = self._answer_offsets(index)
        scores = self._scores.get(index // self._n, ())
        offsets = self._offsets[index]
        return self._shown_logprobs(echo, scores, delta.logprobs, self._logprobs, offsets)

    def _answer_offsets(self, index: int) -> TextOffsets:
        """A new counter for the offsets of a choice's generated tokens."""
        echo, prompt = self._echo(index), index // self._n
        if prompt not in self._contexts:  # cached: it may scan a long prompt of special ids
            ids = self._prompts[prompt]
            self._contexts[prompt] = context_of(self._tokenizer, ids, self._skip_special)
        before = 0 if echo is None else len(echo.text)
        return TextOffsets(self._tokenizer, self._skip_special, self._contexts[prompt], before)

    def _shown_logprobs(
        self,
        echo: Echo | None,
        scores: Positions,
        positions: Positions,
        top: int,
        offsets: TextOffsets,
    ) -> CompletionLogprobs:
        if self._has_text:
            own = [offsets.push(position.sampled.id) for position in positions]
        else:
            own = [offsets.length] * len(positions)
        as_ids = self._names_are_ids
        if echo is None:
            return completion_logprobs(positions, top, own, as_id=as_ids)
        whole, all_offsets = [*scores, *positions], [*echo.offsets, *own]
        return completion_logprobs(whole, top, all_offsets, echo.first, as_ids)


COMPLETIONS = Dialect(
    route="/v1/completions",
    endpoint="completions",
    operation="text_completion",
    prefix="cmpl-",
    parse=CompletionCall.parse,
)

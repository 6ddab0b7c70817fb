"""POST /inference/v1/generate: the ids of a prompt in, generated ids out, in vLLM's form.

In: a JSON body with ids, such as the render routes answer. Out: ids, and log-probabilities by id.
Text is made only if the client asks for it (`output_mode` text) or a stop string needs it. The
answer's `request_id` is the client's own after a prefix, or else the router's id of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Delta
from baton_protocol.request import PositionLogprobs, TokenLogprob
from baton_protocol.sampling import FinishReason
from baton_router.nodes.pool_model import PoolModel
from baton_router.openai.answer_parsing import AnswerParsing
from baton_router.openai.answers import (
    DONE,
    Closed,
    CommonFields,
    ErrorAnswer,
    PromptLogprobs,
    StopReason,
    TokenIds,
    Usage,
    event,
)
from baton_router.openai.call import GENERATES, Json, Options, Prompt, PromptIds, Tasks, Truncation
from baton_router.openai.choice_output import ChoiceOutput, prompt_positions
from baton_router.openai.dialect import Dialect
from baton_router.openai.fields.generation import StreamOptions
from baton_router.openai.fields.table import gives, read_fields
from baton_router.openai.json_body import decode_object
from baton_router.openai.logprobs import (
    candidates,
    json_logprob,
    prompt_logprobs,
    shown_logprobs,
    token_bytes,
    token_name,
)
from baton_router.openai.sampling import parameters_in
from baton_router.openai.stream_usage import StreamUsage
from baton_router.openai.structured_output import RequestedGrammar
from baton_router.tokens.generate_fields import GenerateFields, SamplingFields
from baton_text.tokenizer import Tokenizer

PREFIX = "generate-tokens-"
# The sampling parameters whose bounds depend on the prompt or the model.
NESTED = {
    name: f"sampling_params.{name}"
    for name in (
        *("max_tokens", "logprobs", "prompt_logprobs"),
        *("stop_token_ids", "allowed_token_ids", "logprob_token_ids"),
    )
}


class TokenScore(Closed):
    """A token by its id. `rank` 1 is the likeliest one; null if it was not computed. `token` and
    `bytes` are there with `output_mode` text."""

    token_id: int
    logprob: float
    rank: int | None
    token: str | UnsetType = UNSET
    bytes: list[int] | UnsetType = UNSET


class PositionScore(TokenScore, kw_only=True):
    """The sampled token, and the likely and named ones."""

    top_logprobs: list[TokenScore]


class GeneratedLogprobs(Closed):
    content: list[PositionScore]


class GeneratedChoice(Closed):
    index: int
    token_ids: TokenIds
    logprobs: GeneratedLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    text: str | UnsetType = UNSET


class Generated(Closed):
    request_id: str
    created: int
    model: str
    output_mode: str
    choices: list[GeneratedChoice]
    usage: Usage
    prompt_token_ids: TokenIds | None
    prompt_logprobs: PromptLogprobs | None


class GeneratedChunkChoice(Closed):
    index: int
    token_ids: TokenIds
    logprobs: GeneratedLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason
    text: str | UnsetType = UNSET


class GeneratedChunk(Closed):
    """An event of a stream."""

    request_id: str
    output_mode: str
    choices: list[GeneratedChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: TokenIds | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A parsed body. `shows_text`: the answer has text. `request_id` is the client's own; None
    without one."""

    options: Options
    sampling: Json
    bad_words: tuple[str, ...]
    special_tokens_requested: bool
    grammar: RequestedGrammar | None
    given: list[Prompt]
    shows_text: bool
    request_id: str | None
    priority: int
    default_max_tokens: int | None = None
    truncation: Truncation | None = None
    continues_prompt: bool = True
    rendered: Sequence[int] = ()
    tasks: Tasks = field(default_factory=lambda: GENERATES)

    @classmethod
    def parse(cls, data: bytes | bytearray) -> GenerateCall:
        """Raise InvalidRequest naming the first wrong field; MalformedBody."""
        return cls.from_body(decode_object(data))

    @classmethod
    def from_body(cls, body: Json) -> GenerateCall:
        """Raise InvalidRequest naming the first wrong field."""
        fields = read_fields(GenerateFields, body)
        params = fields.sampling_params or SamplingFields()
        shows_text = fields.output_mode == "text"
        more: Json = {} if params.logprobs is None else {"logprobs": params.logprobs}
        if params.logprobs is None and params.logprob_token_ids:
            more["logprobs"] = 0
        # Nobody reads the text if it is neither shown nor searched for a stop string.
        more["detokenize"] = params.detokenize and (shows_text or bool(params.stop))
        usage = fields.stream_options or StreamOptions()
        return cls(
            options=Options(
                model=fields.model,
                stream=fields.stream,
                include_usage=usage.include_usage,
                continuous_usage=usage.include_usage and usage.continuous_usage_stats,
                return_token_ids=fields.return_token_ids,
                token_id_names=fields.return_tokens_as_token_ids,
            ),
            sampling=parameters_in(params, more),
            bad_words=params.bad_words or (),
            special_tokens_requested=gives(params, "skip_special_tokens"),
            grammar=params.structured_outputs,
            given=[fields.token_ids],
            shows_text=shows_text,
            request_id=fields.request_id,
            priority=fields.priority or 0,
        )

    @property
    def names(self) -> Mapping[str, str]:
        return {"prompt": "token_ids", **NESTED}

    def forget_prompts(self) -> None:
        self.given.clear()

    def prompts(self, model: PoolModel) -> list[Prompt]:
        return list(self.given)

    def parsing(self, model: PoolModel, prompts: Sequence[Prompt]) -> None:
        """None: the answer is ids, and their text as it is."""

    def shape(
        self,
        common: CommonFields,
        prompts: PromptIds,
        tokenizer: Tokenizer,
        parsing: AnswerParsing | None = None,
    ) -> GenerateShape:
        return GenerateShape(self, common, prompts[0])


class GenerateShape:
    """The JSON of one answer."""

    def __init__(self, call: GenerateCall, common: CommonFields, prompt_ids: Sequence[int]) -> None:
        own = call.request_id
        self._request_id = common.id if own is None else PREFIX + own
        self._common = common
        self._text = call.shows_text
        self._mode = "text" if call.shows_text else "tokens"
        self._names_are_ids = call.options.token_id_names
        self._prompt_ids = prompt_ids
        self._shows_prompt = call.options.return_token_ids
        self._logprobs = shown_logprobs(call.sampling.get("logprobs"))
        self._prompt_logprobs = shown_logprobs(call.sampling.get("prompt_logprobs"))
        self._begun = False
        counts = [len(prompt_ids)] * int(call.sampling.get("n", 1))
        self._usage = StreamUsage(call.options, counts)

    def event(self, index: int, delta: Delta) -> bytes:
        self._usage.count_delta(index, delta)
        if not (delta.ids or delta.finish or (self._text and delta.text)):
            return b""
        choice = GeneratedChunkChoice(
            index=index,
            token_ids=delta.ids,
            logprobs=self._scores(delta.logprobs),
            finish_reason=delta.finish,
            stop_reason=delta.stop,
            text=delta.text if self._text else UNSET,
        )
        chunk = self._chunk([choice])
        if self._shows_prompt and not self._begun:
            chunk.prompt_token_ids = self._prompt_ids
        self._begun = True
        if self._usage.continuous:
            chunk.usage = self._usage.usage_of(index)
        return event(chunk)

    def _chunk(self, choices: list[GeneratedChunkChoice]) -> GeneratedChunk:
        return GeneratedChunk(request_id=self._request_id, output_mode=self._mode, choices=choices)

    def end(self, usage: Usage | None) -> bytes:
        if usage is None:
            return DONE
        chunk = self._chunk([])
        chunk.usage = usage
        return event(chunk) + DONE

    def error_event(self, error: ErrorRecord) -> bytes:
        return event(ErrorAnswer.of(error))

    def answer(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes:
        scores = None
        if self._prompt_logprobs is not None:
            scores = prompt_logprobs(prompt_positions(choices), self._prompt_logprobs)
        answer = Generated(
            request_id=self._request_id,
            created=self._common.created,
            model=self._common.model,
            output_mode=self._mode,
            choices=[
                GeneratedChoice(
                    index=index,
                    token_ids=choice.ids,
                    logprobs=self._scores(choice.logprobs),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop,
                    text=choice.text if self._text else UNSET,
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage,
            prompt_token_ids=self._prompt_ids if self._shows_prompt else None,
            prompt_logprobs=scores,
        )
        return msgspec.json.encode(answer)

    def _scores(self, positions: Sequence[PositionLogprobs]) -> GeneratedLogprobs | None:
        if self._logprobs is None:
            return None
        top = self._logprobs
        return GeneratedLogprobs(
            content=[
                PositionScore(
                    **self._score(position.sampled),
                    top_logprobs=[
                        TokenScore(**self._score(token)) for token in candidates(position, top)
                    ],
                )
                for position in positions
            ]
        )

    def _score(self, token: TokenLogprob) -> Json:
        score: Json = {
            "token_id": token.id,
            "logprob": json_logprob(token),
            "rank": token.rank or None,
        }
        if self._text:
            score |= {
                "token": token_name(token, self._names_are_ids),
                "bytes": token_bytes(token),
            }
        return score


GENERATE = Dialect(
    route=GenerateFields.ROUTE,
    endpoint="generate",
    operation="text_completion",
    prefix=PREFIX,
    parse=GenerateCall.parse,
)

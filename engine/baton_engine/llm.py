"""The offline API: `LLM(folder).generate(prompts, params)`, in this process, without a server.

In: texts, chats or token ids. Out: one RequestOutput per prompt, with vLLM's names. baton_text does
the text work (tokenizer, template, stop strings) and is imported when it is first needed. A folder
without a tokenizer accepts token ids only.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from baton_engine.build import build_torch
from baton_engine.config.engine_config import TorchSettings
from baton_engine.errors import ModelError
from baton_engine.interface import Matcher, SleepLevel, SleepMode, TokenOut
from baton_protocol.errors import InvalidRequest
from baton_protocol.ids import RequestId
from baton_protocol.request import PositionLogprobs, Request
from baton_protocol.sampling import FinishReason, SamplingParams, StructuredOutput
from baton_text.gguf.header import is_gguf

if TYPE_CHECKING:
    import torch

    from baton_text.chat import ChatTemplate
    from baton_text.detokenizer import Detokenizer
    from baton_text.grammars.grammars import Grammars
    from baton_text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
AddTexts = Callable[[Sequence[PositionLogprobs]], Sequence[PositionLogprobs]]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `stop_reason` is the stop string or stop id that ended it, None for EOS."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[PositionLogprobs] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        return sum(position.sampled.logprob for position in self.logprobs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The outputs of one prompt, one per choice.

    `prompt` is the text, or None for a prompt of token ids. `cached_tokens` is the number of prompt
    tokens from the prefix cache. `prompt_logprobs`, if requested, has one entry per prompt token;
    the first entry is None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None


def StructuredOutputsParams(  # as vLLM's users write it
    *,
    json: str | Mapping[str, Any] | None = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    json_object: bool = False,
    structural_tag: str | Mapping[str, Any] | None = None,
) -> StructuredOutput:
    """The grammar that an answer must match, for SamplingParams.structured. Give exactly one
    argument. Raises InvalidRequest if it cannot be compiled."""
    from baton_text.grammars.constraints import grammar_of
    from baton_text.grammars.errors import GrammarError

    values: dict[Any, Any] = {
        "json": json,
        "regex": regex,
        "choice": choice,
        "grammar": grammar,
        "json_object": json_object or None,
        "structural_tag": structural_tag,
    }
    given = {name: value for name, value in values.items() if value is not None}
    if len(given) != 1:
        raise InvalidRequest(
            f"structured output takes one of {', '.join(values)}; {len(given)} are given"
        )
    [(kind, value)] = given.items()
    try:
        return StructuredOutput(grammar_of(kind, value))
    except GrammarError as error:
        raise InvalidRequest(str(error), param=kind) from None


GuidedDecodingParams = StructuredOutputsParams  # its older name in vLLM


class LLM:
    """A model in this process. Not thread-safe."""

    def __init__(
        self,
        model: str | Path,
        *,
        chat_template: Path | str | None = None,
        **options: Any,
    ) -> None:
        """Load a model. `options` are the fields of EngineConfig and TorchSettings. Raises
        TypeError for any other name, and ModelError or SettingsError for errors that a user can
        correct."""
        settings = TorchSettings(model=Path(model), **options)
        self.engine = build_torch(settings)
        self._text = _read_text(settings.model, chat_template)
        self._grammars: Grammars | None = None
        self._count = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Run one or several prompts together. Outputs are in the order of the prompts, and each
        output's text continues its prompt.

        Without parameters, those of default_sampling_params() apply. Raises InvalidRequest or
        PromptTooLong before any prompt is computed.
        """
        return self._generate(_as_list(prompts), sampling_params, continues_prompt=True)

    def _generate(
        self,
        many: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        continues_prompt: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(many)
        if len(sampling_params) != len(many):
            raise ValueError(f"{len(many)} prompts and {len(sampling_params)} sampling_params")
        runs = [
            self._prepare(prompt, params, continues_prompt)
            for prompt, params in zip(many, sampling_params, strict=True)
        ]
        return self._run(runs)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        **template_values: Any,
    ) -> list[RequestOutput]:
        """Render one or several conversations with the model's chat template, then generate."""
        text = self._need_text("a chat")
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            text.tokenizer.encode(
                text.template.render(
                    chat,  # type: ignore[arg-type]
                    add_generation_prompt=add_generation_prompt,
                    **template_values,
                ),
                add_special_tokens=False,
            )
            for chat in chats
        ]
        return self._generate(prompts, sampling_params, continues_prompt=False)

    def sleep(self, level: SleepLevel = 1, mode: SleepMode = "refuse") -> None:
        """Give memory back until wake_up(): that of KV, and at level 2 that of weights (see
        EngineCore.sleep)."""
        self.engine.sleep(level, mode)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Restore what the tags name ("weights", "kv_cache"), or all."""
        self.engine.wake_up(tags)

    def update_weights(
        self, path: Path | str | None = None, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Use the weights of another folder from now on, or replace some tensors (see
        EngineCore.update_weights)."""
        self.engine.update_weights(None if path is None else Path(path), tensors)

    def default_sampling_params(self) -> SamplingParams:
        """The defaults of the model's generation_config.json, and SamplingParams' own for the
        rest."""
        if self._text is None:
            return SamplingParams()
        return msgspec.convert(self._text.defaults, SamplingParams)

    def _prepare(self, prompt: Prompt, params: SamplingParams, continues_prompt: bool) -> _Run:
        params = _normalised(params)
        params.check()
        if params.seed is None:
            seed = random.SystemRandom().getrandbits(63)
            params = msgspec.structs.replace(params, seed=seed)
        if isinstance(prompt, str):
            ids = self._need_text("a prompt of text").tokenizer.encode(prompt)
        else:
            ids = [int(id) for id in prompt]
        request = Request(
            id=RequestId(f"offline-{self._count}"),
            attempt=0,
            prompt_ids=tuple(ids),
            params=params,
            outputs=((),) * params.n,
            continues_prompt=continues_prompt,
        )
        self._count += 1
        choices = [_Choice(_detokenizer(self._text, request)) for _ in range(params.n)]
        return _Run(request, prompt if isinstance(prompt, str) else None, choices)

    def _run(self, runs: Sequence[_Run]) -> list[RequestOutput]:
        by_id = {run.request.id: run for run in runs}
        matchers = [self._matcher(run.request.params) for run in runs]
        try:
            for run, matcher in zip(runs, matchers, strict=True):
                self.engine.submit(run.request, matcher=matcher)
            while self.engine.has_work():
                self._step(by_id)
        finally:  # after an error, no request may stay in the engine
            for run in runs:
                self.engine.abort(run.request.id)
        return [run.output(self._add_texts) for run in runs]

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        if params.structured is None:
            return None
        from baton_text.grammars.errors import GrammarError
        from baton_text.grammars.grammars import Grammars

        if self._grammars is None:
            tokenizer = self._need_text("a grammar").tokenizer
            self._grammars = Grammars(tokenizer, self.engine.info.vocab_size)
        try:
            return self._grammars.matcher(params.structured.grammar)
        except GrammarError as error:
            raise InvalidRequest(str(error), param="structured") from None

    def _step(self, by_id: Mapping[RequestId, _Run]) -> None:
        result = self.engine.step()
        if result.failed:
            raise result.failed[0].error
        for use in result.prompts:
            run = by_id[use.request]
            run.cached_tokens = use.cached + use.host
            run.prompt_logprobs = use.logprobs
        for token in result.tokens:
            run = by_id[token.request]
            if run.choices[token.choice].take(token, run.request.params):
                self.engine.finish_choice(token.request, token.choice)

    def _add_texts(self, positions: Sequence[PositionLogprobs]) -> Sequence[PositionLogprobs]:
        """Add the tokens' texts to logprobs, if the model has a tokenizer."""
        if self._text is None:
            return positions
        from baton_text.logprobs import add_token_texts

        return add_token_texts(self._text.tokenizer, positions)

    def _need_text(self, what: str) -> _Text:
        if self._text is None:
            raise ModelError(f"{what} needs tokenizer.json in the model folder; give token ids")
        return self._text


@dataclass(frozen=True, slots=True)
class _Text:
    """A model's tokenizer, chat template and default sampling parameters."""

    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: Mapping[str, float | int]


@dataclass(slots=True)
class _Choice:
    """One choice while it runs."""

    detokenizer: Detokenizer | None
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish: FinishReason = "length"
    stop_reason: str | int | None = None
    ended: bool = False

    def take(self, token: TokenOut, params: SamplingParams) -> bool:
        """Add a token, unless one of the same step has ended the choice. Returns True if a stop
        string ended the choice before the engine did."""
        if self.ended:
            return False
        self.ids.append(token.id)
        if token.logprobs is not None:
            self.logprobs.append(token.logprobs)
        if token.finish is not None:
            self.ended = True
            self.finish = token.finish
            self.stop_reason = token.stop_id if token.stop_id in params.stop_token_ids else None
        if self.detokenizer is None:
            return False
        if token.stop_id is None or params.include_stop_str_in_output:
            self.text.append(self.detokenizer.push([token.id]).text)
        if token.finish is not None:
            self.text.append(self.detokenizer.finish())
        if self.detokenizer.stopped is None or token.finish == "length":
            return False  # the length limit takes precedence, as in vLLM
        self.ended, self.finish, self.stop_reason = True, "stop", self.detokenizer.stopped
        return token.finish is None


@dataclass(slots=True)
class _Run:
    """One request while it runs."""

    request: Request
    prompt: str | None
    choices: list[_Choice]
    cached_tokens: int = 0
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()

    def output(self, add_texts: AddTexts) -> RequestOutput:
        """The finished output. `add_texts` adds the tokens' texts to logprobs."""
        params = self.request.params
        asked = params.logprobs is not None
        prompt_asked = params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request.id,
            prompt=self.prompt,
            prompt_token_ids=list(self.request.prompt_ids),
            outputs=[
                CompletionOutput(
                    index=index,
                    text="".join(choice.text),
                    token_ids=choice.ids,
                    finish_reason=choice.finish,
                    stop_reason=choice.stop_reason,
                    logprobs=list(add_texts(choice.logprobs)) if asked else None,
                )
                for index, choice in enumerate(self.choices)
            ],
            cached_tokens=self.cached_tokens,
            prompt_logprobs=[None, *add_texts(self.prompt_logprobs)] if prompt_asked else None,
        )


def _read_text(folder: Path, chat_template: Path | str | None) -> _Text | None:
    if not is_gguf(folder) and not (folder / "tokenizer.json").is_file():
        return None
    from baton_text.artifacts import read_artifacts
    from baton_text.chat import ChatTemplate
    from baton_text.defaults import generation_defaults
    from baton_text.tokenizer import Tokenizer

    artifacts = read_artifacts(folder, chat_template)
    return _Text(
        Tokenizer.from_artifacts(artifacts),
        ChatTemplate.from_artifacts(artifacts),
        generation_defaults(artifacts),
    )


def _detokenizer(text: _Text | None, request: Request) -> Detokenizer | None:
    params = request.params
    if text is None:
        if params.stop:
            raise ModelError("stop strings need tokenizer.json in the model folder")
        return None
    if not params.detokenize:
        return None
    from baton_text.detokenizer import Detokenizer, context_of

    skip = params.skip_special_tokens
    before = request.prompt_ids if request.continues_prompt else ()
    return Detokenizer(
        text.tokenizer,
        stop=params.stop,
        include_stop=params.include_stop_str_in_output,
        skip_special=skip,
        min_ids=params.min_tokens,
        context=context_of(text.tokenizer, before, skip),
    )


def _normalised(params: SamplingParams) -> SamplingParams:
    """Convert the forms that vLLM accepts to ours: lists become tuples, a single stop string a
    tuple of one, a dict of biases a tuple of pairs, and None an empty tuple. Raises InvalidRequest
    for a value of another type."""
    values = msgspec.structs.asdict(params)
    if isinstance(params.stop, str):
        values["stop"] = (params.stop,)
    if isinstance(params.logit_bias, Mapping):
        values["logit_bias"] = tuple(params.logit_bias.items())
    for name in ("stop", "stop_token_ids", "logit_bias", "bad_words"):
        if values[name] is None:
            values[name] = ()
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        field = re.search(r"\$\.(\w+)", str(error))
        raise InvalidRequest(
            f"sampling parameters: {error}", param=field[1] if field else None
        ) from None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one prompt (a text, or ids) or several."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]

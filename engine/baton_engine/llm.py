"""The offline API: `LLM(model).generate(prompts, params)`, in this process, without a server.

In: texts, chats or token ids. Out: one RequestOutput per prompt, with vLLM's names. It runs its
prompts by LLMEngine. baton_text does the text work (tokenizer, template, stop strings) and is
imported when it is first needed. A folder without a tokenizer accepts token ids only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import PauseMode, SleepLevel
from baton_engine.llm_engine import LLMEngine
from baton_engine.offline.arguments import EngineArgs
from baton_engine.offline.beam_outputs import BeamSearchOutput, BeamSearchParams, beam_output
from baton_engine.offline.model_text import Message, chat_prompt, default_params, needed
from baton_engine.offline.outputs import CompletionOutput as CompletionOutput
from baton_engine.offline.outputs import RequestOutput as RequestOutput
from baton_engine.offline.parameters import RequestOutputKind, SamplingParams
from baton_engine.offline.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Params,
    PooledPrompt,
    PooledRequest,
    PoolingOutput,
    PoolingRequestOutput,
    Scoring,
    ScoringRequestOutput,
    check_answers,
    pooled_prompts,
)
from baton_engine.offline.progress_bar import ProgressBar, UseTqdm
from baton_engine.offline.prompts import GivenPrompt, Prompt, as_prompts
from baton_protocol.pooling import Pooling, PoolingParams
from baton_protocol.sampling import SamplingParams as WireParams

if TYPE_CHECKING:
    import torch

    from baton_text.tokenizer import Tokenizer


class LLM:
    """A model in this process. Not thread-safe."""

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        """Load a model: a folder, a GGUF file, or the name of a hub's model, which is fetched.

        `arguments` are those of EngineArgs: `revision`, `tokenizer`, `chat_template`, `seed`, ...,
        and the options of EngineConfig, by Baton's names or by vLLM's. Raises TypeError for any
        other name, and ModelError or SettingsError for errors that a user can correct.
        """
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(model, **arguments))
        self._ids: Iterator[int] = count()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        return cls.from_engine(LLMEngine.from_engine_args(args))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> Self:
        """An LLM of an engine that exists. Its owner must not step it while generate() runs."""
        llm = cls.__new__(cls)
        llm.llm_engine, llm._ids = engine, count()
        return llm

    @property
    def engine(self) -> EngineCore:
        return self.llm_engine.engine_core

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: WireParams | Sequence[WireParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Run one or several prompts together. Outputs are in the order of the prompts, and each
        output's text continues its prompt.

        Without parameters, those of default_sampling_params() apply. `use_tqdm` shows a bar with
        the tokens per second on stderr; a callable makes the bar. With scheduling_policy
        "priority", prompts with a lower `priority` run first. Raises InvalidRequest or
        PromptTooLong before any prompt is computed.
        """
        return self._generate(
            as_prompts(prompts), sampling_params, use_tqdm, priority, continues_prompt=True
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: WireParams | Sequence[WireParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_values: Any,
    ) -> list[RequestOutput]:
        """Render one or several conversations with the model's chat template, then generate. The
        template gets `chat_template_kwargs` and all other keyword arguments."""
        values = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
            **template_values,
        }
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            chat_prompt(self.llm_engine.text, chat, values)  # type: ignore[arg-type]
            for chat in chats
        ]
        return self._generate(prompts, sampling_params, use_tqdm, priority, continues_prompt=False)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The best answers to each prompt, as a beam search finds them, the best first."""
        outputs = self._generate(
            as_prompts(prompts), params.sampling(), False, None, continues_prompt=True
        )
        text = self.llm_engine.text
        tokenizer = None if text is None else text.tokenizer
        return [beam_output(output, params, tokenizer) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: Params = None,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of one or several prompts, in their order, with length 1 unless the
        parameters say otherwise. Raises InvalidRequest for a model that does not embed, and as
        generate() does."""
        check_answers(self.engine.info.pooling, "embed", "embed()")
        pooled = self._pool(pooled_prompts(prompts, pooling_params), use_tqdm, priority)
        return [each.output(EmbeddingOutput) for each in pooled]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: Params = None,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the model's classes for each prompt. Raises as embed() does."""
        check_answers(self.engine.info.pooling, "classify", "classify()")
        pooled = self._pool(pooled_prompts(prompts, pooling_params), use_tqdm, priority)
        return [each.output(ClassificationOutput) for each in pooled]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
        pooling_task: Pooling | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What a pooling model answers with, as tensors: that of embed() or of classify().
        Raises as embed() does, and InvalidRequest for another `pooling_task` than the model's."""
        pooling = self.engine.info.pooling
        task = pooling_task or pooling or "embed"
        check_answers(pooling, task, f"encode() with pooling_task={task!r}")
        import torch

        pooled = self._pool(pooled_prompts(prompts, pooling_params), use_tqdm, priority)
        return [
            each.output(lambda numbers: PoolingOutput(torch.tensor(numbers))) for each in pooled
        ]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[ScoringRequestOutput]:
        """How well the texts of each pair belong together: the first text with each of the second
        ones, or the first ones with the second ones in order. A model that embeds gives the cosine
        of the vectors of the two. A classifier with one class reads both as one prompt, which its
        chat template renders if that has the roles `query` and `document`, and else its tokenizer
        joins. Raises InvalidRequest for other models, and as embed() does."""
        text = self.llm_engine.text
        scoring = Scoring.of(self.engine.info, text, (data_1, data_2), pooling_params)
        return scoring.outputs(self._pool(scoring.prompts, use_tqdm, None))

    def default_sampling_params(self) -> SamplingParams:
        """The defaults of the model's generation_config.json, and SamplingParams' own for the
        rest."""
        return default_params(self.llm_engine.text)

    get_default_sampling_params = default_sampling_params  # as vLLM's users write it

    def pin_prefix(self, prompt: Prompt, ttl_s: float | None = None) -> str:
        """Compute a prompt, unless its KV is cached, and keep its full blocks in the cache for
        `ttl_s` seconds; None: until unpin_prefix(). Returns the pin's name. Later prompts that
        begin with these tokens find their KV, whatever ran in between.

        Pins keep at most `max_pinned_fraction` of the cache: PinRefused has the figures. A prompt
        that needs more blocks than they leave releases them, the oldest first."""
        once = WireParams(max_tokens=1)
        [output] = self._generate([prompt], once, False, None, continues_prompt=True)
        name = f"prefix-{next(self._ids)}"
        ids, salt = output.prompt_token_ids, GivenPrompt.of(prompt).salt
        self.llm_engine.pin_prefix(name, ids, ttl_s, salt)
        return name

    def unpin_prefix(self, name: str) -> bool:
        """Let a pinned prefix be evicted. Returns False if it is not pinned any more."""
        return self.llm_engine.unpin_prefix(name)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV, pinned prefixes too: later prompts are computed. Always returns
        True, as running requests do not hinder it."""
        self.engine.reset_prefix_cache()
        return True

    def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> None:
        """Give memory back until wake_up(): that of KV, and at level 2 that of weights. `mode` says
        what becomes of requests that were given to `llm_engine` (see LLMEngine.sleep)."""
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Restore what the tags name ("weights", "kv_cache"), or all."""
        self.llm_engine.wake_up(tags)

    def update_weights(
        self, path: Path | str | None = None, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Use the weights of another folder from now on, or replace some tensors (see
        EngineCore.update_weights)."""
        self.engine.update_weights(None if path is None else Path(path), tensors)

    def get_tokenizer(self) -> Tokenizer:
        """Raises ModelError if the model has no tokenizer."""
        return needed(self.llm_engine.text, "get_tokenizer()").tokenizer

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: WireParams | Sequence[WireParams] | None,
        use_tqdm: UseTqdm,
        priority: int | Sequence[int] | None,
        *,
        continues_prompt: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, WireParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(sampling_params)} sampling_params")
        priorities = _priorities(priority, len(prompts))
        ids: list[str] = []
        try:
            for prompt, params, rank in zip(prompts, sampling_params, priorities, strict=True):
                ids.append(f"offline-{next(self._ids)}")
                self.llm_engine.add_request(
                    *(ids[-1], prompt, _final_only(params)),
                    continues_prompt=continues_prompt,
                    priority=rank,
                )
            return self._run(ids, use_tqdm)
        finally:  # after an error, no request may stay in the engine
            self.llm_engine.abort_request(ids)

    def _pool(
        self,
        prompts: Sequence[PooledPrompt],
        use_tqdm: UseTqdm,
        priority: int | Sequence[int] | None,
    ) -> list[PooledRequest]:
        """Run prompts of a pooling model together."""
        priorities = _priorities(priority, len(prompts))
        engine, pooled = self.llm_engine, list[PooledRequest]()
        inputs, ended = engine.prompt_tokens, 0
        try:
            for each, rank in zip(prompts, priorities, strict=True):
                id, asked = f"offline-{next(self._ids)}", (each.prompt, each.params)
                pooled.append(engine.add_pooling_request(id, *asked, priority=rank))
            with ProgressBar(use_tqdm, len(prompts)) as bar:
                while engine.has_unfinished_requests():
                    engine.step()
                    now = len(prompts) - engine.get_num_unfinished_requests()
                    bar.show(now - ended, engine.prompt_tokens - inputs, 0)
                    ended = now
        finally:  # after an error, no request may stay in the engine
            engine.abort_request([each.request.id for each in pooled])
        for request in pooled:
            if request.error is not None:
                raise request.error
        return pooled

    def _run(self, ids: Sequence[str], use_tqdm: UseTqdm) -> list[RequestOutput]:
        engine, done = self.llm_engine, dict[str, RequestOutput]()
        inputs, outputs = engine.prompt_tokens, engine.generation_tokens
        with ProgressBar(use_tqdm, len(ids)) as bar:
            while engine.has_unfinished_requests():
                ended = engine.step()
                for output in ended:
                    if output.error is not None:
                        raise output.error
                    done[output.request_id] = output
                bar.show(
                    len(ended),
                    engine.prompt_tokens - inputs,
                    engine.generation_tokens - outputs,
                )
        return [done[id] for id in ids]


def _final_only(params: WireParams) -> SamplingParams:
    """The same parameters, with one output at the end."""
    values = {name: getattr(params, name) for name in WireParams.__struct_fields__}
    return SamplingParams(**values, output_kind=RequestOutputKind.FINAL_ONLY)


def _priorities(given: int | Sequence[int] | None, prompts: int) -> list[int]:
    if given is None or isinstance(given, int):
        return [given or 0] * prompts
    if len(given) != prompts:
        raise ValueError(f"{prompts} prompts and {len(given)} priorities")
    return list(given)

"""LLMEngine: requests in, RequestOutputs out, one engine step at a time, in this process.

    engine = LLMEngine.from_engine_args(EngineArgs(folder))
    engine.add_request("a", "the quick", SamplingParams())
    while engine.has_unfinished_requests():
        for output in engine.step(): ...

LLM runs its prompts by it. For an engine in a process of its own, see baton_node.AsyncLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Self

from baton_engine.build import build_torch
from baton_engine.core.engine_core import EngineCore
from baton_engine.core.sleep import check_sleep
from baton_engine.interface import PAUSE_MODES, Matcher, PauseMode, SleepLevel, StepResult
from baton_engine.offline.arguments import EngineArgs
from baton_engine.offline.model_text import ModelText, needed
from baton_engine.offline.outputs import RequestOutput
from baton_engine.offline.pooling import PooledRequest, pooled_request
from baton_engine.offline.prompts import Prompt
from baton_engine.offline.running_request import RequestMaker, RunningRequest
from baton_protocol.errors import InvalidRequest
from baton_protocol.ids import RequestId
from baton_protocol.pooling import PoolingParams
from baton_protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from baton_text.grammars.grammars import Grammars


class LLMEngine:
    """An engine and its requests. Not thread-safe.

    `prompt_tokens` and `generation_tokens` count what it has computed or found in its cache, and
    generated.
    """

    def __init__(
        self,
        engine_core: EngineCore,
        text: ModelText | None,
        *,
        seed: int | None = None,
        stream_interval: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`text` None: prompts are token ids, and outputs have no text."""
        self.engine_core = engine_core
        self.text = text
        self.prompt_tokens = self.generation_tokens = 0
        self._make = RequestMaker(text, seed=seed, stream_interval=stream_interval).make
        self._clock = clock
        self._running: dict[RequestId, RunningRequest] = {}
        self._pooled: dict[RequestId, PooledRequest] = {}
        self._pinned_until: dict[str, float] = {}  # by the clock
        self._kept: list[RequestOutput] = []
        self._grammars: Grammars | None = None
        self._step_began = 0.0

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """Load a model. Raises ModelError or SettingsError for errors that a user can correct."""
        core = build_torch(args.torch_settings())
        return cls(core, args.read_text(), seed=args.seed, stream_interval=args.stream_interval)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        continues_prompt: bool = True,
        priority: int = 0,
    ) -> str:
        """Queue a request; return its id. With `continues_prompt` the output's text continues the
        prompt's, as in a completion. With scheduling_policy "priority", a request with a lower
        `priority` runs first. Raises ValueError if a request of this id runs, InvalidRequest
        or PromptTooLong for one that can never run, and ModelError if the model lacks a tokenizer
        for it."""
        id = RequestId(request_id)
        times = (time.time(), self._clock())
        running = self._make(
            *(id, request_id, prompt, params, times),
            continues_prompt=continues_prompt,
            priority=priority,
        )
        matcher = self._matcher(running.request.params)
        self.engine_core.submit(running.request, matcher=matcher)
        self._running[id] = running
        return request_id

    def add_pooling_request(
        self, request_id: str, prompt: Prompt, params: PoolingParams, *, priority: int = 0
    ) -> PooledRequest:
        """Queue a request to a pooling model. step() returns nothing of it: the request itself has
        its vector, or the error that ended it. Raises as add_request() does."""
        pooled = pooled_request(request_id, prompt, params, self.text, priority=priority)
        self.engine_core.submit(pooled.request)
        self._pooled[pooled.request.id] = pooled
        return pooled

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests; they have no more outputs. Ignores unknown ids."""
        for each in (request_id,) if isinstance(request_id, str) else tuple(request_id):
            id = RequestId(each)
            self._running.pop(id, None)
            self._pooled.pop(id, None)
            self.engine_core.abort(id)

    def pin_prefix(
        self, name: str, ids: Sequence[int], ttl_s: float | None = None, salt: str = ""
    ) -> None:
        """Keep the full blocks of a prefix in the cache, which holds them now, for `ttl_s` seconds;
        None: until unpin_prefix(). Another pin of this name is replaced. Raises PinRefused."""
        hashes = self.engine_core.prefix_hashes(ids, salt)
        self.engine_core.pins.pin(name, hashes)
        if ttl_s is not None:
            self._pinned_until[name] = self._clock() + ttl_s

    def unpin_prefix(self, name: str) -> bool:
        """Let a pinned prefix be evicted. Returns False if there is no such pin."""
        self._pinned_until.pop(name, None)
        return self.engine_core.pins.unpin(name)

    def has_unfinished_requests(self) -> bool:
        """Whether step() has something to do. After the last output this may be one more step, of
        which nothing comes."""
        waits = self._running or self._pooled or self._kept
        return bool(waits) or self.engine_core.has_work()

    def get_num_unfinished_requests(self) -> int:
        return len(self._running) + len(self._pooled)

    def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> None:
        """Give memory back until wake_up() (see EngineCore.sleep). Requests are aborted and have no
        more outputs; with the mode "wait" they end first, and step() returns their outputs
        later. Raises SettingsError for an unknown level or mode."""
        check_sleep(level, mode, PAUSE_MODES)
        if mode == "wait":
            while self._running or self.engine_core.has_work():
                self._kept += self._step()
        self._running.clear()
        self._pooled.clear()
        self.engine_core.sleep(level, "abort")

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Restore what the tags name ("weights", "kv_cache"), or all."""
        self.engine_core.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self.engine_core.is_sleeping

    def step(self) -> list[RequestOutput]:
        """Run one engine step, and return the outputs that are due, at most one per request. The
        outputs of requests that ended before a sleep come first, without a step."""
        if self._kept:
            outputs, self._kept = self._kept, []
            return outputs
        return self._step()

    def _step(self) -> list[RequestOutput]:
        began, earlier = self._clock(), self._step_began
        self._step_began = began
        for name in [name for name, until in self._pinned_until.items() if until <= began]:
            self.unpin_prefix(name)
        result = self.engine_core.step()
        # With overlap, the step that was read now was launched by the call before.
        launched = earlier if self.engine_core.overlap else began
        return self._outputs(result, launched, self._clock())

    def _outputs(self, result: StepResult, launched: float, now: float) -> list[RequestOutput]:
        touched: dict[RequestId, RunningRequest] = {}
        for id in result.started:
            if (running := self._running.get(id)) is not None:
                running.note_started(max(launched, running.stats.queued_ts))
        for use in result.prompts:
            self.prompt_tokens += use.prompt
            if (pooled := self._pooled.get(use.request)) is not None:
                pooled.cached_tokens = use.cached + use.host
            if (running := self._running.get(use.request)) is not None:
                running.note_prompt(use.cached + use.host, use.logprobs)
        for token in result.tokens:
            if (running := self._running.get(token.request)) is not None:
                self.generation_tokens += 1
                touched[token.request] = running
                if running.take(token, now):
                    self.engine_core.finish_choice(token.request, token.choice)
        for failed in result.failed:
            if (running := self._running.get(failed.request)) is not None:
                touched[failed.request] = running
                running.error = failed.error
        self._end_pooled(result)
        for id, running in touched.items():
            if running.ended:
                del self._running[id]
        outputs = (running.output() for running in touched.values())
        return [output for output in outputs if output is not None]

    def _end_pooled(self, result: StepResult) -> None:
        for answer in result.complete:
            if (pooled := self._pooled.pop(answer.request, None)) is not None:
                pooled.vector = answer.vector
        for failed in result.failed:
            if (pooled := self._pooled.pop(failed.request, None)) is not None:
                pooled.error = failed.error

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        if params.structured is None:
            return None
        from baton_text.grammars.errors import GrammarError
        from baton_text.grammars.grammars import Grammars

        if self._grammars is None:
            tokenizer = needed(self.text, "a grammar").tokenizer
            self._grammars = Grammars(tokenizer, self.engine_core.info.vocab_size)
        try:
            return self._grammars.matcher(params.structured.grammar)
        except GrammarError as error:
            raise InvalidRequest(str(error), param="structured") from None

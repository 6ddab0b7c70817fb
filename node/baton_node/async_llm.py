"""AsyncLLM: the offline API for asyncio, with the engine in a process of its own.

    llm = AsyncLLM(folder)
    async for output in llm.generate("the quick", SamplingParams(), "request 1"): ...

In: prompts. Out: RequestOutputs, one stream per request; of a pooling model vectors and scores. The
engine process is that of a node: it gets the same frames, and ends when this process ends, however
that happens. Prompts become ids, and ids text, in this process, which loads no torch.

A caller that closes its generator, leaves its loop or is cancelled aborts the request. If the
engine process ends, each waiting generator raises EngineDeadError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from baton_engine.config.engine_config import SimConfig
from baton_engine.core.sleep import check_sleep, checked_parts
from baton_engine.errors import EngineBusy
from baton_engine.interface import PAUSE_MODES, EngineInfo, Part, PauseMode, SleepLevel
from baton_engine.offline.arguments import EngineArgs
from baton_engine.offline.model_text import ModelText, default_params, has_text, needed
from baton_engine.offline.outputs import RequestOutput
from baton_engine.offline.parameters import SamplingParams
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
    pooled_request,
)
from baton_engine.offline.prompts import Prompt
from baton_engine.offline.running_request import RequestMaker, RunningRequest
from baton_node.artifacts import load_artifacts
from baton_node.async_pooling import PooledRequests
from baton_node.errors import EngineLost, SetupError
from baton_node.ipc.engine_process import ENGINE_MODULE, EngineProcess, start_engine
from baton_node.ipc.messages import FinishChoice, Prompted, Sleep, Slept, Step, ToServer, WakeUp
from baton_node.settings import NodeSettings
from baton_protocol.errors import error_of
from baton_protocol.ids import Epoch, RequestId
from baton_protocol.link import Abort, JobFailed, Load, RunJob
from baton_protocol.policies import EngineKind
from baton_protocol.pooling import Pooling, PoolingParams
from baton_protocol.sampling import SamplingParams as WireParams
from baton_protocol.store import NodeLoad

if TYPE_CHECKING:
    from baton_text.tokenizer import Tokenizer

NAME = "async-llm"
EngineDeadError = EngineLost  # as vLLM's users write it, like AsyncLLMEngine below


class _Stream:
    """A running request, and the generator that waits for its outputs."""

    def __init__(self, running: RunningRequest) -> None:
        self.running = running
        self._changed = asyncio.Event()

    def wake(self) -> None:
        self._changed.set()

    async def next_output(self, check: Callable[[], None]) -> RequestOutput:
        """Wait for the next output. `check` raises if there will be none."""
        while (output := self.running.output()) is None:
            check()
            self._changed.clear()
            await self._changed.wait()
        return output


class AsyncLLM:
    """A model whose engine runs in a process of its own. Belongs to one event loop.

    The engine process starts with start() or the first request, and ends with shutdown(), with the
    event loop, or with this process. `load` is what the engine last reported, at most 0.2 s ago.
    """

    def __init__(
        self,
        model: str | Path | EngineArgs = "",
        *,
        engine: EngineKind = "torch",
        sim: SimConfig | None = None,
        log_level: str = "WARNING",
        start_timeout_s: float = 600.0,
        **arguments: Any,
    ) -> None:
        """Read the model's tokenizer. `arguments` are those of EngineArgs, as for LLM; `log_level`
        is the engine process's. Raises TypeError for an unknown name, and ModelError,
        SettingsError or SetupError for errors that a user can correct; what only the engine can
        find comes with the first request."""
        args = model if isinstance(model, EngineArgs) else EngineArgs(model, **arguments)
        if args.model or engine == "torch":
            args.folder  # noqa: B018  fetches the model, or raises
        self._settings = NodeSettings(
            **_model_options(args),
            engine=engine,
            sim=sim or SimConfig(),
            node=NAME,
            role="decode",
            log_level=log_level.upper(),
            start_timeout_s=start_timeout_s,
        )
        self.text = None if args.skip_tokenizer_init else _read_text(self._settings)
        self.load = NodeLoad()
        self._make = RequestMaker(
            self.text, seed=args.seed, stream_interval=args.stream_interval
        ).make
        self._ids = count()
        self._streams: dict[RequestId, _Stream] = {}
        self._pooled = PooledRequests(self._send, self._check_alive)
        self._ready = asyncio.Event()
        self._info: EngineInfo | None = None
        self._engine: EngineProcess | None = None
        self._serving: asyncio.Task[None] | None = None
        self._ended: SetupError | None = None
        self._awake = asyncio.Event()  # not set from the beginning of a sleep to its end
        self._awake.set()
        self._changed = asyncio.Event()  # set by each frame of the engine
        self._one_at_a_time = asyncio.Lock()
        self._slept: Slept | None = None  # the answer that was asked for last
        self._away: tuple[Part, ...] = ()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        return cls(args)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()
        await self.wait_stopped()

    # --- the engine process ---------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine process, unless it runs, and wait until the engine is ready. Raises
        SetupError if it cannot be built, and EngineDeadError if it has ended."""
        if self._serving is None and self._ended is None:
            self._serving = asyncio.create_task(self._serve(), name=NAME)
        await self._ready.wait()
        self._check_alive()

    def shutdown(self) -> None:
        """End the engine process. Generators that wait raise EngineDeadError."""
        # Once only: a second cancellation would leave the process that is being ended.
        if self._ended is None and self._serving is not None:
            self._serving.cancel()
        self._end(EngineLost("AsyncLLM is shut down"))

    async def wait_stopped(self) -> None:
        """Wait until the engine process is gone, after shutdown() or its own end."""
        if self._serving is not None:
            await asyncio.wait((self._serving,))

    @property
    def is_running(self) -> bool:
        """Whether it takes requests. True before the engine process has started."""
        return self._ended is None

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine process has ended, or could not be started."""
        return self._ended is not None

    @property
    def dead_error(self) -> Exception:
        """Why it takes no requests; an EngineDeadError without a reason while it does."""
        return EngineLost("the engine process runs") if self._ended is None else self._ended

    async def check_health(self) -> None:
        """Raises what generate() would raise if the engine process has ended."""
        self._check_alive()

    @property
    def engine_pid(self) -> int | None:
        """The engine process's id; None while there is none."""
        return None if self._engine is None else self._engine.pid

    async def _serve(self) -> None:
        """Run the engine process, until it ends or this task is cancelled."""
        try:
            engine, ready = await start_engine(self._settings, Epoch(NAME), ENGINE_MODULE)
            try:
                self._engine, self._info, self.load = engine, ready.info, ready.load.load
                self._ready.set()
                while True:
                    self._take(await engine.next_frame())
            except EngineLost:
                self._end(EngineLost(await engine.describe_end()))
            finally:
                self._engine = None
                await engine.stop()
        except SetupError as error:  # it did not start
            self._end(error)
        except Exception as error:
            self._end(EngineLost(f"AsyncLLM cannot read its engine's frames: {error!r}"))
            raise
        finally:
            self._end(EngineLost("the event loop of AsyncLLM has ended"))

    def _end(self, error: SetupError) -> None:
        """Take no more requests, and end all that run with this error."""
        self._ended = self._ended or error
        self._ready.set()
        self._awake.set()
        self._changed.set()
        for stream in self._streams.values():
            stream.wake()
        self._pooled.wake()

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise type(self._ended)(str(self._ended))  # each caller gets one of its own

    # --- requests -------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: WireParams | None = None,
        request_id: str | None = None,
        *,
        continues_prompt: bool = True,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request, and yield its outputs as its `output_kind` says; the last one is
        `finished`. A caller that is slower than the engine gets fewer outputs, and misses nothing.

        Without parameters, those of default_sampling_params() apply. Requests may share an id.
        With scheduling_policy "priority", one with a lower `priority` runs first. While the engine
        sleeps, or is about to, a request waits.
        Raises InvalidRequest or PromptTooLong for one that can never run, ModelError if the model
        lacks a tokenizer for it, and EngineDeadError if the engine process ends.
        """
        await self._until_awake()
        params = self.default_sampling_params() if sampling_params is None else sampling_params
        number = next(self._ids)
        running = self._make(
            RequestId(f"{NAME}-{number}"),
            str(number) if request_id is None else request_id,
            prompt,
            params,
            (time.time(), time.monotonic()),
            continues_prompt=continues_prompt,
            priority=priority,
        )
        stream = self._streams[running.id] = _Stream(running)
        self._send(RunJob(running.request))
        try:
            while True:
                output = await stream.next_output(self._check_alive)
                if output.error is not None:
                    raise output.error
                yield output
                if output.finished:
                    return
        finally:
            del self._streams[running.id]
            self._changed.set()
            if not running.ended:
                self._send(Abort(running.id, running.request.attempt))

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: Params = None,
        priority: int = 0,
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of one or several prompts, as LLM.embed() gives them. Raises as it does, and
        as generate() does; then no prompt of the call goes on."""
        check_answers((await self._until_awake()).pooling, "embed", "embed()")
        pooled = await self._pool(pooled_prompts(prompts, pooling_params), priority)
        return [each.output(EmbeddingOutput) for each in pooled]

    async def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: Params = None,
        priority: int = 0,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the model's classes for each prompt. Raises as embed() does."""
        check_answers((await self._until_awake()).pooling, "classify", "classify()")
        pooled = await self._pool(pooled_prompts(prompts, pooling_params), priority)
        return [each.output(ClassificationOutput) for each in pooled]

    async def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:
        """How well the texts of each pair belong together (see LLM.score). Raises as embed()
        does."""
        info = await self._until_awake()
        scoring = Scoring.of(info, self.text, (data_1, data_2), pooling_params)
        return scoring.outputs(await self._pool(scoring.prompts, priority))

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        pooling_task: Pooling | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """What a pooling model answers to a prompt with, as a tensor: one output, as vLLM yields
        it. Raises as embed() does; InvalidRequest for another `pooling_task` than the model's; and
        Unavailable if abort() ends it."""
        pooling = (await self._until_awake()).pooling
        task = pooling_task or pooling or "embed"
        check_answers(pooling, task, f"encode() with pooling_task={task!r}")
        import torch

        asked = pooled_prompts([prompt], pooling_params)
        [pooled] = await self._pool(asked, priority, request_id)
        output = pooled.output(lambda numbers: PoolingOutput(torch.tensor(numbers)))
        yield output if request_id is None else replace(output, request_id=request_id)

    async def _pool(
        self, prompts: Sequence[PooledPrompt], priority: int, given_id: str | None = None
    ) -> list[PooledRequest]:
        pooled = [
            pooled_request(
                *(f"{NAME}-{next(self._ids)}", each.prompt, each.params, self.text),
                priority=priority,
            )
            for each in prompts
        ]
        try:
            await self._pooled.run(pooled, given_id)
        finally:
            self._changed.set()
        return pooled

    async def _until_awake(self) -> EngineInfo:
        """Start the engine process unless it runs, and wait while it sleeps."""
        await self.start()
        while not self._awake.is_set():
            await self._awake.wait()
            self._check_alive()
        assert self._info is not None, "the engine is ready"
        return self._info

    # --- sleep ------------------------------------------------------------------------------------

    async def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> None:
        """Give memory back until wake_up(): that of KV, and at level 2 that of weights (see
        EngineCore.sleep). Running requests are aborted; with the mode "wait" they end first. New
        ones wait for wake_up() from now on.

        Raises SettingsError for an unknown level or mode, and EngineDeadError if the engine process
        ends."""
        check_sleep(level, mode, PAUSE_MODES)
        await self.start()
        async with self._one_at_a_time:
            self._awake.clear()
            try:
                if mode == "abort":
                    self._abort(list(self._streams.values()))
                    self._pooled.abort()
                await self._until(lambda: not self.get_num_unfinished_requests())
                await self._ask(Sleep(level))
            finally:
                self._note_awake()

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Restore what the tags name ("weights", "kv_cache"), or all. Raises SettingsError for an
        unknown tag, and EngineBusy, still asleep, if a part cannot be restored, or if the model's
        folder has other weights now: they need another AsyncLLM."""
        parts = checked_parts(tags)
        await self.start()
        async with self._one_at_a_time:
            answer = await self._ask(WakeUp(tuple(parts)))
            self._note_awake()
            if answer.changed:
                raise EngineBusy("the model's folder has other weights than before the sleep")

    async def is_sleeping(self) -> bool:
        """Whether a part is away, so that requests wait."""
        return bool(self._away)

    def _note_awake(self) -> None:
        if not self._away:
            self._awake.set()

    async def _ask(self, frame: Sleep | WakeUp) -> Slept:
        self._slept = None
        self._send(frame)
        await self._until(lambda: self._slept is not None)
        assert self._slept is not None
        if self._slept.error:
            raise EngineBusy(self._slept.error)
        return self._slept

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until a frame of the engine makes it true. Raises EngineDeadError."""
        while not condition():
            self._check_alive()
            self._changed.clear()
            await self._changed.wait()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End all requests of these ids. Their generators yield one more output, whose open choices
        have the finish reason "abort"; those of encode() raise Unavailable."""
        ids = {request_id} if isinstance(request_id, str) else set(request_id)
        self._abort([one for one in self._streams.values() if one.running.given_id in ids])
        self._pooled.abort(ids)

    def _abort(self, streams: Iterable[_Stream]) -> None:
        for stream in streams:
            running = stream.running
            if not running.ended:
                running.abort()
                self._send(Abort(running.id, running.request.attempt))
                stream.wake()

    def get_num_unfinished_requests(self) -> int:
        streams = sum(not stream.running.ended for stream in self._streams.values())
        return streams + self._pooled.unfinished

    def default_sampling_params(self) -> SamplingParams:
        """The defaults of the model's generation_config.json, and SamplingParams' own for the
        rest."""
        return default_params(self.text)

    def get_tokenizer(self) -> Tokenizer:
        """Raises ModelError if the model has no tokenizer."""
        return needed(self.text, "get_tokenizer()").tokenizer

    # --- frames ---------------------------------------------------------------------------------

    def _send(self, frame: RunJob | Abort | FinishChoice | Sleep | WakeUp) -> None:
        if self._engine is not None:
            self._engine.send(frame)

    def _take(self, frame: ToServer) -> None:
        match frame:
            case Step():
                self._take_step(frame)
                self._pooled.take_step(frame)
            case JobFailed():
                if (stream := self._streams.get(frame.request)) is not None:
                    stream.running.error = error_of(frame.error)
                    stream.wake()
                self._pooled.take_failure(frame)
            case Load():
                self.load = frame.load
            case Slept():
                self._slept, self._away = frame, frame.away
        self._changed.set()

    def _take_step(self, step: Step) -> None:
        now = time.monotonic()
        touched: set[RequestId] = set()
        for prompted in step.prompts:
            if (stream := self._streams.get(prompted.request)) is not None:
                _note_prompt(stream.running, prompted)
        for token in step.tokens:
            if (stream := self._streams.get(token.request)) is not None:
                touched.add(token.request)
                if stream.running.take(token, now):
                    self._send(FinishChoice(token.request, token.attempt, token.choice))
        for id in touched:
            if self._streams[id].running.is_due:
                self._streams[id].wake()


AsyncLLMEngine = AsyncLLM


def _note_prompt(running: RunningRequest, prompted: Prompted) -> None:
    stats = prompted.stats
    running.note_started(running.stats.queued_ts + stats.queue_ms / 1e3)
    running.note_prompt(stats.cached_tokens + stats.host_tokens, prompted.logprobs)


def _model_options(args: EngineArgs) -> dict[str, Any]:
    """The fields of ModelSettings, and those of NodeSettings that only AsyncLLM sets."""
    options = args.engine_options() | {"load_format": args.load_format}
    if args.chat_template is not None:
        options["chat_template"] = str(args.chat_template)
    if not args.model:
        return options | {"served_model_name": (args.name,) if args.name else ()}
    tokenizer = args.tokenizer_path()
    return options | {
        "model": str(args.folder.path),
        "served_model_name": (args.name or args.folder.name,),
        "tokenizer": "" if tokenizer is None else str(tokenizer),
    }


def _read_text(settings: NodeSettings) -> ModelText | None:
    """None if the model has no tokenizer. Raises SetupError."""
    if settings.model and not settings.tokenizer and not has_text(Path(settings.model)):
        return None
    return ModelText.from_artifacts(load_artifacts(settings))

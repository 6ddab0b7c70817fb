"""EngineCore: the engine, one scheduler and one block pool over any Runner.

In: requests, reservations, and runs of blocks whose KV has arrived. Out: for each step the new
tokens, the progress of tracked requests, the full chunks and the requests that ended. One thread,
no clock, no torch.

A request with n choices is n sequences that share the prompt's full blocks; the others copy its
last one if it is partly filled. The leader (the first choice to run) computes the prompt. At the
end of the prompt, one row of logits is sampled for every choice that has no token yet, and the
other choices start from there. With beam search, the sequences are beams (see `beam_requests`).

With overlap, the engine launches a step before it reads the previous one. It reports, caches and
counts only steps that it has read. If a sequence has ended in the meantime, its row is dropped.

If the device lacks memory for a step, the engine launches a smaller one. The tokens do not change,
because they do not depend on the steps.

Errors: InvalidRequest and PromptTooLong for invalid input from a client; ValueError for calls that
break the contract; OutOfMemory if the device lacks memory for any step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from baton_engine.config.request_processors import changes_for
from baton_engine.config.scheduling_options import DEFAULT_SCHEDULING, SchedulingOptions
from baton_engine.core.apply_results import ResultReader
from baton_engine.core.in_flight import InFlightStep, InFlightSteps
from baton_engine.core.kv_chunks import full_chunks
from baton_engine.core.request_limits import RequestLimits
from baton_engine.core.requests import RunningRequests
from baton_engine.core.reservations import NOTHING, Landed, Reservations
from baton_engine.core.sleep import EngineParts, NoRunner, Resources, check_sleep, checked_parts
from baton_engine.core.step_log import StepLog
from baton_engine.core.step_time import book_step
from baton_engine.core.totals import Totals
from baton_engine.errors import EngineAsleep, EngineBusy, OutOfMemory, SettingsError
from baton_engine.interface import (
    MODES,
    PARTS,
    CacheChange,
    Complete,
    EngineInfo,
    Filled,
    KVMemory,
    LogitsProcessor,
    Matcher,
    Part,
    Reservation,
    Runner,
    SleepLevel,
    SleepMode,
    StepResult,
    StoredMemory,
)
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.host_blocks import HostMemory
from baton_engine.kv.host_tier import HostTier
from baton_engine.kv.pins import Pins
from baton_engine.scheduling.draft_source import DraftSource
from baton_engine.scheduling.ranges import Run
from baton_engine.scheduling.scheduler_class import scheduler_class
from baton_engine.scheduling.sequence import BlockNaming, RequestState, Submission, given_ids
from baton_engine.scheduling.step_limits import StepLimits
from baton_engine.scheduling.time_account import TimeAccount
from baton_protocol.errors import GrammarDeadEnd, NotEnoughMemory
from baton_protocol.hashing import extend_hashes, root_hash
from baton_protocol.ids import BlockHash, BlockId, RequestId
from baton_protocol.request import Request
from baton_protocol.store import NodeLoad

logger = logging.getLogger(__name__)

# Times that a step of one token is tried before its request fails.
TRIES_ALONE = 3
# Lower values leave more of the device's memory to steps.
MEMORY_FLAGS = "--gpu-memory-utilization, --kv-memory or --kv-blocks"


class EngineCore:
    """An engine. A request is tokens known and KV computed; each step closes gaps between them
    under one token budget.

    With overlap, a step is launched before the previous one is read, so one step may be in flight
    between two calls of step(). The engine reports, caches and counts only steps that were read.
    Results for a choice that has ended in the meantime are dropped. Blocks of an ended choice that
    a step in flight uses become free when that step is read.
    """

    def __init__(
        self,
        info: EngineInfo,
        runner: Runner,
        host: HostMemory | None = None,
        *,
        stored: StoredMemory | None = None,
        overlap: bool = False,
        drafter: DraftSource | None = None,
        scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
        step_log: StepLog | None = None,
        processors: Sequence[LogitsProcessor] = (),
        resources: Resources | None = None,
    ) -> None:
        """`resources` own the memory that sleep() gives back."""
        if runner.memory.layout != info.layout:
            raise ValueError(f"the runner's pool is {runner.memory.layout}, not {info.layout}")
        self.scheduling = scheduling
        self.memory: KVMemory = runner.memory
        # The pool as the store has it: with a codec, in other bytes.
        self.stored: StoredMemory = runner.memory if stored is None else stored
        self.overlap = overlap
        self._processors = processors
        self._step_log = step_log
        self._resources = resources
        self._away: frozenset[Part] = frozenset()  # what is not there: nothing can be computed
        caching = scheduling.enable_prefix_caching and not info.whole_prompts
        self._pool = BlockPool(info.num_blocks, HostTier(host), info.layout, caching=caching)
        self._scheduler = scheduler_class(scheduling.scheduler_cls)(
            self._pool,
            info.layout,
            max_batched_tokens=info.max_batched_tokens,
            max_num_seqs=info.max_num_seqs,
            options=scheduling,
            uncut=info.whole_prompts,
        )
        self._reservations = Reservations(self._pool, self._scheduler, info.layout)
        self._use(EngineParts(info, runner, host, drafter))
        self._holds: Counter[BlockId] = Counter()
        # What the next step reports: until it is read, the requests that ended between steps, and
        # the choices that were submitted complete.
        self._result = StepResult()
        # Steps of one token that did not fit the device's memory, since one fitted.
        self._refusals = 0
        self._arrivals = 0
        self._starved = False
        self._unbooked: InFlightStep | None = None  # the newest step that was read
        self._totals = Totals()

    def _use(self, parts: EngineParts) -> None:
        """Compute with these from now on. Nothing is in flight."""
        self.info = info = parts.info
        self._runner = parts.runner
        self._drafter = self._scheduler.drafter = parts.drafter
        self._limits = RequestLimits(info)
        self._in_flight = InFlightSteps(
            info, parts.runner, self._pool, self._scheduler, self._step_log
        )
        self._requests = RunningRequests(
            info.layout, self._pool, self._scheduler, self._reservations, self._in_flight
        )
        self._states = self._requests.states
        self._reader = ResultReader(info, self._limits, self._pool, self._scheduler, self._requests)

    @property
    def runner(self) -> Runner:
        """The runner of this engine. A node measures its speed before it accepts requests."""
        return self._runner

    # --- before a request runs ------------------------------------------------------------------

    def block_hashes(self, request: Request) -> tuple[BlockHash, ...]:
        """Hashes of the full spans of the request's known tokens: the prompt, and with n = 1 also
        the outputs that it came with."""
        return self.prefix_hashes(given_ids(request), request.salt, request.adapter)

    def prefix_hashes(
        self, ids: Sequence[int], salt: str = "", adapter: str = ""
    ) -> tuple[BlockHash, ...]:
        """Hashes of the full spans of these tokens, for requests of this salt and adapter."""
        root = root_hash(self.info.fingerprint, adapter, salt)
        return tuple(extend_hashes(root, ids, self.info.layout.block_size))

    def cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading spans whose KV is in this node's prefix cache now, in groups with a
        window as far as the next token sees them."""
        return self._pool.cached(hashes)

    def reserve(self, request: Request) -> Reservation | None:
        """Take blocks for all known tokens of the request. Returns None, without any effect, if the
        blocks are not free or a waiting request has a claim on them.

        All known tokens may be cached (the next token may still come from another node); submit()
        leaves at least one token to compute. A request with prompt_logprobs, or that asks for it,
        uses no cached blocks.

        Raises InvalidRequest or PromptTooLong for a request that can never run, as submit() does.
        """
        self._check_awake()
        self._limits.check(request)
        return self._reservations.reserve(request, self.block_hashes(request))

    def release(self, reservation: Reservation) -> None:
        self._reservations.release(reservation)

    def submit(
        self,
        request: Request,
        *,
        reservation: Reservation | None = None,
        landed: Sequence[Run] = (),
        window_landed: Sequence[Run] | None = None,
        prefill_only: bool = False,
        track: bool = False,
        report_filled: bool = False,
        finished: Sequence[int] = (),
        matcher: Matcher | None = None,
        account: TimeAccount | None = None,
    ) -> None:
        """Queue a request.

        - `landed`: ascending runs [start, end) of the reservation's full spans that have verified
          KV in the groups without a window, in addition to the leading `cached` ones. Without such
          groups: runs that need not be computed for lack of KV in them.
        - `window_landed`: runs that have verified KV in the groups with a window, too. None: the
          same as `landed`. The engine computes the spans outside `landed`, and those outside
          `window_landed` that a computed token sees. It skips the others. For a request that uses
          no cached blocks it computes everything and ignores both.
        - `prefill_only`: end each choice after its first new token.
        - `track`: report Progress. `report_filled`: report Filled.
        - `finished`: choices that are not run.
        - `matcher`: the state at the start of the request's grammar; required if and only if the
          parameters have one. Each choice gets a copy, which first accepts the choice's outputs.
          The choice ends when only EOS could follow.
        - `account`: where book_time() adds its time.

        Raises PromptTooLong or InvalidRequest for a request that can never run, and EngineAsleep.
        If this raises, the caller still owns the reservation.
        """
        self._check_awake()
        self._limits.check(request)
        request = self._limits.with_counts(request)
        changes = changes_for(self._processors, request.params.extra_args)
        if (matcher is None) != (request.params.structured is None):
            raise ValueError(f"request {request.id}: a grammar and its matcher come together")
        if request.id in self._states:
            raise ValueError(f"request {request.id} is running already")
        arrived = Landed(landed, landed if window_landed is None else window_landed)
        if reservation is not None:
            self._reservations.check(request.id, reservation, arrived)
        ends = self._ends(request, finished, matcher)
        self._arrivals += 1
        state = RequestState(
            request,
            BlockNaming(
                root_hash(self.info.fingerprint, request.adapter, request.salt), self.info.layout
            ),
            arrival=self._arrivals,
            given_hashes=reservation.hashes if reservation else self.block_hashes(request),
            submission=Submission(
                prefill_only=prefill_only,
                track=track,
                report_filled=report_filled,
                finished=finished,
                changes=changes,
                matcher=matcher,
                speculates=self._speculates(request, prefill_only),
                account=account,
            ),
            eos_ids=self.info.eos_ids,
            max_tokens=self._limits.max_tokens,
        )
        self._states[request.id] = state
        # The caller that ended an earlier attempt between steps knows that it ended. The next
        # step's `finished` must not name this attempt.
        self._result.drop_request(request.id)
        for choice, complete in ends.items():
            if complete is None:
                state.pending.append(choice)
            else:
                self._result.complete.append(complete)
        self._requests.start_leader(
            state, reservation, NOTHING if state.reads_no_cache else arrived
        )
        self._requests.forget_if_ended(state, self._result)

    def _ends(
        self, request: Request, finished: Sequence[int], matcher: Matcher | None
    ) -> dict[int, Complete | None]:
        """For each choice that is not `finished`: how it ended, or None if it goes on. Raises
        GrammarDeadEnd if it can do neither."""
        if request.params.use_beam_search:  # its answers are known when it has run again
            return {0: None} if len(finished) < request.params.n else {}
        try:
            return {
                choice: self._limits.complete(request, choice, matcher)
                for choice in range(request.params.n)
                if choice not in finished
            }
        except GrammarDeadEnd:
            self._totals.grammar_dead_ends += 1
            raise

    def _speculates(self, request: Request, prefill_only: bool) -> bool:
        params = request.params
        # Beams fork after each token, and a logits processor sees known tokens alone.
        plain = not (params.use_beam_search or params.extra_args)
        return self._drafter is not None and not prefill_only and plain

    # --- ending early ---------------------------------------------------------------------------

    def finish_choice(self, request: RequestId, choice: int) -> None:
        """End one choice early, because a stop string was found. It reports no more tokens. Of a
        beam search, leave out this answer; the search goes on for the others. If it was the last
        choice, the next step's `finished` names the request. Ignores unknown ids."""
        state = self._states.get(request)
        if state is None:
            return
        if state.beams is not None:
            self._requests.leave_out_answer(state, choice)
        elif choice in state.pending:
            state.pending.remove(choice)
        elif choice in state.live:
            self._requests.end(state, choice)
        self._requests.forget_if_ended(state, self._result)

    def abort(self, request: RequestId) -> None:
        """Forget a request and release its blocks. Ignores unknown ids."""
        state = self._states.get(request)
        if state is not None:
            self._requests.forget(state)

    # --- blocks in transfer -----------------------------------------------------------------------

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Add a reference to blocks for a transfer, so that they are not reused. Ignores 0."""
        blocks = [id for id in blocks if id]
        self._pool.host.settle()  # a launched step may load some of them from the host tier
        self._pool.touch(blocks)
        self._holds.update(blocks)

    def unhold(self, blocks: Sequence[BlockId]) -> None:
        blocks = [id for id in blocks if id]
        missing = Counter(blocks) - self._holds
        if missing:
            raise ValueError(f"blocks {sorted(missing)} are given back and were not held")
        self._holds.subtract(blocks)
        self._pool.release(blocks)

    # --- pinned prefixes --------------------------------------------------------------------------

    @property
    def pins(self) -> Pins:
        """The pinned prefixes. reset_prefix_cache() and sleep() unpin all."""
        return self._scheduler.pins

    # --- sleep ------------------------------------------------------------------------------------

    @property
    def is_sleeping(self) -> bool:
        """Whether a part is away, so that nothing can be computed."""
        return bool(self._away)

    @property
    def away(self) -> tuple[Part, ...]:
        """The parts that are away."""
        return tuple(part for part in PARTS if part in self._away)

    def sleep(self, level: SleepLevel = 1, mode: SleepMode = "refuse") -> None:
        """Give back the memory of KV and, as `level` says, of weights, until wake_up(). The prefix
        cache is dropped, with the host tier. At level 1 weights move to host memory: on a CPU they
        are there, and stay. At level 2 they are dropped.

        Raises EngineBusy, without any effect, while a request or a transfer is in flight. With the
        mode "abort", requests are forgotten instead, as abort() does. Raises SettingsError for
        another level or mode.
        """
        check_sleep(level, mode, MODES)
        if mode == "abort":
            for request in list(self._states):
                self.abort(request)
        resources = self._idle_resources("sleep")
        self._stop_computing()
        resources.free_kv()
        resources.free_weights(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Restore the parts that `tags` name ("weights", "kv_cache"), or all. The engine computes
        again when both are there. If the model's folder has other weights than before, the engine
        has another fingerprint. Raises ModelError or SettingsError if a part cannot be restored;
        then the engine still sleeps."""
        wanted = checked_parts(tags) & self._away
        if not wanted or self._resources is None:
            return
        if "weights" in wanted:  # first: loading them needs memory beyond theirs
            self._resources.restore_weights()
        if "kv_cache" in wanted:
            self._resources.restore_kv()
        self._use_resources(self._resources, self._away - wanted)

    def update_weights(
        self, path: Path | None = None, tensors: Mapping[str, Any] | None = None
    ) -> None:
        """Compute with other weights from now on: those in the folder `path`, or the present ones
        with some `tensors` replaced, by their names in the folder. The fingerprint follows, and
        with it the names of blocks: KV of the old weights is never used again. An engine that
        sleeps gets its weights back, and sleeps on if its KV is away.

        Raises EngineBusy, without any effect, while a request or a transfer is in flight: no
        request mixes two versions. Raises ModelError or SettingsError, with the old weights in
        place, if these are of no version of this model.
        """
        weights = path if tensors is None else tensors
        if weights is None or (path is not None and tensors is not None):
            raise SettingsError("update_weights takes a path or tensors, one of both")
        resources, away = self._idle_resources("take other weights"), self._away
        self._stop_computing()
        try:
            resources.replace_weights(weights)
            away -= {"weights"}
        finally:
            self._use_resources(resources, away)

    def _use_resources(self, resources: Resources, away: frozenset[Part]) -> None:
        """Compute again if no part is away."""
        if not away:
            parts = resources.start()
            self._pool.host.use(parts.host)
            self._use(parts)
        self._away = away

    def _stop_computing(self) -> None:
        """Forget the cache, and drop all references to what computes, so that its memory can be
        freed. Until the parts are used again, all count as away."""
        self.reset_prefix_cache()
        self._pool.host.use(None)
        self._use(EngineParts(self.info, NoRunner(self.memory)))
        self._away = frozenset(PARTS)

    def _idle_resources(self, act: str) -> Resources:
        if self._resources is None:
            raise SettingsError(f"this engine cannot {act}: nothing owns its memory")
        if not self._states:  # blocks of aborted requests, and steps that only those are in
            self._requests.release_lingering()
            while self._in_flight:
                self._in_flight.read()
        held = len(+self._holds) + sum(1 for _ in self._reservations.blocks())
        if self._states or held:
            raise EngineBusy(
                f"the engine cannot {act} now: {len(self._states)} requests run and {held} blocks"
                " are reserved or in transfer; wait for them, or abort them first"
            )
        return self._resources

    def _check_awake(self) -> None:
        if self._away:
            raise EngineAsleep(
                f"the engine sleeps without {' and '.join(sorted(self._away))}; wake it up first"
            )

    # --- steps ------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether step() has something to compute, read or report."""
        lingering = self._requests.lingering
        return bool(self._states or self._result.finished or lingering or self._in_flight)

    def step(self) -> StepResult:
        """Launch a step and read it. With overlap, launch the next step and then read the oldest
        one in flight. If the runner raises, no state is lost: call step() again.

        If the device lacks memory for a step, the engine reads the step in flight and tries smaller
        ones (see `scheduling.step_limits`); no token changes. A request that does not fit even
        alone, in three calls, is in `failed`. Raises OutOfMemory if no step fits until another one
        would fail: then the device, not the request, is the cause."""
        self._requests.release_lingering()
        self._starved = False
        drafter = None if self._in_flight else self._drafter
        started = drafter.clock() if drafter is not None else 0.0
        if not self._in_flight:
            self._launch()
            self._starved = self._scheduler.starved
        if self.overlap and self._in_flight:
            # If this step does not fit the device's memory, it is scheduled again when the one in
            # flight is read.
            self._in_flight.launch()
        read = self._in_flight.read() if self._in_flight else None
        result, self._result = self._result, StepResult()
        if read is not None:
            if drafter is not None and not self._in_flight:
                self._note_time(drafter, read[0], drafter.clock() - started)
            self._reader.take(*read, result)
            self._count_seconds_won(read[0], result)
            self._log(read[0], result)
            self._unbooked = read[0]
        self._totals.count_step(result)
        return result

    def book_time(self, seconds_per_token: float) -> None:
        """Add the time of the step that was read last to the accounts of its requests. No effect if
        no step was read since the last call."""
        step, self._unbooked = self._unbooked, None
        if step is not None:
            book_step(step, seconds_per_token)

    def limit_steps(self, tokens: int, seqs: int) -> None:
        """Let a step compute at most `tokens` tokens of `seqs` sequences, as a bench does that
        compares limits. Raises ValueError while there is work, and for more than `info` says."""
        info = self.info
        if not (1 <= tokens <= info.max_batched_tokens and 1 <= seqs <= info.max_num_seqs):
            raise ValueError(f"steps of {tokens} tokens and {seqs} sequences are not planned")
        if self.has_work():
            raise ValueError("the limits of steps cannot change while requests run")
        self._scheduler.limits = StepLimits(tokens, seqs)

    def _launch(self) -> None:
        """Launch a step. While the device lacks memory for it, launch a smaller one instead."""
        scheduler = self._scheduler
        while tokens := self._in_flight.launch():
            running = len(scheduler.running)
            alone = scheduler.shrink(tokens)
            if alone is None:
                limits = scheduler.limits
                logger.warning(
                    "the device lacks memory for a step of %d tokens of %d sequences; steps now"
                    " have at most %d tokens and %d sequences; if this repeats, lower %s",
                    *(tokens, running, limits.tokens, limits.seqs, MEMORY_FLAGS),
                )
                continue
            self._refusals += 1
            if self._refusals % TRIES_ALONE:
                return  # other processes may give back memory until the next call
            self._fail_alone(alone.state)
        if self._in_flight:
            self._refusals = 0

    @staticmethod
    def _note_time(drafter: DraftSource, step: InFlightStep, seconds: float) -> None:
        """Tell the drafter how long a step took, if none of its sequences computed its prompt."""
        if all(piece.count == 1 + len(piece.drafts) for piece in step.pieces):
            drafter.note_step(sum(piece.count for piece in step.pieces), seconds)

    def _log(self, step: InFlightStep, result: StepResult) -> None:
        if self._step_log is not None and step.schedule is not None:
            rows = list(zip(step.pieces, step.rows, strict=True))
            self._step_log.step(step.number, rows, step.schedule, result, self.load())

    def _count_seconds_won(self, step: InFlightStep, result: StepResult) -> None:
        if self._drafter is None or not result.drafts:
            return
        decoding = sum(piece.count == 1 + len(piece.drafts) for piece in step.pieces)
        won = self._drafter.note_drafts(decoding, result.drafted, result.accepted)
        self._totals.count_seconds_won(won)

    def _fail_alone(self, state: RequestState) -> None:
        """End a request that does not fit the device's memory even alone. Raises OutOfMemory if no
        step has fitted since another one did not fit either."""
        if self._refusals == 2 * TRIES_ALONE:
            self._refusals = TRIES_ALONE
            raise OutOfMemory(f"no request fits the device's memory; lower {MEMORY_FLAGS}")
        size, remedy = f"1 token and {state.params.n} choices", "lower n, or"
        if self.info.whole_prompts:
            size, remedy = f"{state.prompt_len} tokens", "shorten the text, or lower"
        error = NotEnoughMemory(
            f"a step of this request alone, with {size}, needs more memory than the node's device"
            f" has left; {remedy} the node's {MEMORY_FLAGS}"
        )
        self._requests.fail(state, error, self._result)

    def starved(self) -> bool:
        """True if the last call of step() preempted a sequence, or ran nothing, because blocks were
        short. Parked requests should then release their blocks, youngest first. False if a request
        only waits for its turn while others run; otherwise every queue would take the blocks of
        parked requests."""
        return self._starved

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV, in both tiers: later requests compute their prompts. Running ones
        keep their blocks, and no token changes. Pinned prefixes are unpinned."""
        self.pins.clear()
        self._pool.reset_cache()

    # --- reports ----------------------------------------------------------------------------------

    def cache_changes(self) -> CacheChange:
        return self._pool.take_changes()

    def full_chunks(self, request: RequestId) -> tuple[Filled, ...]:
        """All full chunks that a request holds now, each hash once; () for an unknown id."""
        state = self._states.get(request)
        return full_chunks(state, self.info.layout) if state is not None else ()

    def cached_chunks(self) -> tuple[BlockHash, ...]:
        return self._pool.cached_chunks()

    def load(self) -> NodeLoad:
        """The engine's counters and gauges. The node adds those of its transfers."""
        scheduler = self._scheduler
        return NodeLoad(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            queued_tokens=sum(sequence.prompt_missing for sequence in scheduler.sequences()),
            preemptions_total=scheduler.preemptions,
            pinned_blocks=len(self.pins.blocks),
            **self._pool.figures(),
            **self._totals.figures(),
        )

    def check_integrity(self) -> None:
        """Raise, with the numbers, unless free + held == total and every reference is accounted
        for."""
        expected = self._holds + self._requests.references()
        expected.update(self._reservations.blocks())
        expected.update(self.pins.references())
        self._pool.check_integrity(expected)

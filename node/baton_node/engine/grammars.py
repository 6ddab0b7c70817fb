"""Jobs that wait until their grammar is compiled, and the thread that compiles.

    In    jobs with a grammar that is not known yet, and later frames about them
    Out   the jobs with their Matcher, or an error, and the frames that wait behind them

The step loop calls everything here but `_compile_all`, which the worker thread runs; it starts with
the first job. A grammar takes it milliseconds, and steps go on meanwhile. Before the first one it
loads the tokenizer, once: libraries hold Python's lock for it, 0.3 s for 49,000 tokens, and steps
pause as long.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from baton_node.engine.job import Counters, Job, JobKey
from baton_node.ipc.messages import FinishChoice
from baton_protocol.errors import BatonError, InternalError, InvalidRequest, Unavailable
from baton_protocol.ids import BlockHash
from baton_protocol.link import FirstTokens, NoFirstTokens, PrefillJob, RunJob

if TYPE_CHECKING:  # llguidance takes 30 ms to import; the worker does it when it has to
    from baton_text.grammar import Grammars, Matcher

logger = logging.getLogger(__name__)
Behind = FirstTokens | NoFirstTokens | FinishChoice


@dataclass(slots=True, eq=False)
class CompilingJob:
    """A job that waits. `hashes` are those of its full blocks, `uncached` the tokens it is going to
    compute here; `behind` are the frames about it that came since. The worker sets `matcher` or
    `error`; a `dropped` job gets neither."""

    job: Job
    frame: PrefillJob | RunJob
    grammar: str
    hashes: Sequence[BlockHash]
    uncached: int
    behind: list[Behind] = field(default_factory=list)
    matcher: Matcher | None = None
    error: BatonError | None = None
    dropped: bool = False


class CompilingJobs:
    """len() is how many jobs wait. `load` makes the compiler; the worker calls it once, or again
    where it raised. `fileno` becomes readable when ready() has something to give."""

    def __init__(self, load: Callable[[], Grammars], counters: Counters) -> None:
        self._load = load
        self._counters = counters
        self._grammars: Grammars | None = None
        self._jobs: dict[JobKey, CompilingJob] = {}
        self._queue: SimpleQueue[CompilingJob | None] = SimpleQueue()
        self._compiled: deque[CompilingJob] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._worker: Thread | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def sequences(self) -> int:
        """What the jobs are going to run here."""
        return sum(waiting.job.sequences for waiting in self._jobs.values())

    @property
    def tokens(self) -> int:
        """What they are going to compute here."""
        return sum(waiting.uncached for waiting in self._jobs.values())

    def jobs(self) -> Iterable[Job]:
        return [waiting.job for waiting in self._jobs.values()]

    def has(self, key: JobKey) -> bool:
        return key in self._jobs

    def known(self, grammar: str) -> Matcher | None:
        """A fresh Matcher of a grammar that is compiled already; its job does not have to wait."""
        if self._grammars is None:
            return None
        matcher = self._grammars.known(grammar)
        self._count(self._grammars)
        return matcher

    def request(self, waiting: CompilingJob) -> None:
        """Compile its grammar. Jobs are compiled in the order of these calls."""
        if self._worker is None:
            self._worker = Thread(target=self._compile_all, name="grammars", daemon=True)
            self._worker.start()
        self._jobs[waiting.job.key] = waiting
        self._queue.put(waiting)

    def follow(self, frame: Behind) -> bool:
        """Whether the frame's job waits: then the frame does too."""
        waiting = self._jobs.get((frame.request, frame.attempt))
        if waiting is not None:
            waiting.behind.append(frame)
        return waiting is not None

    def drop(self, key: JobKey) -> bool:
        """Forget a job and its frames. False if it does not wait."""
        waiting = self._jobs.pop(key, None)
        if waiting is not None:
            waiting.dropped = True
        return waiting is not None

    def ready(self) -> list[CompilingJob]:
        """The jobs that need not wait any more, each once, in the order of request()."""
        if self._worker is None:
            return []
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        compiled = [self._compiled.popleft() for _ in range(len(self._compiled))]
        found = [waiting for waiting in compiled if not waiting.dropped]
        for waiting in found:
            del self._jobs[waiting.job.key]
        if self._grammars is not None:
            self._count(self._grammars)
        return found

    def fileno(self) -> int:
        return self._wake

    def close(self) -> None:
        """End the worker, once it has compiled what it compiles now: no thread may be inside
        llguidance when Python ends."""
        self._closed = True
        if self._worker is not None:
            self._queue.put(None)
            self._worker.join()
        os.close(self._wake)

    def _count(self, grammars: Grammars) -> None:
        self._counters.grammars_compiled = grammars.compiled
        self._counters.grammar_hits = grammars.hits
        self._counters.grammar_compile_seconds = round(grammars.compile_s, 6)

    # --- the worker -----------------------------------------------------------------------------

    def _compile_all(self) -> None:
        while (waiting := self._queue.get()) is not None:
            if self._closed or waiting.dropped:
                continue
            try:
                waiting.matcher = self._compile(waiting.grammar)
            except BatonError as error:
                waiting.error = error
            self._compiled.append(waiting)
            os.eventfd_write(self._wake, 1)

    def _compile(self, grammar: str) -> Matcher:
        """Raise BatonError."""
        if self._grammars is None:
            try:
                self._grammars = self._load()
            except Exception as error:
                logger.exception("the tokenizer cannot be used for grammars")
                raise Unavailable(
                    f"this node cannot use its tokenizer for grammars: {error}; its log says why"
                ) from error
        from baton_text.grammar import GrammarError

        try:
            return self._grammars.matcher(grammar)
        except GrammarError as error:
            raise InvalidRequest(f"the grammar cannot be compiled: {error}") from error
        except BaseException as error:  # a panic in llguidance is no Exception
            logger.exception("a grammar of %d bytes was not compiled", len(grammar.encode()))
            raise InternalError(
                "the grammar could not be compiled; the node's log says why"
            ) from error

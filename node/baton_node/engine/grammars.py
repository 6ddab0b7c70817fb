"""Jobs that wait for their grammar, and the worker thread that compiles grammars.

    In    jobs whose grammar is not compiled yet, and later frames about them
    Out   the jobs with a Matcher or an error, and their frames in order

The step loop's thread calls everything here except `_compile_all`, which the worker thread runs.
The worker starts with the first job. It compiles a grammar in milliseconds while steps continue.
Before the first grammar it loads the tokenizer, once. Libraries hold the GIL for that, 0.3 s for
49,000 tokens, and steps pause meanwhile.
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

from baton_node.engine.counters import Counters
from baton_node.engine.job import Job, JobKey
from baton_node.ipc.messages import FinishChoice
from baton_protocol.errors import BatonError, InternalError, InvalidRequest, Unavailable
from baton_protocol.ids import BlockHash
from baton_protocol.link import FirstTokens, NoFirstTokens, PrefillJob, RunJob

if TYPE_CHECKING:  # llguidance takes 30 ms to import; the worker imports it when needed
    from baton_text.grammar import Grammars, Matcher

logger = logging.getLogger(__name__)
Behind = FirstTokens | NoFirstTokens | FinishChoice


@dataclass(slots=True, eq=False)
class CompilingJob:
    """A job that waits for its grammar.

    `hashes` name its full blocks; `uncached` is the number of tokens that it will compute on this
    node. `behind` holds the frames about it that arrived while it waits. The worker sets `matcher`
    or `error`, and skips a job that is `dropped`.
    """

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
    """The jobs that wait for their grammar; len() is their number.

    `load` makes the compiler. The worker calls it before the first grammar, and again for the next
    one if it raises. The file descriptor becomes readable when ready() may return jobs.
    """

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
        """Number of sequences that the waiting jobs will run on this node."""
        return sum(waiting.job.sequences for waiting in self._jobs.values())

    @property
    def tokens(self) -> int:
        """Number of tokens that the waiting jobs will compute on this node."""
        return sum(waiting.uncached for waiting in self._jobs.values())

    def jobs(self) -> Iterable[Job]:
        return [waiting.job for waiting in self._jobs.values()]

    def has(self, key: JobKey) -> bool:
        return key in self._jobs

    def known(self, grammar: str) -> Matcher | None:
        """Return a new Matcher of this grammar if it is compiled already, or None."""
        if self._grammars is None:
            return None
        matcher = self._grammars.known(grammar)
        self._count(self._grammars)
        return matcher

    def request(self, waiting: CompilingJob) -> None:
        """Let the job wait and compile its grammar. Grammars are compiled in the order of calls."""
        if self._worker is None:
            self._worker = Thread(target=self._compile_all, name="grammars", daemon=True)
            self._worker.start()
        self._jobs[waiting.job.key] = waiting
        self._queue.put(waiting)

    def follow(self, frame: Behind) -> bool:
        """If the frame's job waits, keep the frame with it. Return whether it does."""
        waiting = self._jobs.get((frame.request, frame.attempt))
        if waiting is not None:
            waiting.behind.append(frame)
        return waiting is not None

    def drop(self, key: JobKey) -> bool:
        """Forget a job and its frames. Return False if the job does not wait."""
        waiting = self._jobs.pop(key, None)
        if waiting is not None:
            waiting.dropped = True
        return waiting is not None

    def ready(self) -> list[CompilingJob]:
        """Remove and return the jobs that have a matcher or an error, in the order of request()."""
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
        """End the worker after the grammar that it compiles now: no thread may be inside llguidance
        when Python exits."""
        self._closed = True
        if self._worker is not None:
            self._queue.put(None)
            self._worker.join()
        os.close(self._wake)

    def _count(self, grammars: Grammars) -> None:
        self._counters.set_to(
            grammars_compiled=grammars.compiled,
            grammar_hits=grammars.hits,
            grammar_compile_seconds=round(grammars.compile_s, 6),
        )

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
        """Compile a grammar. Raise Unavailable if the tokenizer cannot be loaded, InvalidRequest if
        the grammar is wrong, and InternalError if the compiler fails."""
        if self._grammars is None:
            try:
                self._grammars = self._load()
            except Exception as error:
                logger.exception("the tokenizer cannot be used for grammars")
                raise Unavailable(
                    f"this node cannot use its tokenizer for grammars: {error}; see its log"
                ) from error
        from baton_text.grammar import GrammarError

        try:
            return self._grammars.matcher(grammar)
        except GrammarError as error:
            raise InvalidRequest(f"the grammar cannot be compiled: {error}") from error
        except BaseException as error:  # a panic in llguidance is not an Exception
            logger.exception("compiling a grammar of %d bytes failed", len(grammar.encode()))
            raise InternalError("compiling the grammar failed; see the node's log") from error

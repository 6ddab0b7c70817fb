"""Compiles the grammars of jobs, in a worker thread.

    In    jobs whose grammar is not compiled yet
    Out   their Matchers, or errors

The step loop's thread calls everything here except `_compile_all`, which the worker thread runs.
The worker starts with the first job. It compiles a grammar in milliseconds while steps continue.
Before the first grammar it loads the tokenizer, once. Libraries hold the GIL for that, 0.3 s for
49,000 tokens, and steps pause meanwhile.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from baton_node.engine.counters import Counters
from baton_node.engine.job import Job
from baton_protocol.errors import BatonError, InternalError, InvalidRequest, Unavailable

if TYPE_CHECKING:  # llguidance takes 30 ms to import; the worker imports it when needed
    from baton_text.grammars.grammars import Grammars
    from baton_text.grammars.matcher import Matcher

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """The grammar of a job: a Matcher at its start, or why there is none."""

    job: Job
    matcher: Matcher | BatonError


class GrammarCompiler:
    """Compiles the grammars of jobs in the state "compiling", in the order in which they come.

    `load` makes the compiler. The worker calls it before the first grammar, and again for the next
    one if it raises. The file descriptor becomes readable when take_compiled() may return grammars.
    """

    def __init__(self, load: Callable[[], Grammars], counters: Counters) -> None:
        self._load = load
        self._counters = counters
        self._grammars: Grammars | None = None
        self._queue: SimpleQueue[tuple[Job, str] | None] = SimpleQueue()
        self._compiled: deque[CompiledGrammar] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._worker: Thread | None = None
        self._closed = False

    def find_matcher(self, grammar: str) -> Matcher | None:
        """Return a new Matcher of this grammar if it is compiled already, or None."""
        if self._grammars is None:
            return None
        matcher = self._grammars.cached_matcher(grammar)
        self._count(self._grammars)
        return matcher

    def compile_for(self, job: Job, grammar: str) -> None:
        """Compile the grammar of a job, unless the job ends before its turn comes."""
        if self._worker is None:
            self._worker = Thread(target=self._compile_all, name="grammars", daemon=True)
            self._worker.start()
        self._queue.put((job, grammar))

    def take_compiled(self) -> list[CompiledGrammar]:
        """Return the new grammars of jobs that have not ended, in the order of compile_for()."""
        if self._worker is None:
            return []
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        compiled = [self._compiled.popleft() for _ in range(len(self._compiled))]
        if self._grammars is not None:
            self._count(self._grammars)
        return [grammar for grammar in compiled if grammar.job.state == "compiling"]

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
        while (item := self._queue.get()) is not None:
            job, grammar = item
            if self._closed or job.state != "compiling":
                continue
            try:
                compiled = CompiledGrammar(job, self._compile(grammar))
            except BatonError as error:
                compiled = CompiledGrammar(job, error)
            self._compiled.append(compiled)
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
        from baton_text.grammars.errors import GrammarError

        try:
            return self._grammars.matcher(grammar)
        except GrammarError as error:
            raise InvalidRequest(f"the grammar cannot be compiled: {error}") from error
        except BaseException as error:  # a panic in llguidance is not an Exception
            logger.exception("compiling a grammar of %d bytes failed", len(grammar.encode()))
            raise InternalError("compiling the grammar failed; see the node's log") from error

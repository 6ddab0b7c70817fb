"""Grammars of one model, checked on its tokenizer before a request that has one is queued.

In: what a client asked for. Out: the text of a grammar, as nodes get it. Nothing is made for a
model of which nobody asks any. Translating, compiling and reading the tokenizer run in threads, two
at a time, so that threads stay free for long prompts; what was checked lately needs none. A check
goes on when its client leaves: a thread cannot be stopped, and must not be counted as free.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from threading import Lock
from typing import NamedTuple

from baton_text.grammar import COMPILED_KEPT, GrammarError, Grammars, Kind, grammar_of
from baton_text.tokenizer import Tokenizer

AT_ONCE = 2

Value = str | tuple[str, ...]


class GrammarCounts(NamedTuple):
    """Grammars compiled, those that were compiled already, and the seconds that compiling took."""

    compiled: int = 0
    hits: int = 0
    compile_s: float = 0.0

    def plus(self, other: GrammarCounts) -> GrammarCounts:
        return GrammarCounts(
            self.compiled + other.compiled,
            self.hits + other.hits,
            self.compile_s + other.compile_s,
        )


class ModelGrammars:
    """Of one model."""

    def __init__(self) -> None:
        self._making = Lock()
        self._grammars: Grammars | None = None
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._texts: OrderedDict[tuple[Kind, Value], str] = OrderedDict()  # those that compile
        self._checks: dict[tuple[Kind, Value], asyncio.Task[str]] = {}

    @property
    def counts(self) -> GrammarCounts:
        made = self._grammars
        if made is None:
            return GrammarCounts()
        return GrammarCounts(made.compiled, made.hits, made.compile_s)

    async def text(self, tokenizer: Tokenizer, kind: Kind, value: Value) -> str:
        """See `grammar_of`, which takes JSON as text. Raise GrammarError for what does not compile
        on the model's tokenizer."""
        key = (kind, value)
        known = self._texts.get(key)
        made = self._grammars
        if known is not None and made is not None and made.known(known) is not None:
            self._texts.move_to_end(key)
            return known
        check = self._checks.get(key)
        if check is None:
            check = asyncio.create_task(self._check(tokenizer, kind, value))
            self._checks[key] = check
            check.add_done_callback(lambda done: self._checked(key, done))
        return await asyncio.shield(check)

    async def _check(self, tokenizer: Tokenizer, kind: Kind, value: Value) -> str:
        async with self._turns:
            return await asyncio.to_thread(self._compile, tokenizer, kind, value)

    def _checked(self, key: tuple[Kind, Value], check: asyncio.Task[str]) -> None:
        del self._checks[key]
        if check.cancelled() or check.exception() is not None:
            return
        self._texts[key] = check.result()
        while len(self._texts) > COMPILED_KEPT:
            self._texts.popitem(last=False)

    def _compile(self, tokenizer: Tokenizer, kind: Kind, value: Value) -> str:
        text = grammar_of(kind, value, tokenizer)
        self._made(tokenizer).check(text)
        return text

    def _made(self, tokenizer: Tokenizer) -> Grammars:
        with self._making:
            if self._grammars is None:
                try:
                    self._grammars = Grammars(tokenizer)
                except Exception as error:
                    raise GrammarError(
                        f"this model's tokenizer cannot be used with grammars: {error}"
                    ) from error
            return self._grammars

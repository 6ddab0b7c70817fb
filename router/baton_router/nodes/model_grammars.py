"""Checks grammars against one model's tokenizer before their requests are queued.

In: what a client asked for. Out: the grammar's text for the nodes. A model's tokenizer is prepared
at its first grammar. Translating, compiling and reading the tokenizer run in at most two threads at
a time, which leaves threads for long prompts; a recently checked grammar needs none. A check
continues after its client leaves, because a running thread cannot be stopped.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import NamedTuple

from baton_text.grammars.answer_grammar import CallRules, answer_grammar
from baton_text.grammars.constraints import Kind, grammar_of
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammars import COMPILED_KEPT, Grammars
from baton_text.parsers.parser import ReasoningParser, ToolParser
from baton_text.tokenizer import Tokenizer

AT_ONCE = 2

Value = str | tuple[str, ...]


class GrammarCounts(NamedTuple):
    """Grammars compiled, grammars found compiled, and seconds spent on compiling."""

    compiled: int = 0
    hits: int = 0
    compile_s: float = 0.0

    def plus(self, other: GrammarCounts) -> GrammarCounts:
        return GrammarCounts(
            self.compiled + other.compiled,
            self.hits + other.hits,
            self.compile_s + other.compile_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """What a whole answer must match: optional reasoning, then content or tool calls.

    `content` is a kind and its value. `calls` is the parser for the model's form of calls (None: no
    calls allowed). `tools` is a JSON object that maps function names to schemas. The other fields
    are those of `answer_grammar` and CallRules.
    """

    content: tuple[Kind, Value] | None = None
    calls: ToolParser | None = None
    tools: str = "{}"
    required: bool = False
    strict: frozenset[str] = frozenset()
    parallel: bool = True
    reasoning: ReasoningParser | None = None
    begun: bool = False
    budget: int | None = None
    inside: bool = False

    def grammar(self, tokenizer: Tokenizer) -> str:
        """The grammar's text. Raise GrammarError."""
        calls = None
        if self.calls is not None:
            calls = CallRules(
                parser=self.calls,
                tools=json.loads(self.tools),
                required=self.required,
                strict=self.strict,
                parallel=self.parallel,
            )
        text = answer_grammar(
            tokenizer,
            content=None if self.content is None else grammar_of(*self.content, tokenizer),
            calls=calls,
            reasoning=self.reasoning,
            begun=self.begun,
            budget=self.budget,
            inside=self.inside,
        )
        assert text is not None, "at least one rule must be set"
        return text


class ModelGrammars:
    """The checked grammars of one model."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._grammars: Grammars | None = None
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._texts: OrderedDict[Hashable, str] = OrderedDict()  # by key; the last used at the end
        self._checks: dict[Hashable, asyncio.Task[str]] = {}

    @property
    def counts(self) -> GrammarCounts:
        grammars = self._grammars
        if grammars is None:
            return GrammarCounts()
        return GrammarCounts(grammars.compiled, grammars.hits, grammars.compile_s)

    async def text(self, tokenizer: Tokenizer, kind: Kind, value: Value) -> str:
        """The grammar's text (see `grammar_of`, which takes JSON as text). Raise GrammarError if it
        does not compile with the model's tokenizer."""
        make = partial(grammar_of, kind, value, tokenizer)
        return await self._text(tokenizer, (kind, value), make)

    async def answer(self, tokenizer: Tokenizer, rules: AnswerRules) -> str:
        """The grammar's text for a whole answer. Raise GrammarError; see `answer_grammar`."""
        return await self._text(tokenizer, rules, partial(rules.grammar, tokenizer))

    async def _text(self, tokenizer: Tokenizer, key: Hashable, make: Callable[[], str]) -> str:
        text = self._texts.get(key)
        grammars = self._grammars
        if text is not None and grammars is not None and grammars.cached_matcher(text) is not None:
            self._texts.move_to_end(key)
            return text
        check = self._checks.get(key)
        if check is None:
            check = asyncio.create_task(self._check(tokenizer, make))
            self._checks[key] = check
            check.add_done_callback(lambda done: self._store_result(key, done))
        return await asyncio.shield(check)

    async def _check(self, tokenizer: Tokenizer, make: Callable[[], str]) -> str:
        async with self._slots:
            return await asyncio.to_thread(self._compile, tokenizer, make)

    def _store_result(self, key: Hashable, check: asyncio.Task[str]) -> None:
        del self._checks[key]
        if check.cancelled() or check.exception() is not None:
            return
        self._texts[key] = check.result()
        while len(self._texts) > COMPILED_KEPT:
            self._texts.popitem(last=False)

    def _compile(self, tokenizer: Tokenizer, make: Callable[[], str]) -> str:
        text = make()
        self._prepared(tokenizer).check(text)
        return text

    def _prepared(self, tokenizer: Tokenizer) -> Grammars:
        with self._lock:
            if self._grammars is None:
                try:
                    self._grammars = Grammars(tokenizer)
                except Exception as error:
                    raise GrammarError(
                        f"this model's tokenizer cannot be used with grammars: {error}"
                    ) from error
            return self._grammars

"""Grammars of one model, checked on its tokenizer before a request that has one is queued.

In: what a client asked for. Out: the text of a grammar, as nodes get it. Nothing is made for a
model of which nobody asks any. Translating, compiling and reading the tokenizer run in threads, two
at a time, so that threads stay free for long prompts; what was checked lately needs none. A check
goes on when its client leaves: a thread cannot be stopped, and must not be counted as free.
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

from baton_text.answer_grammar import CallRules, answer_grammar
from baton_text.grammar import COMPILED_KEPT, GrammarError, Grammars, Kind, grammar_of
from baton_text.parsers.parser import ReasoningParser, ToolParser
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """What a whole answer must match: its reasoning, and then its content or its calls.

    `content` is a kind and its value. `calls` is how calls are written, None where there are none;
    `tools` are the functions, the text of a JSON object with their schemas by name. The rest is as
    `answer_grammar` and its CallRules have it.
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

    def grammar(self, tokenizer: Tokenizer) -> str:
        """Raise GrammarError."""
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
        )
        assert text is not None, "rules without any rule need no grammar"
        return text


class ModelGrammars:
    """Of one model."""

    def __init__(self) -> None:
        self._making = Lock()
        self._grammars: Grammars | None = None
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._texts: OrderedDict[Hashable, str] = OrderedDict()  # those that compile, by their key
        self._checks: dict[Hashable, asyncio.Task[str]] = {}

    @property
    def counts(self) -> GrammarCounts:
        made = self._grammars
        if made is None:
            return GrammarCounts()
        return GrammarCounts(made.compiled, made.hits, made.compile_s)

    async def text(self, tokenizer: Tokenizer, kind: Kind, value: Value) -> str:
        """See `grammar_of`, which takes JSON as text. Raise GrammarError for what does not compile
        on the model's tokenizer."""
        make = partial(grammar_of, kind, value, tokenizer)
        return await self._text(tokenizer, (kind, value), make)

    async def answer(self, tokenizer: Tokenizer, rules: AnswerRules) -> str:
        """Of a whole answer. Raise GrammarError, see `answer_grammar`."""
        return await self._text(tokenizer, rules, partial(rules.grammar, tokenizer))

    async def _text(self, tokenizer: Tokenizer, key: Hashable, make: Callable[[], str]) -> str:
        known = self._texts.get(key)
        made = self._grammars
        if known is not None and made is not None and made.known(known) is not None:
            self._texts.move_to_end(key)
            return known
        check = self._checks.get(key)
        if check is None:
            check = asyncio.create_task(self._check(tokenizer, make))
            self._checks[key] = check
            check.add_done_callback(lambda done: self._checked(key, done))
        return await asyncio.shield(check)

    async def _check(self, tokenizer: Tokenizer, make: Callable[[], str]) -> str:
        async with self._turns:
            return await asyncio.to_thread(self._compile, tokenizer, make)

    def _checked(self, key: Hashable, check: asyncio.Task[str]) -> None:
        del self._checks[key]
        if check.cancelled() or check.exception() is not None:
            return
        self._texts[key] = check.result()
        while len(self._texts) > COMPILED_KEPT:
            self._texts.popitem(last=False)

    def _compile(self, tokenizer: Tokenizer, make: Callable[[], str]) -> str:
        text = make()
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

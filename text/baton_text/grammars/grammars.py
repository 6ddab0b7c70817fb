"""Grammars: compiles the grammars of one tokenizer, and keeps the last ones.

In: grammar text. Out: a Matcher, or a GrammarError that says what is wrong. llguidance does the
parsing.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Iterator
from threading import Lock

from llguidance import LLMatcher, LLTokenizer

from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammar_text import grammars_in
from baton_text.grammars.lark import Lark
from baton_text.grammars.lark_syntax import schemas_in
from baton_text.grammars.limits import (
    LIMITS,
)
from baton_text.grammars.matcher import Matcher
from baton_text.grammars.property_names import is_whole
from baton_text.grammars.refusals import locate_refusal
from baton_text.grammars.schema_parts import parts
from baton_text.grammars.unique_keys import Keys, Spellings
from baton_text.tokenizer import Tokenizer

MAX_COMPILE_S = 2.0
COMPILED_KEPT = 64  # cached grammars per tokenizer


class Grammars:
    """An LRU cache of `COMPILED_KEPT` compiled grammars for one tokenizer. Thread-safe.

    vocab_size      number of logits, which may exceed the tokenizer's number of ids
    max_compile_s   limit that `check` enforces, in seconds
    compiled, hits  counters of compiled grammars and cache hits
    compile_s       total time spent compiling, in seconds
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int | None = None,
        max_compile_s: float = MAX_COMPILE_S,
    ) -> None:
        eos_ids = list(tokenizer.eos_ids)
        self._lark = Lark(tokenizer)
        self._tokenizer = LLTokenizer(
            tokenizer.to_json(), n_vocab=vocab_size, eos_token=eos_ids or None
        )
        self._max_compile_s = max_compile_s
        self._spellings: Spellings | None = None
        self._lock = Lock()
        # Grammar text -> its matcher and compile time in seconds, least recently used first.
        self._kept: OrderedDict[str, tuple[Matcher, float]] = OrderedDict()
        self.compiled = 0
        self.hits = 0
        self.compile_s = 0.0

    def cached_matcher(self, grammar: str) -> Matcher | None:
        """A fresh Matcher if the grammar is cached, else None. Does not compile."""
        with self._lock:
            entry = self._kept.get(grammar)
            if entry is None:
                return None
            self._kept.move_to_end(grammar)
            self.hits += 1
            return entry[0].copy()

    def matcher(self, grammar: str) -> Matcher:
        """A fresh Matcher at the start of `grammar`. Compiles on a cache miss, with the GIL
        released. Raise GrammarError if the grammar does not compile."""
        return self.cached_matcher(grammar) or self._compile(grammar)[0]

    def _compile(self, grammar: str) -> tuple[Matcher, float]:
        """Compile and cache `grammar`; return a fresh Matcher and the compile time in seconds."""
        begun = time.perf_counter()
        text = _unforced(grammar) if self._lark.has_token(grammar) else grammar
        compiled = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        compiled.compute_bitmask()  # builds the lexer, which is lazy
        if compiled.is_error():
            raise locate_refusal(grammar, compiled.get_error())
        taken = time.perf_counter() - begun
        matcher = Matcher(compiled, self._keys(grammar))
        with self._lock:
            self._kept[grammar] = matcher.copy(), taken
            self.compiled += 1
            self.compile_s += taken
            while len(self._kept) > COMPILED_KEPT:
                self._kept.popitem(last=False)
        return matcher, taken

    def _keys(self, grammar: str) -> Keys | None:
        """What follows the keys of an answer in this grammar; None if it has no JSON."""
        first, *others = grammars_in(grammar)
        mixed = "json_schema" not in first
        if mixed and not any("json_schema" in other for other in others) and "%json" not in grammar:
            return None
        with self._lock:
            if self._spellings is None:
                self._spellings = Spellings(self._tokenizer, self._lark.ids)
        narrow = "patternProperties" in grammar and any(map(is_whole, _patterns(grammar)))
        return Keys(self._spellings, narrow=narrow, mixed=mixed)

    def check(self, grammar: str) -> None:
        """Raise GrammarError unless `grammar` compiles within `max_compile_s`. Blocks while it
        compiles."""
        with self._lock:
            kept = self._kept.get(grammar)
        _, taken = kept or self._compile(grammar)
        if taken > self._max_compile_s:
            raise GrammarError(
                f"compiling takes {taken:.1f} s; the limit is {self._max_compile_s:g} s"
            )


def _patterns(grammar: str) -> Iterator[str]:
    """The patterns for names in all schemas of a grammar."""
    for part in grammars_in(grammar):
        schemas = [part["json_schema"]] if "json_schema" in part else []
        if isinstance(part.get("lark_grammar"), str):
            schemas += schemas_in(part["lark_grammar"])
        for schema in schemas:
            for each in parts(schema):
                if isinstance(each, dict) and isinstance(each.get("patternProperties"), dict):
                    yield from each["patternProperties"]


def _unforced(grammar: str) -> str:
    """The same grammar with llguidance's forcing switched off, for a grammar that contains the text
    of an added token.

    When only one text may follow, llguidance forces the first token into which the tokenizer splits
    it. If that is an added token, which text does not match, no token could follow at all."""
    first, *others = grammars_in(grammar)
    option = '%llguidance {"no_forcing": true}'
    if "lark_grammar" in first:
        first = {**first, "lark_grammar": f"{option}\n{first['lark_grammar']}"}
    else:
        whole = {"lark_grammar": f"{option}\nstart: @whole"}
        first, others = whole, [{**first, "name": "whole"}, *others]
    return json.dumps({"grammars": [first, *others]}, ensure_ascii=False)

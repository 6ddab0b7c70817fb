"""Grammars: which tokens an answer may have next, so that it matches a JSON schema or a regex.

    grammar_of   what a client asked for (see `Kind`) as the text of a grammar; the wire form
    Grammars     compiles grammar texts for one tokenizer, and keeps the latest ones
    Matcher      one answer's place in a grammar: a function of the answer's tokens alone

llguidance does the parsing. A Matcher is never sent or stored: whoever takes over an answer makes
one from the grammar's text and replays the tokens (0.1 ms per 200 tokens).

    GrammarError   a grammar cannot be compiled, or exceeds a limit; the message says where
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from baton_text.lark import Lark
from baton_text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]

MAX_GRAMMAR_BYTES = 256 << 10  # of a schema, regex or grammar as a client writes it
MAX_EBNF_BYTES = 16 << 10  # its translation to Lark takes time by the square of its length
MAX_JSON_DEPTH = 64  # of objects and arrays in a schema
MAX_CHOICES = 1024
MAX_COMPILE_S = 2.0
COMPILED_KEPT = 64  # grammars per tokenizer
# Unbounded whitespace between JSON tokens lets a model that has nothing to say run to max_tokens.
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\t]{0,2}",
}
# About 20 ms of work for a grammar, and 10 ms for a token: see llguidance's LLParserLimits. The
# same everywhere: what one node takes, each takes.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message names the place or the limit."""


def grammar_of(kind: Kind, value: Any, tokenizer: Tokenizer | None = None) -> str:
    """The text of a grammar. `value` is, by kind:

    json            a JSON schema: an object, a boolean, or the text of either
    json_object     ignored; any JSON object
    regex           a regular expression that the whole answer matches
    choice          a list of strings, one of which is the answer
    grammar         a grammar in Lark, or in EBNF (GBNF) where it holds "::="
    structural_tag  {"structures": [{"begin", "schema", "end"}], "triggers": [...]}: free text in
                    which each trigger begins one of the structures

    Without the model's tokenizer, a structural tag's texts are text: they do not match a token that
    the model has for one of them.

    Raise GrammarError for a value of another form. `Grammars.check` says whether the grammar
    compiles.
    """
    match kind:
        case "json":
            return _json(schema_of(value))
        case "json_object":
            return _json({"type": "object"})
        case "regex":
            return str(LLMatcher.grammar_from_regex(_text(value, "a regular expression")))
        case "choice":
            return _choice(value)
        case "grammar":
            return _lark(_text(value, "a grammar"))
        case "structural_tag":
            return _structural_tag(value, Lark(tokenizer))


def _json(schema: dict[str, Any]) -> str:
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS))


def schema_of(value: object) -> dict[str, Any]:
    """The JSON schema that `value` is, or is the text of. Raise GrammarError for what is none, or
    too large."""
    value = _loaded(value, "the schema")
    if value is True:
        return {}
    if value is False:
        raise GrammarError("the schema is false, which no answer matches")
    if not isinstance(value, dict):
        raise GrammarError(f"a schema is an object, not {_shown(value)}")
    _check_parts(value)
    try:
        check_size(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except ValueError as error:  # a lone surrogate among them
        raise GrammarError(f"the schema is no JSON: {error}") from None
    return value


def _loaded(value: object, what: str) -> object:
    """JSON may come as text."""
    if not isinstance(value, str):
        return value
    check_size(value)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{what} is no JSON: {error}") from None


def _check_parts(value: object) -> None:
    """Raise GrammarError where objects and arrays are nested too deep, and for what llguidance
    reads as something else. Without recursion."""
    # Up to draft 7 an $id beside a $ref means nothing; llguidance heeds it in each draft.
    older = isinstance(value, dict) and "json-schema.org/draft-0" in str(value.get("$schema"))
    level, depth = [value], 0
    while level:
        if depth > MAX_JSON_DEPTH:
            raise GrammarError(f"the schema nests deeper than {MAX_JSON_DEPTH} levels")
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                if older and isinstance(each.get("$ref"), str) and "$id" in each:
                    raise GrammarError("the schema has an $id beside a $ref; leave out the $id")
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, int) and not -(2**63) <= each < 2**64:
                raise GrammarError(f"the schema has {each}, a number of more than 64 bits")
        level, depth = inner, depth + 1


def _choice(value: object) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise GrammarError(f"a choice is a list of one string at least, not {_shown(value)}")
    if len(value) > MAX_CHOICES:
        raise GrammarError(f"a choice of {len(value)} strings; at most {MAX_CHOICES}")
    for each in value:
        if not isinstance(each, str) or not each:
            raise GrammarError(f"a choice is between strings that are not empty, not {each!r}")
    check_size("".join(value))
    alternatives = " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
    return str(LLMatcher.grammar_from_lark(f"start: {alternatives}"))


def _lark(text: str) -> str:
    if "::=" in text:
        size = len(text.encode())
        if size > MAX_EBNF_BYTES:
            raise GrammarError(f"{size} bytes of EBNF; at most {MAX_EBNF_BYTES}, or use Lark")
        try:
            text = any_to_lark(text)
        except Exception as error:  # the converter raises what its parser happens to raise
            raise GrammarError(f"the EBNF grammar cannot be read: {error}") from None
    return str(LLMatcher.grammar_from_lark(text))


def _structural_tag(value: object, lark: Lark) -> str:
    value = _loaded(value, "the structural tag")
    if not isinstance(value, dict):
        raise GrammarError(f"a structural tag is an object, not {_shown(value)}")
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise GrammarError("structural_tag.structures must be a list with one structure at least")
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError("structural_tag.triggers must be a list of strings that are not empty")
    tags: dict[str, list[str]] = {}
    for each in structures:
        trigger, follows = _tag(each, triggers, lark)
        tags.setdefault(trigger, []).append(follows)
    rules = lark.tagged([(trigger, f"({' | '.join(tags[trigger])})") for trigger in tags])
    return str(LLMatcher.grammar_from_lark("\n".join(["start: tagged", *rules])))


def _tag(structure: object, triggers: Sequence[str], lark: Lark) -> tuple[str, str]:
    """Its trigger, and what follows on that, in Lark."""
    if not isinstance(structure, dict) or not isinstance(structure.get("begin"), str):
        raise GrammarError(f"a structure needs the text `begin`, {_shown(structure)} has none")
    begin, end = structure["begin"], structure.get("end", "")
    if not isinstance(end, str):
        raise GrammarError(f"a structure's `end` is a text, not {_shown(end)}")
    trigger = next((each for each in triggers if begin.startswith(each)), None)
    if trigger is None:
        raise GrammarError(f"the structure {begin!r} begins with none of the triggers {triggers}")
    token = lark.leading_token(begin)
    if token:
        trigger = token  # also where the trigger is a part of it
    elif lark.has_token(trigger):
        raise GrammarError(
            f"the trigger {trigger!r} holds a token of the model behind text; begin with the token"
        )
    schema = json.dumps(
        schema_of(structure.get("schema", {})) | {"x-guidance": JSON_OPTIONS}, ensure_ascii=False
    )
    return trigger, f"{lark.text(begin[len(trigger) :])} %json {schema} {lark.text(end)}"


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise GrammarError(f"{what} is a text that is not empty, not {_shown(value)}")
    check_size(value)
    return value


def grammars_in(grammar: str) -> list[dict[str, Any]]:
    """The parts of a grammar's text, the first of which refers to the others by name; each is a
    JSON schema or in Lark."""
    if not grammar.lstrip().startswith("{"):
        return [{"lark_grammar": grammar}]
    try:
        parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
        return [{key: each[key] for key in each if each[key] is not None} for each in parts]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise GrammarError(f"the grammar cannot be read: {error}") from None


def validate(grammar: str) -> None:
    """Raise GrammarError where it cannot be compiled with any tokenizer."""
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if wrong:
        raise GrammarError(_first_line(messages[0]))


def check_size(text: str) -> None:
    """Raise GrammarError where it is too large for a grammar."""
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"{size} bytes of grammar; at most {MAX_GRAMMAR_BYTES}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class Matcher:
    """Where one answer is in its grammar. `accept` takes its tokens in order, `mask` says what may
    follow. Not thread-safe; `copy` is cheap."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy())

    def accept(self, ids: Sequence[int]) -> bool:
        """Whether all `ids` match. After False the matcher is of no more use: it is `stopped`."""
        return bool(self._matcher.consume_tokens(list(ids)))

    def accepted(self, ids: Sequence[int]) -> int:
        """How many leading `ids` would match; nothing changes."""
        return int(self._matcher.validate_tokens(list(ids)))

    @property
    def stopped(self) -> bool:
        """Nothing but EOS may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """The answer may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def error(self) -> str:
        """Why the matcher can go no further although the answer is not complete; "" if it can."""
        return str(self._matcher.get_error()) if self._matcher.is_error() else ""

    def mask(self) -> bytes:
        """One bit per id, least significant first: 1 if it may follow. Whole 32-bit words, for the
        vocabulary and up to 32 ids more; EOS is allowed where the answer may end."""
        return bytes(self._matcher.compute_bitmask())


class Grammars:
    """Compiled grammars of one tokenizer, the `COMPILED_KEPT` used last. Thread-safe.

    `vocab_size` is the number of logits, which may be more than the tokenizer has ids. Counters:
    `compiled`, `hits`, and `compile_s`, the seconds that compiling took in all."""

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
        self._lock = Lock()
        # With the seconds that each took.
        self._kept: OrderedDict[str, tuple[Matcher, float]] = OrderedDict()
        self.compiled = 0
        self.hits = 0
        self.compile_s = 0.0

    def known(self, grammar: str) -> Matcher | None:
        """A fresh Matcher if the grammar is compiled already; never blocks."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is None:
                return None
            self._kept.move_to_end(grammar)
            self.hits += 1
            return found[0].copy()

    def matcher(self, grammar: str) -> Matcher:
        """A fresh Matcher at the beginning of `grammar`; compiles it if need be, without Python's
        lock. Raise GrammarError."""
        return self.known(grammar) or self._compile(grammar)[0]

    def _compile(self, grammar: str) -> tuple[Matcher, float]:
        """A fresh Matcher, and the seconds that compiling took."""
        begun = time.perf_counter()
        text = _unforced(grammar) if self._lark.has_token(grammar) else grammar
        made = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        made.compute_bitmask()  # a lexer is built when it is first asked
        if made.is_error():
            raise GrammarError(_first_line(made.get_error()))
        taken = time.perf_counter() - begun
        with self._lock:
            self._kept[grammar] = Matcher(made.deep_copy()), taken
            self.compiled += 1
            self.compile_s += taken
            while len(self._kept) > COMPILED_KEPT:
                self._kept.popitem(last=False)
        return Matcher(made), taken

    def check(self, grammar: str) -> None:
        """Raise GrammarError unless `grammar` compiles within `max_compile_s`. Blocks meanwhile."""
        with self._lock:
            kept = self._kept.get(grammar)
        _, taken = kept or self._compile(grammar)
        if taken > self._max_compile_s:
            raise GrammarError(
                f"it takes {taken:.1f} s to compile; at most {self._max_compile_s:g} s"
            )


def _unforced(grammar: str) -> str:
    """The same answers, for a grammar that has a token's text in it. Where only one text may
    follow, llguidance allows its first token alone as the tokenizer would cut it, and that one is
    a token which text does not match: no token at all could follow."""
    first, *others = grammars_in(grammar)
    option = '%llguidance {"no_forcing": true}'
    if "lark_grammar" in first:
        first = {**first, "lark_grammar": f"{option}\n{first['lark_grammar']}"}
    else:
        whole = {"lark_grammar": f"{option}\nstart: @whole"}
        first, others = whole, [{**first, "name": "whole"}, *others]
    return json.dumps({"grammars": [first, *others]}, ensure_ascii=False)


def _first_line(error: str) -> str:
    """llguidance's message without the dump of its state."""
    return error.split("\n<state>")[0].strip()

"""Grammars: restrict an answer's next tokens so that it matches a JSON schema, regex or the like.

    grammar_of   turns a client's constraint (see `Kind`) into grammar text, the form on the wire
    Grammars     compiles grammar texts for one tokenizer and caches them
    Matcher      the state of one answer in a grammar; it depends only on the answer's tokens

llguidance does the parsing. A Matcher is never sent or stored: a node that takes over an answer
creates one from the grammar text and replays the tokens (0.1 ms per 200 tokens).

    GrammarError   a grammar does not compile or exceeds a limit; the message says where
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from baton_text.lark import Lark
from baton_text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]

MAX_GRAMMAR_BYTES = 256 << 10  # size of a client's schema, regex or grammar
MAX_EBNF_BYTES = 16 << 10  # translation to Lark takes time quadratic in its length
MAX_JSON_DEPTH = 64  # nesting levels of objects and arrays in a schema
MAX_CHOICES = 1024
# llguidance compiles recursively; more references or rules would exhaust its thread's stack.
MAX_REFERENCED_LEVELS = 1000  # nesting levels of all parts to which a schema refers, together
MAX_RULES = 1000  # rules of a grammar in Lark or EBNF
_RULE = re.compile(r"\b[A-Za-z_]\w*\s*(?:\[[^\]\n]*\])?\s*(?:\.\d+)?\s*:")
_INLINE_SCHEMA = re.compile(r"%json\s*")
MAX_COMPILE_S = 2.0
COMPILED_KEPT = 64  # cached grammars per tokenizer
# With unbounded whitespace between JSON tokens, a model may emit whitespace up to max_tokens.
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\t]{0,2}",
}
# llguidance's own formats accept February 29 of every year and second 60 of every minute.
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?"
    "([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
}
_DATA = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# About 20 ms of work per grammar and 10 ms per token, see llguidance's LLParserLimits. Equal on all
# nodes, so that all accept the same grammars.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class GrammarError(ValueError):
    """A grammar does not compile or exceeds a limit; the message names the place or the limit."""


def grammar_of(kind: Kind, value: Any, tokenizer: Tokenizer | None = None) -> str:
    """Return the text of a grammar. The meaning of `value` depends on `kind`:

    json            a JSON schema: an object, a boolean, or the text of either
    json_object     ignored; the answer is any JSON object
    regex           a regular expression that the whole answer matches
    choice          a list of strings; the answer is one of them
    grammar         a grammar in Lark, or in EBNF (GBNF) if it contains "::="
    structural_tag  {"structures": [{"begin", "schema", "end"}], "triggers": [...]}: free text in
                    which each trigger starts one of the structures

    Without the model's tokenizer, a structural tag's markers match only as text, never as an added
    token of the model.

    Raise GrammarError for a value of another form. `Grammars.check` tests whether the grammar
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
    """The JSON schema in `value`, which is a schema or its text. Formats of dates and times are
    written as patterns.

    Raise GrammarError if it is not a schema, too large, too deep, or false."""
    value = _loaded(value, "the schema")
    if value is True:
        return {}
    if value is False:
        raise GrammarError("the schema is false, which no answer matches")
    if not isinstance(value, dict):
        raise GrammarError(f"a schema must be an object, not {_shown(value)}")
    _check_parts(value)
    try:
        check_size(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except ValueError as error:  # includes UnicodeEncodeError for a lone surrogate
        raise GrammarError(f"the schema is not valid JSON: {error}") from None
    with_patterns: dict[str, Any] = _with_patterns(value)
    return with_patterns


def _with_patterns(schema: Any) -> Any:
    """The schema with `pattern` in place of a `format` that has one in FORMAT_PATTERNS."""
    if isinstance(schema, list):
        return [_with_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DATA:
            made[key] = value
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            made[key] = {name: _with_patterns(each) for name, each in value.items()}
        else:
            made[key] = _with_patterns(value)
    form = made.get("format")
    if not isinstance(form, str) or form not in FORMAT_PATTERNS:
        return made
    del made["format"]
    if "pattern" in made:
        others = made.get("allOf", [])
        if isinstance(others, list):
            made["allOf"] = [*others, {"pattern": FORMAT_PATTERNS[form]}]
    else:
        made["pattern"] = FORMAT_PATTERNS[form]
    return made


def _loaded(value: object, what: str) -> object:
    """Parse `value` if it is JSON text, else return it as it is."""
    if not isinstance(value, str):
        return value
    check_size(value)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{what} is not valid JSON: {error}") from None


def _check_parts(value: object) -> None:
    """Raise GrammarError for too deep nesting and for parts that llguidance misreads.

    Not recursive, so that deep nesting cannot exhaust the stack."""
    # Up to draft 7, an $id beside a $ref is ignored; llguidance applies it in every draft.
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
    levels = _referenced_levels(value)
    if levels > MAX_REFERENCED_LEVELS:
        raise GrammarError(
            f"the schema refers to parts with {levels} nesting levels together; the limit is"
            f" {MAX_REFERENCED_LEVELS}"
        )


def _referenced_levels(schema: object) -> int:
    """The nesting levels of all parts to which a schema refers, together: an upper bound of how
    deep references lead."""
    order: list[Any] = []  # each part before those within it
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict | list):
            order.append(part)
            pending += part.values() if isinstance(part, dict) else part
    levels: dict[int, int] = {}
    for part in reversed(order):
        inner = part.values() if isinstance(part, dict) else part
        levels[id(part)] = 1 + max((levels.get(id(each), 0) for each in inner), default=0)
    references = {
        part["$ref"]
        for part in order
        if isinstance(part, dict) and isinstance(part.get("$ref"), str)
    }
    return sum(levels.get(id(_referred(schema, each)), 1) for each in references)


def _referred(schema: object, reference: str) -> object:
    """The part to which a $ref points; the whole schema if it is not a path within it."""
    target = schema
    for key in reference.removeprefix("#").split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and key in target:
            target = target[key]
        elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            return schema
    return target


def _check_rules(grammar: str) -> None:
    """Raise GrammarError for a client's grammar that llguidance cannot compile safely."""
    rules = 0
    for part in grammars_in(grammar):
        rules += 1
        lark = part.get("lark_grammar")
        schemas = [part["json_schema"]] if "json_schema" in part else []
        if isinstance(lark, str):
            rules += len(_RULE.findall(lark))
            schemas += list(_inline_schemas(lark))
        for schema in schemas:
            _check_parts(schema)
    if rules > MAX_RULES:
        raise GrammarError(f"the grammar has {rules} rules; the limit is {MAX_RULES}")


def _inline_schemas(lark: str) -> Iterator[object]:
    """The JSON schemas within a grammar in Lark."""
    decoder = json.JSONDecoder()
    for found in _INLINE_SCHEMA.finditer(lark):
        try:
            yield decoder.raw_decode(lark, found.end())[0]
        except RecursionError:
            raise GrammarError("a schema in the grammar is nested too deep") from None
        except ValueError:
            continue  # not a schema, which llguidance reports


def _choice(value: object) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise GrammarError(f"a choice must be a list of at least one string, not {_shown(value)}")
    if len(value) > MAX_CHOICES:
        raise GrammarError(f"the choice has {len(value)} strings; at most {MAX_CHOICES}")
    for each in value:
        if not isinstance(each, str) or not each:
            raise GrammarError(f"a choice must contain only non-empty strings, not {each!r}")
    check_size("".join(value))
    alternatives = " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
    return str(LLMatcher.grammar_from_lark(f"start: {alternatives}"))


def _lark(text: str) -> str:
    if "::=" in text:
        size = len(text.encode())
        if size > MAX_EBNF_BYTES:
            raise GrammarError(f"{size} bytes of EBNF; the limit is {MAX_EBNF_BYTES}, or use Lark")
        try:
            text = any_to_lark(text)
        except Exception as error:  # the converter raises exceptions of any type
            raise GrammarError(f"the EBNF grammar cannot be read: {error}") from None
    _check_rules(text)
    return str(LLMatcher.grammar_from_lark(text))


def _structural_tag(value: object, lark: Lark) -> str:
    value = _loaded(value, "the structural tag")
    if not isinstance(value, dict):
        raise GrammarError(f"a structural tag must be an object, not {_shown(value)}")
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise GrammarError("structural_tag.structures must be a list of at least one structure")
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError("structural_tag.triggers must be a list of non-empty strings")
    tags: dict[str, list[str]] = {}
    for each in structures:
        trigger, follows = _tag(each, triggers, lark)
        tags.setdefault(trigger, []).append(follows)
    rules = lark.tagged([(trigger, f"({' | '.join(tags[trigger])})") for trigger in tags])
    return str(LLMatcher.grammar_from_lark("\n".join(["start: tagged", *rules])))


def _tag(structure: object, triggers: Sequence[str], lark: Lark) -> tuple[str, str]:
    """The structure's trigger, and the Lark expression that follows the trigger."""
    if not isinstance(structure, dict) or not isinstance(structure.get("begin"), str):
        raise GrammarError(f"a structure needs a string `begin`; {_shown(structure)} has none")
    begin, end = structure["begin"], structure.get("end", "")
    if not isinstance(end, str):
        raise GrammarError(f"a structure's `end` must be a string, not {_shown(end)}")
    trigger = next((each for each in triggers if begin.startswith(each)), None)
    if trigger is None:
        raise GrammarError(f"the structure {begin!r} starts with none of the triggers {triggers}")
    token = lark.leading_token(begin)
    if token:
        trigger = token  # even if the trigger is a prefix of the token
    elif lark.has_token(trigger):
        raise GrammarError(
            f"the trigger {trigger!r} has a token of the model after text; start with the token"
        )
    schema = json.dumps(
        schema_of(structure.get("schema", {})) | {"x-guidance": JSON_OPTIONS}, ensure_ascii=False
    )
    return trigger, f"{lark.text(begin[len(trigger) :])} %json {schema} {lark.text(end)}"


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise GrammarError(f"{what} must be a non-empty string, not {_shown(value)}")
    check_size(value)
    return value


def grammars_in(grammar: str) -> list[dict[str, Any]]:
    """The parts of a grammar's text, each a JSON schema or Lark. The first part is the start and
    refers to the others by name. Raise GrammarError for unreadable text."""
    if not grammar.lstrip().startswith("{"):
        return [{"lark_grammar": grammar}]
    try:
        parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
        return [{key: each[key] for key in each if each[key] is not None} for each in parts]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise GrammarError(f"the grammar cannot be read: {error}") from None


def validate(grammar: str) -> None:
    """Raise GrammarError if the grammar is invalid for every tokenizer."""
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if wrong:
        raise GrammarError(_first_line(messages[0]))


def check_size(text: str) -> None:
    """Raise GrammarError if `text` exceeds MAX_GRAMMAR_BYTES."""
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the grammar has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class Matcher:
    """The state of one answer in its grammar.

    `accept` consumes the answer's tokens in order; `mask` returns the tokens that may follow. Not
    thread-safe; `copy` is cheap."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy())

    def accept(self, ids: Sequence[int]) -> bool:
        """Consume `ids`; return whether all match. After False the matcher is `stopped`."""
        return bool(self._matcher.consume_tokens(list(ids)))

    def accepted(self, ids: Sequence[int]) -> int:
        """How many leading `ids` would match; does not consume them."""
        return int(self._matcher.validate_tokens(list(ids)))

    @property
    def stopped(self) -> bool:
        """Whether only EOS may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def error(self) -> str:
        """Why the matcher cannot continue; "" unless it failed."""
        return str(self._matcher.get_error()) if self._matcher.is_error() else ""

    def mask(self) -> bytes:
        """One bit per id, least significant bit first: 1 if the id may follow.

        Padded to 32-bit words, for the vocabulary and up to 32 more ids. EOS is set if the answer
        may end here."""
        return bytes(self._matcher.compute_bitmask())


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
        self._lock = Lock()
        # Grammar text -> its matcher and compile time in seconds, least recently used first.
        self._kept: OrderedDict[str, tuple[Matcher, float]] = OrderedDict()
        self.compiled = 0
        self.hits = 0
        self.compile_s = 0.0

    def known(self, grammar: str) -> Matcher | None:
        """A fresh Matcher if the grammar is cached, else None. Does not compile."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is None:
                return None
            self._kept.move_to_end(grammar)
            self.hits += 1
            return found[0].copy()

    def matcher(self, grammar: str) -> Matcher:
        """A fresh Matcher at the start of `grammar`. Compiles on a cache miss, with the GIL
        released. Raise GrammarError if the grammar does not compile."""
        return self.known(grammar) or self._compile(grammar)[0]

    def _compile(self, grammar: str) -> tuple[Matcher, float]:
        """Compile and cache `grammar`; return a fresh Matcher and the compile time in seconds."""
        begun = time.perf_counter()
        text = _unforced(grammar) if self._lark.has_token(grammar) else grammar
        made = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        made.compute_bitmask()  # builds the lexer, which is lazy
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
        """Raise GrammarError unless `grammar` compiles within `max_compile_s`. Blocks while it
        compiles."""
        with self._lock:
            kept = self._kept.get(grammar)
        _, taken = kept or self._compile(grammar)
        if taken > self._max_compile_s:
            raise GrammarError(
                f"compiling takes {taken:.1f} s; the limit is {self._max_compile_s:g} s"
            )


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


def _first_line(error: str) -> str:
    """llguidance's message without its state dump."""
    return error.split("\n<state>")[0].strip()

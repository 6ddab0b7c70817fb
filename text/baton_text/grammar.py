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
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, Literal

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from baton_text.grammar_errors import GrammarError as GrammarError
from baton_text.grammar_errors import at, explained
from baton_text.grammar_limits import JSON_OPTIONS as JSON_OPTIONS
from baton_text.grammar_limits import LIMITS as LIMITS
from baton_text.grammar_limits import MAX_CHOICES as MAX_CHOICES
from baton_text.grammar_limits import MAX_EBNF_BYTES as MAX_EBNF_BYTES
from baton_text.grammar_limits import MAX_GRAMMAR_BYTES as MAX_GRAMMAR_BYTES
from baton_text.grammar_limits import MAX_JSON_DEPTH as MAX_JSON_DEPTH
from baton_text.grammar_limits import MAX_REFERENCED_LEVELS as MAX_REFERENCED_LEVELS
from baton_text.grammar_limits import MAX_RULES as MAX_RULES
from baton_text.json_schema import enforceable, parts, referred, shown, subschemas
from baton_text.lark import Lark
from baton_text.lark_syntax import check_matches, number_of_rules, schemas_in, with_schemas
from baton_text.property_names import is_whole
from baton_text.tokenizer import Tokenizer
from baton_text.unique_keys import Keys, Spellings

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]

MAX_COMPILE_S = 2.0
COMPILED_KEPT = 64  # cached grammars per tokenizer
MAX_LOCATED = 200  # parts of a schema that are compiled to find the one that is wrong


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
    """The JSON schema in `value`, which is a schema or its text, in the form that `json_schema`
    describes.

    Raise GrammarError if it is not a schema, too large, too deep, or false."""
    value = _loaded(value, "the schema")
    if value is True:
        return {}
    if value is False:
        raise GrammarError("the schema is false, which no answer matches")
    if not isinstance(value, dict):
        raise GrammarError(f"a schema must be an object, not {shown(value)}")
    _check_parts(value)
    try:
        check_size(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except ValueError as error:  # includes UnicodeEncodeError for a lone surrogate
        raise GrammarError(f"the schema is not valid JSON: {error}") from None
    made = enforceable(value)
    if made is False:
        raise GrammarError("no value matches the schema")
    return {} if made is True else made


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
    order = list(parts(schema))
    levels: dict[int, int] = {}
    for part in reversed(order):
        inner = part.values() if isinstance(part, dict) else part
        levels[id(part)] = 1 + max((levels.get(id(each), 0) for each in inner), default=0)
    references = {
        part["$ref"]
        for part in order
        if isinstance(part, dict) and isinstance(part.get("$ref"), str)
    }
    return sum(levels.get(id(referred(schema, each)), 1) for each in references)


def _enforceable_parts(grammar: str) -> str:
    """A client's grammar in Lark, or its list of grammars, with its schemas in enforceable form.
    Raise GrammarError for a grammar that llguidance cannot compile safely."""
    found = grammars_in(grammar)
    rules = len(found) + sum(
        number_of_rules(part["lark_grammar"])
        for part in found
        if isinstance(part.get("lark_grammar"), str)
    )
    if rules > MAX_RULES:
        raise GrammarError(f"the grammar has {rules} rules; the limit is {MAX_RULES}")
    made: list[dict[str, Any]] = []
    for part in found:
        if isinstance(part.get("lark_grammar"), str):
            check_matches(part["lark_grammar"])
            part = part | {"lark_grammar": with_schemas(part["lark_grammar"], _json_part)}
        if "json_schema" in part:
            part = part | {"json_schema": _json_part(part["json_schema"])}
        made.append(part)
    return json.dumps({"grammars": made}, ensure_ascii=False)


def _json_part(schema: object) -> dict[str, Any]:
    """A schema with the options for all JSON."""
    return {**schema_of(schema), "x-guidance": JSON_OPTIONS}


def _choice(value: object) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise GrammarError(f"a choice must be a list of at least one string, not {shown(value)}")
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
    return _enforceable_parts(text)


def _structural_tag(value: object, lark: Lark) -> str:
    value = _loaded(value, "the structural tag")
    if not isinstance(value, dict):
        raise GrammarError(f"a structural tag must be an object, not {shown(value)}")
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
        raise GrammarError(f"a structure needs a string `begin`; {shown(structure)} has none")
    begin, end = structure["begin"], structure.get("end", "")
    if not isinstance(end, str):
        raise GrammarError(f"a structure's `end` must be a string, not {shown(end)}")
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
    schema = json.dumps(_json_part(structure.get("schema", {})), ensure_ascii=False)
    return trigger, f"{lark.text(begin[len(trigger) :])} %json {schema} {lark.text(end)}"


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise GrammarError(f"{what} must be a non-empty string, not {shown(value)}")
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
    message = _refusal(grammar)
    if message:
        raise _located(grammar, message)


def _refusal(grammar: str) -> str:
    """llguidance's message for a grammar that is invalid for every tokenizer; "" if it is valid."""
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    return messages[0] if wrong else ""


def _located(grammar: str, message: str) -> GrammarError:
    """The error for llguidance's message, with the place in a schema that causes it."""
    for part in grammars_in(grammar):
        schema = part.get("json_schema")
        if isinstance(schema, dict) and _refusal_of(schema, schema) == message:
            place, cause = _cause(schema, message)
            return at(place, explained(cause))
    return GrammarError(explained(message))


def _refusal_of(schema: object, root: Mapping[str, Any]) -> str:
    """llguidance's message for a part of the schema `root`."""
    if not isinstance(schema, dict):
        return ""
    around = {key: root[key] for key in ("$schema", "$defs", "definitions") if key in root}
    return _refusal(json.dumps({"grammars": [{"json_schema": {**around, **schema}}]}))


def _cause(root: dict[str, Any], message: str) -> tuple[str, str]:
    """The path of the innermost part of a schema that causes the message, and its own message."""
    place, schema, tries = "", root, MAX_LOCATED
    while True:
        for path, inner in subschemas(schema):
            tries -= 1
            if tries < 0:
                return place, message
            found = _refusal_of(inner, root)
            # llguidance says of a required property only that no value matches it.
            if found and (found == message or f"required {_kind(path)} is unsat" in message):
                place, schema, message = f"{place}.{path}" if place else path, inner, found
                break
        else:
            return place, message


def _kind(path: str) -> str:
    """A part of an object or array, in llguidance's words."""
    name = path.removeprefix("properties.")
    return "item" if name == path else f"property '{name}'"


def check_size(text: str) -> None:
    """Raise GrammarError if `text` exceeds MAX_GRAMMAR_BYTES."""
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the grammar has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}")


class Matcher:
    """The state of one answer in its grammar.

    `accept` consumes the answer's tokens in order; `mask` returns the tokens that may follow. Not
    thread-safe; `copy` is cheap. `keys` follows the JSON objects of the answer, if it has any."""

    __slots__ = ("_blocked", "_keys", "_matcher")

    def __init__(self, matcher: LLMatcher, keys: Keys | None = None) -> None:
        self._matcher = matcher
        self._keys = keys
        self._blocked = False  # every key that may follow is there already

    def copy(self) -> Matcher:
        made = Matcher(self._matcher.deep_copy(), self._keys and self._keys.copy())
        made._blocked = self._blocked
        return made

    def accept(self, ids: Sequence[int]) -> bool:
        """Consume `ids`; return whether all match. After False the matcher is `stopped`."""
        if self._keys is not None:
            self._keys.accept(ids)
        return bool(self._matcher.consume_tokens(list(ids)))

    def accepted(self, ids: Sequence[int]) -> int:
        """How many leading `ids` would match; does not consume them."""
        return int(self._matcher.validate_tokens(list(ids)))

    @property
    def stopped(self) -> bool:
        """Whether only EOS may follow."""
        return self._blocked or bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return not self._matcher.is_error() and bool(self._matcher.is_accepting())

    @property
    def error(self) -> str:
        """Why the matcher cannot continue; "" unless it failed. Some dead ends show only after
        `mask`."""
        if self._matcher.is_error():
            return explained(self._matcher.get_error())
        return "an object has each key already that may follow" if self._blocked else ""

    def mask(self) -> bytes:
        """One bit per id, least significant bit first: 1 if the id may follow.

        Padded to 32-bit words, for the vocabulary and up to 32 more ids. EOS is set if the answer
        may end here."""
        mask = bytes(self._matcher.compute_bitmask())
        if self._keys is None:
            return mask
        unique = self._keys.unique(mask, self._matcher)
        if unique is not mask and not any(unique):
            self._blocked = True
            return self._keys.eos_mask(len(mask))
        return unique


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
            raise _located(grammar, made.get_error())
        taken = time.perf_counter() - begun
        matcher = Matcher(made, self._keys(grammar))
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
        if mixed and not any("json_schema" in each for each in others) and "%json" not in grammar:
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

"""Write the arguments of a call in Lark, for families that write them one by one.

In: how the family writes arguments, and a function's schema. Out: a Lark expression, with its rules
and grammars. What the parser reads from such text matches the schema. The grammar may allow less
than the schema: arguments come in the schema's order, and only those of its `properties`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from baton_text.grammars.errors import GrammarError
from baton_text.grammars.lark import Lark
from baton_text.grammars.limits import JSON_OPTIONS, MAX_GRAMMAR_BYTES
from baton_text.grammars.refusals import validate
from baton_text.parsers.parser import ArgumentForm
from baton_text.parsers.xml_values import types_of

MAX_ARGUMENTS = 256
# Keywords that restrict nothing.
_ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description"),
        *("default", "examples", "deprecated", "readOnly", "writeOnly"),
    }
)
# Keywords that `arguments` enforces. Arguments beyond `properties` are never written.
_OF_ARGUMENTS = _ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
_OF_STRINGS = _ANNOTATIONS | {"type", "const", "enum", "minLength", "maxLength", "pattern"}
_DEFINITIONS = ("$defs", "definitions")
_NULLS = ("null", "None")


class ArgumentGrammar:
    """Collects the rules and grammars of the arguments of all functions."""

    def __init__(self, lark: Lark, form: ArgumentForm) -> None:
        self._lark = lark
        self._form = form
        self._count = 0
        self._size = 0
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []

    def any_arguments(self) -> str:
        """Arguments with any keys and values, in Lark."""
        form, key = self._form, self._name("KEY")
        self.rules.append(f"{key}: /{form.key}/ & /.{{1,64}}/")
        value = self._plain({}) if form.plain_strings else self._json({})
        any_argument = (
            f"{self._lark.text(form.before_key)} {key} {self._lark.text(form.after_key)} {value}"
        )
        if not form.between:
            return f"({any_argument})*"
        return f"({any_argument} ({self._lark.text(form.between)} {any_argument})*)?"

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """Arguments that match `schema`, in Lark. Raise GrammarError."""
        self._only(schema, _OF_ARGUMENTS, "the arguments")
        validate(json.dumps({"grammars": [{"json_schema": dict(schema)}]}))
        properties: Mapping[str, Any] = schema.get("properties", {})
        required = set(schema.get("required", []))
        if len(properties) > MAX_ARGUMENTS:
            raise GrammarError(
                f"the function has {len(properties)} arguments; the limit for this model's calls"
                f" is {MAX_ARGUMENTS}"
            )
        if unknown := sorted(required - set(properties)):
            raise GrammarError(f"the required argument {unknown[0]!r} is not in `properties`")
        if not self._form.between:
            return " ".join(
                argument if key in required else f"({argument})?"
                for key, argument in self._each(properties, schema)
            )
        return self._separated(list(self._each(properties, schema)), required)

    def _each(
        self, properties: Mapping[str, Any], root: Mapping[str, Any]
    ) -> list[tuple[str, str]]:
        """Each key with its argument in Lark."""
        arguments = []
        for key, schema in properties.items():
            if schema is False and key not in root.get("required", []):
                continue  # never written
            if re.fullmatch(self._form.key, key) is None:
                raise GrammarError(f"the model's calls cannot have an argument named {key!r}")
            try:
                value = self._value(schema, root)
            except GrammarError as error:
                raise GrammarError(f"properties.{key}: {error}") from None
            head = self._lark.text(f"{self._form.before_key}{key}{self._form.after_key}")
            arguments.append((key, f"{head} {value}"))
        return arguments

    def _separated(self, arguments: list[tuple[str, str]], required: set[str]) -> str:
        """Arguments with separators between those that are there. Each `rest` rule holds what may
        follow an argument."""
        between, rest = self._lark.text(self._form.between), ""
        starts: list[str] = []  # for each argument, the expression that starts with it
        for key, argument in reversed(arguments):
            starts = [] if key in required else starts
            starts.append(f"{argument} {rest}")
            name = self._name("rest")
            following = f"{between} {argument}"
            self.rules.append(
                f"{name}: {following if key in required else f'({following})?'} {rest}"
            )
            rest = name
        if not starts:
            return ""
        optional = "" if required else "?"
        return f"({' | '.join(starts)}){optional}"

    def _value(self, schema: Any, root: Mapping[str, Any]) -> str:
        """A value and the text after it, in Lark."""
        if self._form.plain_strings and isinstance(schema, Mapping):
            types = types_of(schema, root)
            if "string" in types:
                nullable = "null" in types
                written = self._strings(schema, root, nullable)
                return f"({' | '.join(written)})"
        return self._json(_with_definitions(schema, root))

    def _strings(
        self, schema: Mapping[str, Any], root: Mapping[str, Any], nullable: bool
    ) -> list[str]:
        """Alternatives for a string as plain text, and for null."""
        options = _string_options(schema, root, set())
        fixed = all(_fixed(option) is not None for option in options)
        written = [self._string(one, nullable) for one in options if _fixed(one) != []]
        if _allows_null(schema, root, set()):
            written.append(self._literal("null"))
        elif nullable and not fixed:
            raise GrammarError("null cannot be told from a string here")
        if not written:
            raise GrammarError("no string of `enum` can be written in this model's calls")
        return written

    def _json(self, schema: Any) -> str:
        if schema is False:
            raise GrammarError("the schema is false, which no value matches")
        name = self._name("value")
        known = {} if schema is True else schema
        grammar = {"json_schema": {**known, "x-guidance": JSON_OPTIONS}}
        text = json.dumps({"grammars": [grammar]}, ensure_ascii=False)
        self._size += len(text)
        if self._size > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                "the grammar of the arguments, with the definitions that each of them uses, has"
                f" more than {MAX_GRAMMAR_BYTES} bytes"
            )
        validate(text)
        self.grammars.append({"name": name, **grammar})
        return f"@{name} {self._lark.text(self._form.after_value)}"

    def _string(self, schema: Mapping[str, Any], nullable: bool) -> str:
        """A string as plain text. The parser reads "null" as null if the value may be null."""
        self._only(schema, _OF_STRINGS, "a string")
        texts = _fixed(schema)
        if texts is None:
            return self._plain(schema)
        if beside := [key for key in ("pattern", "minLength", "maxLength") if key in schema]:
            raise GrammarError(f"`{beside[0]}` cannot be enforced beside `enum` or `const`")
        texts = [
            text
            for text in texts
            if not (nullable and text.strip() in _NULLS) and self._end not in text
        ]
        if not texts:
            raise GrammarError("no string of `enum` can be written in this model's calls")
        return " | ".join(map(self._literal, texts))

    @property
    def _end(self) -> str:
        """The marker that ends a value."""
        return self._form.after_value.strip()

    def _literal(self, text: str) -> str:
        space, marker, behind = self._form.after_value.partition(self._end)
        written = json.dumps(text + space, ensure_ascii=False) if text + space else ""
        return f"{written} {self._lark.text(marker + behind)}"

    def _plain(self, schema: Mapping[str, Any]) -> str:
        """Any text of the schema's length and pattern, without the marker that ends it."""
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        most = "" if most is None else int(most)
        space, marker, behind = self._form.after_value.partition(self._end)
        regex = f"{self._lark.excluding(marker)} & /(?s:.{{{least},{most}}})/"
        if "pattern" in schema:
            regex += f" & {_pattern(schema['pattern'])}"
        name = self._name("TEXT")
        if not self._lark.leading_token(marker):
            rule = self._name("text")
            self.rules += [
                f"{rule}[suffix={self._lark.text(marker)}]: {name}",
                f"{name}: ({regex}){f' {self._lark.text(space)}' if space else ''}",
            ]
            return f"{rule} {self._lark.text(behind)}"
        end = self._lark.text(marker + behind)
        if space:
            self.rules.append(f"{name}: ({regex}) {self._lark.text(space)}")
            return f"{name} {end}"
        self.rules.append(f"{name}: {regex} & /(?s:.+)/")
        return f"{name}{'' if least or 'pattern' in schema else '?'} {end}"

    def _only(self, schema: Mapping[str, Any], keywords: frozenset[str], what: str) -> None:
        for keyword in schema:
            if keyword not in keywords:
                raise GrammarError(
                    f"`{keyword}` cannot be enforced for {what} in this model's calls, which are"
                    " not JSON; leave out strict, or require a call"
                )

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self._count}"


def _string_options(
    schema: Any, root: Mapping[str, Any], seen: set[int]
) -> list[Mapping[str, Any]]:
    """The options of a schema that allow strings. Left out are options that allow no string, and
    those that were `seen` before."""
    if not isinstance(schema, Mapping):
        raise GrammarError("a string cannot be enforced here; use a schema with `type`")
    if id(schema) in seen:
        return []
    seen.add(id(schema))
    keywords = [key for key in ("anyOf", "oneOf", "allOf", "$ref") if key in schema]
    if not keywords:
        return [schema]
    keyword = keywords[0]
    if len(keywords) > 1 or not set(schema) <= _ANNOTATIONS | {keyword}:
        raise GrammarError(f"`{keyword}` cannot be enforced beside other keywords for a string")
    if keyword == "$ref":
        return _string_options(_referred(schema["$ref"], root), root, seen)
    if keyword == "allOf" and len(schema["allOf"]) != 1:
        raise GrammarError("`allOf` cannot be enforced for a string")
    options: list[Mapping[str, Any]] = []
    for option in schema[keyword]:
        types = types_of(option, root)
        if not types or "string" in types:
            options += _string_options(option, root, seen)
    if keyword == "oneOf" and len(options) > 1:
        raise GrammarError("`oneOf` with several strings cannot be enforced in this model's calls")
    return options


def _fixed(schema: Mapping[str, Any]) -> list[str] | None:
    """The strings of `const` or `enum`; None if there is neither."""
    if "const" in schema:
        return [schema["const"]] if isinstance(schema["const"], str) else []
    if "enum" in schema:
        return [text for text in schema["enum"] if isinstance(text, str)]
    return None


def _allows_null(schema: Any, root: Mapping[str, Any], seen: set[int]) -> bool:
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return False
    seen.add(id(schema))
    if "$ref" in schema:
        return _allows_null(_referred(schema["$ref"], root), root, seen)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return any(_allows_null(option, root, seen) for option in schema[keyword])
    kinds = schema.get("type", [])
    if "null" not in (kinds if isinstance(kinds, list) else [kinds]):
        return False
    return schema.get("const") is None and None in schema.get("enum", [None])


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    target: Any = root
    if isinstance(reference, str) and reference.startswith("#/"):
        for part in reference[2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if isinstance(target, Mapping) else None
        if isinstance(target, Mapping):
            return target
    raise GrammarError(f"the $ref {reference!r} cannot be resolved")


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema with the definitions of `root`, if it has references to them.

    Raise GrammarError for a reference to another place."""
    if not _references(schema):
        return schema
    whole = {**schema, **{key: root[key] for key in _DEFINITIONS if key in root}}
    for reference in _references(whole):
        if not reference.startswith(tuple(f"#/{key}/" for key in _DEFINITIONS)):
            raise GrammarError(
                f"the $ref {reference!r} cannot be enforced in this model's calls; point it to"
                " $defs"
            )
    return whole


def _references(schema: Any) -> list[str]:
    """All $refs within a schema."""
    references, pending = [], [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$ref"), str):
                references.append(part["$ref"])
            pending += part.values()
        elif isinstance(part, list):
            pending += part
    return references


def _pattern(pattern: Any) -> str:
    """A regex in Lark for texts that match a schema's `pattern`, which is not anchored.

    It may exclude texts that match, if only a part of the pattern is anchored."""
    if not isinstance(pattern, str):
        raise GrammarError("`pattern` must be a string")
    before = after = "(?s:.*)"
    if pattern.startswith("^"):
        pattern, before = pattern[1:], ""
    body = pattern.removesuffix("$")
    if body != pattern and (len(body) - len(body.rstrip("\\"))) % 2 == 0:
        pattern, after = body, ""
    regex = f"{before}(?:{pattern}){after}"
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", regex).replace("\n", r"\n") + "/"

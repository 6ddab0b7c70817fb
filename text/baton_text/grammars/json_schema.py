"""Read a client's JSON schema: keep what a grammar enforces, refuse what it cannot, drop the rest.

In: a parsed schema. Out: a schema that allows the same values and has only keywords that llguidance
enforces, or a GrammarError that names the place. Three kinds of keywords disappear: annotations
and unknown ones (so no key of a client reaches llguidance as an option), those whose value allows
everything, and those that can be written with enforced keywords:

    format              a pattern for dates and times, see `FORMAT_PATTERNS`
    patternProperties   a property for each name, if only a few names match
    unevaluated...      additionalProperties or items, if nothing else evaluates any

A part that no finite value matches, because it requires itself, becomes false.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton_text.grammars.errors import GrammarError, at
from baton_text.grammars.finite_schema import drop_endless
from baton_text.grammars.limits import MAX_PATTERNS
from baton_text.grammars.property_names import few_names, matches
from baton_text.grammars.schema_parts import (
    EVERY_TYPE,
    LISTS,
    NAMED,
    SINGLE,
    Schema,
    _join_path,
    parts,
    referred,
    show_value,
    types,
)

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
ENFORCED_FORMATS = (
    *FORMAT_PATTERNS,
    *("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
)
# Formats of the JSON Schema specification that no grammar here enforces. All others annotate.
REFUSED_FORMATS = (
    *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex"),
    *("relative-json-pointer", "uri-reference", "uri-template"),
)
# Keywords that restrict nothing.
ANNOTATIONS = (
    *("$comment", "title", "description", "default", "examples", "example", "deprecated"),
    *("readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema"),
)
# Keywords that are dropped if their value allows everything, and refused otherwise.
CONDITIONS = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", "unevaluatedItems"),
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_ANCHORS = ("$schema", "$id", "id", "$anchor")
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_OBJECTS = (
    *("properties", "patternProperties", "additionalProperties", "required"),
    *("minProperties", "maxProperties"),
)
_OF_ARRAYS = ("items", "prefixItems", "additionalItems", "minItems", "maxItems")
_OTHERS = ("type", "enum", "const", "$ref")
_KEPT = frozenset((*_ANCHORS, *_COUNTS, *_OF_STRINGS, *_OF_NUMBERS, *_OTHERS, "required"))
# Keywords that look at the same value through another schema.
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "not")
_BY_TYPE = {
    **dict.fromkeys(_OF_STRINGS, ("string",)),
    **dict.fromkeys(_OF_NUMBERS, ("number", "integer")),
    **dict.fromkeys(_OF_OBJECTS, ("object",)),
    **dict.fromkeys(_OF_ARRAYS, ("array",)),
}
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "required": ([],),
    "pattern": ("", ".*"),
    **dict.fromkeys(("minLength", "minItems", "minProperties"), (0,)),
    **dict.fromkeys(("properties", "patternProperties", "items", "additionalItems"), ({}, True)),
    **dict.fromkeys(("additionalProperties",), ({}, True)),
    **dict.fromkeys(("allOf", "prefixItems"), ([],)),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_type(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return bool(kinds) and all(kind in EVERY_TYPE for kind in kinds)


# Keyword -> whether a value has the right form, and the form in words.
_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_COUNTS, (_is_count, "an integer of at least 0")),
    **dict.fromkeys(_OF_NUMBERS[:-1], (_is_number, "a number")),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("pattern", "format", "$ref"), (_is_text, "a string")),
    "type": (_is_type, f"one of {', '.join(EVERY_TYPE)}, or a list of them"),
    "required": (
        lambda value: isinstance(value, list) and all(map(_is_text, value)),
        "a list of strings",
    ),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
}


def enforceable(schema: dict[str, Any]) -> Schema:
    """The schema in the form that llguidance enforces. Raise GrammarError."""
    patterns = sum(
        len(part["patternProperties"])
        for part in parts(schema)
        if isinstance(part, dict) and isinstance(part.get("patternProperties"), dict)
    )
    if patterns > MAX_PATTERNS:
        raise GrammarError(
            f"the schema has {patterns} patternProperties; the limit is {MAX_PATTERNS}"
        )
    enforced = _Reader(schema).read(schema, "")
    return drop_endless(enforced)


class _Reader:
    def __init__(self, root: dict[str, Any]) -> None:
        self._older = "json-schema.org/draft-0" in str(root.get("$schema"))
        self._targets = {
            id(referred(root, part["$ref"]))
            for part in parts(root)
            if isinstance(part, dict) and isinstance(part.get("$ref"), str)
        }

    def read(self, schema: Any, place: str) -> Any:
        """Read the schema at `place`."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise at(place, f"a schema must be an object, not {show_value(schema)}")
        enforced: dict[str, Any] = {}
        for key, value in schema.items():
            inner = _join_path(place, key)
            if key in NAMED:
                enforced[key] = self._named(value, inner)
            elif key in LISTS or (key == "items" and isinstance(value, list)):
                enforced[key] = self._list(value, inner, key)
            elif key in SINGLE:
                enforced[key] = self.read(value, inner)
            elif key in _KEPT:
                enforced[key] = value
            elif key in ("$dynamicRef", "$recursiveRef"):
                raise at(place, f"`{key}` cannot be enforced")
            elif key not in CONDITIONS and key != "x-guidance" and self._referred_in(value):
                enforced[key] = self._holder(value, inner)
        _read_values(enforced, place)
        for condition in (self._logic, self._of_arrays, self._of_objects, self._unevaluated):
            condition(schema, enforced, place)
        _read_names(enforced, place)
        _read_sizes(enforced, place)
        return enforced

    def _named(self, value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise at(place, f"it must be an object of schemas, not {show_value(value)}")
        return {name: self.read(item, _join_path(place, name)) for name, item in value.items()}

    def _list(self, value: Any, place: str, key: str) -> list[Any]:
        if not isinstance(value, list) or (not value and key in ("allOf", "anyOf", "oneOf")):
            raise at(place, f"it must be a list with at least one schema, not {show_value(value)}")
        return [self.read(item, f"{place}[{index}]") for index, item in enumerate(value)]

    def _referred_in(self, value: Any) -> bool:
        """Whether a $ref points into the value of an unknown keyword."""
        return any(id(part) in self._targets for part in parts(value))

    def _holder(self, value: Any, place: str) -> Any:
        """The value of an unknown keyword, with the schemas within it to which a $ref points."""
        if id(value) in self._targets:
            return self.read(value, place)
        if isinstance(value, list):
            return [self._holder(item, f"{place}[{n}]") for n, item in enumerate(value)]
        if isinstance(value, dict):
            return {key: self._holder(item, _join_path(place, key)) for key, item in value.items()}
        return value

    # --- keywords that only their value makes harmless -----------------------------------------

    def _logic(self, schema: Mapping[str, Any], enforced: dict[str, Any], place: str) -> None:
        if "not" in schema and not self._impossible(schema["not"]):
            raise at(place, "`not` cannot be enforced")
        if "if" not in schema:
            return
        then, other = schema.get("then", True), schema.get("else", True)
        if self._free(then) and self._free(other):
            return
        if self._free(schema["if"]):
            follows = self.read(then, _join_path(place, "then"))
        elif self._impossible(schema["if"]):
            follows = self.read(other, _join_path(place, "else"))
        else:
            raise at(place, "`if` cannot be enforced")
        enforced["allOf"] = [*enforced.get("allOf", []), follows]

    def _of_arrays(self, schema: Mapping[str, Any], enforced: dict[str, Any], place: str) -> None:
        if schema.get("uniqueItems") and not _at_most_one(enforced):
            raise at(place, "`uniqueItems` cannot be enforced")
        if "contains" not in schema or "array" not in types(enforced):
            return
        least = 1 if self._older else schema.get("minContains", 1)
        most = None if self._older else schema.get("maxContains")
        if least == 0 and most is None:
            return
        if not self._free(schema["contains"]):
            raise at(place, "`contains` cannot be enforced")
        enforced["minItems"] = max(least, enforced.get("minItems", 0))
        if most is not None:
            enforced["maxItems"] = min(most, enforced.get("maxItems", most))

    def _of_objects(self, schema: Mapping[str, Any], enforced: dict[str, Any], place: str) -> None:
        if "object" not in types(enforced):
            return
        if "propertyNames" in schema and not self._free(schema["propertyNames"], "string"):
            raise at(place, "`propertyNames` cannot be enforced; use patternProperties")
        needed = enforced.get("required", [])
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            value = schema.get(key, {})
            if not isinstance(value, dict):
                raise at(place, f"{key} must be an object, not {show_value(value)}")
            for name, then in value.items():
                if isinstance(then, list):
                    free = set(map(str, then)) <= {name, *map(str, needed)}
                else:
                    free = self._free(then, "object")
                if not free:
                    raise at(place, f"`{key}` cannot be enforced")

    def _unevaluated(self, schema: Mapping[str, Any], enforced: dict[str, Any], place: str) -> None:
        for key, rest in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "items"),
        ):
            if key not in schema or self._free(schema[key]) or rest in schema:
                continue
            if "contains" in schema or any(keyword in schema for keyword in _IN_PLACE):
                raise at(place, f"`{key}` cannot be enforced")
            enforced[rest] = self.read(schema[key], _join_path(place, key))

    def _free(self, schema: Any, kind: str | None = None) -> bool:
        """Whether a schema allows every value, or every value of type `kind`."""
        if isinstance(schema, bool):
            return schema
        try:
            enforced = self.read(schema, "")
        except GrammarError:
            return False
        return all(_allows_all(key, value, kind) for key, value in enforced.items())

    def _impossible(self, schema: Any) -> bool:
        """Whether a schema certainly allows no value."""
        if not isinstance(schema, dict):
            return schema is False
        if any(schema.get(key) == [] for key in ("enum", "anyOf", "oneOf", "type")):
            return True
        return "not" in schema and self._free(schema["not"])


def _allows_all(key: str, value: Any, kind: str | None) -> bool:
    """Whether a keyword restricts no value of type `kind` (None: no value at all)."""
    if key in (*_ANCHORS, "$defs", "definitions"):
        return True
    if kind is not None:
        if key == "type":
            return kind in (value if isinstance(value, list) else [value])
        if key in _BY_TYPE and kind not in _BY_TYPE[key]:
            return True
    if key == "type" and isinstance(value, list):
        # Integers are numbers.
        return set(EVERY_TYPE) - {"integer"} <= set(value)
    return key not in (*_OTHERS, "anyOf", "oneOf") and value in _WITHOUT_EFFECT.get(key, ())


def _at_most_one(schema: Mapping[str, Any]) -> bool:
    most = schema.get("maxItems")
    return "array" not in types(schema) or (isinstance(most, int) and most <= 1)


def _read_values(enforced: dict[str, Any], place: str) -> None:
    """Check the form of values, write formats as patterns, and drop those that only annotate."""
    for key, value in list(enforced.items()):
        if key in _COUNTS and isinstance(value, float) and value.is_integer():
            enforced[key] = int(value)
        if key in ("exclusiveMinimum", "exclusiveMaximum") and value is False:
            del enforced[key]  # the form of draft 4
        elif key in _FORMS and not _FORMS[key][0](enforced[key]):
            raise at(place, f"{key} must be {_FORMS[key][1]}, not {show_value(value)}")
    form = enforced.get("format")
    if form is None:
        return
    if form in REFUSED_FORMATS and "string" in types(enforced):
        raise at(place, f"the format {form!r} cannot be enforced")
    if form in ENFORCED_FORMATS and form not in FORMAT_PATTERNS:
        return
    del enforced["format"]
    if form in FORMAT_PATTERNS:
        pattern = {"pattern": FORMAT_PATTERNS[form]}
        if "pattern" in enforced:
            enforced["allOf"] = [*enforced.get("allOf", []), pattern]
        else:
            enforced.update(pattern)


def _read_names(enforced: dict[str, Any], place: str) -> None:
    """Write patternProperties that only a few names match as properties with these names.

    A name that is used up would otherwise leave a key that cannot be written."""
    patterns = enforced.get("patternProperties")
    if not patterns or not isinstance(enforced.get("properties", {}), dict):
        return
    listed = {pattern: few_names(pattern) for pattern in patterns}
    few = {pattern: names for pattern, names in listed.items() if names is not None}
    if not few:
        return
    declared = dict(enforced.get("properties", {}))
    names = dict.fromkeys([*declared, *(name for each in few.values() for name in each)])
    for name in names:
        of_name = [patterns[pattern] for pattern, found in few.items() if name in found]
        if name not in declared:
            # A pattern that stays holds for the name as well.
            of_name += [
                patterns[each] for each in patterns if each not in few and matches(each, name)
            ]
        schemas = [*([declared[name]] if name in declared else []), *of_name]
        declared[name] = schemas[0] if len(schemas) == 1 else _all_of(schemas)
    enforced["properties"] = declared
    enforced["patternProperties"] = {each: patterns[each] for each in patterns if each not in few}
    if not enforced["patternProperties"]:
        del enforced["patternProperties"]


def _all_of(schemas: list[Any]) -> Schema:
    if any(schema is False for schema in schemas):
        return False
    return {"allOf": [schema for schema in schemas if schema is not True]}


def _read_sizes(enforced: dict[str, Any], place: str) -> None:
    """Drop bounds of the number of properties that restrict nothing, and refuse those that no
    object satisfies."""
    least, most = enforced.get("minProperties"), enforced.get("maxProperties")
    if least is None and most is None:
        return
    needed = set(enforced.get("required", []))
    possible = {
        name for name, schema in enforced.get("properties", {}).items() if schema is not False
    }
    closed = enforced.get("additionalProperties") is False and not enforced.get("patternProperties")
    if closed and isinstance(least, int):
        if least > len(possible) and "object" in types(enforced):
            if types(enforced) == {"object"}:
                raise at(
                    place,
                    f"minProperties is {least}, but an object can have only"
                    f" {len(possible)} different keys",
                )
        elif least == len(possible):
            enforced["required"] = [*enforced.get("required", []), *sorted(possible - needed)]
            needed |= possible
    if isinstance(least, int) and least <= len(needed):
        del enforced["minProperties"]
    if closed and isinstance(most, int) and most >= len(possible):
        del enforced["maxProperties"]

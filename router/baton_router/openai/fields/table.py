"""What a JSON object may hold, declared once: a class with a row for each field.

    class Weather(FieldTable, route="/weather"):
        city = required(text(), "where")
        days = optional(integer(1, 14), "how many of them", default="1")
        humid = refused("only temperatures are known")

        @rule("days", schemas=[...])
        def check_days(self) -> None: ...

Each row has the field's kind (type and bounds, see `kinds`), its text for users and its default; a
rule compares fields. Reading (`read_fields`), the OpenAPI document (`schema_of`) and docs/api.md
(`http/field_docs`) all follow from them. `read_fields(Weather, {"city": "Paris", "days": 2})` is a
Weather whose `days` is 2; mypy knows that it is an `int | None`. Null counts as absent, as in
OpenAI's API.

Any name without a row is refused with the closest one, except in open tables: there a client sends
back what it or another server added. A name that the server does not support is refused if its
value asks for something. A typed decoder would be shorter, but it answers "Expected `int` - at
`$.max_tokens`", which names neither the value sent nor the values allowed.

Rows are attributes, so everything else of a table has a name that no field has (`FIELDS`), or is a
function of this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, overload

from baton_protocol.errors import InvalidRequest
from baton_router.openai.fields.errors import MISSING, SHOWN
from baton_router.openai.fields.kinds import Json, Schema, ValueKind, boolean, nullable, only

Use = Literal["obeyed", "ignored", "refused"]
T = TypeVar("T")
V = TypeVar("V")
Table = TypeVar("Table", bound="FieldTable")

EMPTY: Sequence[Any] = (False, 0, "", [], {})  # values of a refused field that ask for nothing
MOST_ROUTES = 2  # that an error names, those most like the client's
ALIKE = 0.7  # similarity, 0 to 1, from which a name counts as a misspelt field
TRUE: Schema = {"const": True}
NOTHING_ELSE: Schema = {"additionalProperties": {"type": "null"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field(Generic[T]):
    """One row of a table. T is the type of the attribute: `absent` where the client gave none.
    `remark` and `default` are texts for users; `default` is empty if the schema has it or if there
    is none. A field with `needed` must be there."""

    kind: ValueKind[Any]
    remark: str
    absent: T
    use: Use = "obeyed"
    default: str = ""
    needed: bool = False

    @overload
    def __get__(self, values: None, table: type) -> Self: ...
    @overload
    def __get__(self, values: FieldTable, table: type) -> T: ...
    def __get__(self, values: FieldTable | None, table: type) -> Self | T:
        """The row itself of a table, and the default of an instance: a value that the client gave
        is in the instance's own dictionary, where Python looks first."""
        return self if values is None else self.absent

    @property
    def schema(self) -> Json:
        """The JSON schema of the field, with its remark."""
        schema = self.kind.schema if self.needed else nullable(self.kind.schema)
        return {**schema, "description": plain_text(self.remark)}


@dataclass(frozen=True, slots=True)
class Rule:
    """What the fields of a body must have in common. It is checked if one of `names` is given.
    `schemas` say it in the document, in words where JSON Schema cannot. Without `check`,
    SamplingParams enforces it."""

    names: frozenset[str]
    schemas: Sequence[Schema]
    check: Callable[[Any], None] | None = None


class FieldTable:
    """Base of all tables. An instance holds the values of one body. A body of its own has the route
    that takes it; `open` tables ignore names that they do not have."""

    FIELDS: ClassVar[Mapping[str, Field[Any]]] = {}
    READERS: ClassVar[Mapping[str, Callable[[str, Any], Any]]] = {}  # of the fields' kinds
    REFUSED: ClassVar[frozenset[str]] = frozenset()
    NEEDED: ClassVar[Sequence[str]] = ()
    RULES: ClassVar[Sequence[Rule]] = ()
    ROUTE: ClassVar[str] = ""
    OPEN: ClassVar[bool] = False

    def __init_subclass__(cls, *, route: str = "", open: bool = False) -> None:
        rows = [row for base in cls.__mro__ for row in vars(base).items()]
        fields: dict[str, Field[Any]] = {}
        for name, row in rows:
            if isinstance(row, Field):
                fields.setdefault(name, row)
        cls.FIELDS = fields
        cls.READERS = {name: row.kind.read for name, row in fields.items()}
        cls.REFUSED = frozenset(name for name, row in fields.items() if row.use == "refused")
        cls.NEEDED = [name for name, row in fields.items() if row.needed]
        cls.RULES = [row for _, row in rows if isinstance(row, Rule)]
        cls.ROUTE, cls.OPEN = route, open


def optional(kind: ValueKind[V | None], remark: str, default: str = "") -> Field[V | None]:
    """A field that is None if the client leaves it out."""
    return Field(kind=kind, remark=remark, absent=None, default=default)


def required(kind: ValueKind[V], remark: str) -> Field[V]:
    """A field that must be there."""
    absent: Any = None  # a body without it is not read
    return Field(kind=kind, remark=remark, absent=absent, needed=True)


def flag(default: bool, remark: str) -> Field[bool]:
    """A field that is true or false."""
    return Field(kind=boolean(default), remark=remark, absent=default)


def ignored(kind: ValueKind[Any], remark: str) -> Field[Any]:
    """A field without an effect, whose value must follow OpenAI's rules all the same."""
    return Field(kind=kind, remark=remark, absent=None, use="ignored")


def refused(remark: str, accepts: Sequence[Any] = EMPTY, complaint: str = "") -> Field[None]:
    """A field that the server does not support. `accepts` are the values that ask for nothing, null
    aside; `complaint` is the error for any other."""
    kind = only(accepts, complaint or unsupported(remark))
    return Field(kind=kind, remark=remark, absent=None, use="refused")


def unsupported(remark: str) -> str:
    return f"this server does not support it: {remark}; leave it out"


def rule(*names: str, schemas: Sequence[Schema] = ()) -> Callable[[Callable[[Any], None]], Rule]:
    """Makes a method of a table the rule for these fields."""
    return lambda check: Rule(frozenset(names), schemas, check)


def stated(*schemas: Schema) -> Rule:
    """A rule for the document alone: SamplingParams enforces it."""
    return Rule(frozenset(), schemas)


def needs(name: str, given: Schema, other: str, wanted: Schema, *, absent: bool = False) -> Schema:
    """The schema of the rule that `other` must match `wanted` if `name` matches `given`. With
    `absent`, `other` may be missing."""
    then = {"properties": {other: wanted}} | ({} if absent else {"required": [other]})
    return {"if": {"properties": {name: given}, "required": [name]}, "then": then}


def read_fields(table: type[Table], given: Json, at: str = "") -> Table:
    """What an object says. `at` is its path in the client's body, empty for the body itself. Raise
    InvalidRequest for the first name, value or rule that is wrong."""
    if not table.OPEN:
        check_names(table, given, at)
    return read_values(table, given, at)


def read_values(table: type[Table], given: Mapping[str, Any], at: str = "") -> Table:
    """`read_fields` without an error for names that the table lacks."""
    values = table()
    stored = vars(values)
    prefix = f"{at}." if at else ""
    readers = table.READERS
    for name, value in given.items():
        if value is not None and (read := readers.get(name)) is not None:
            stored[name] = read(prefix + name, value)
    for name in table.NEEDED:
        if name not in stored:
            stored[name] = readers[name](prefix + name, given.get(name, MISSING))
    for rule in table.RULES:
        if rule.check is not None and not stored.keys().isdisjoint(rule.names):
            rule.check(values)
    return values


def gives(values: FieldTable, name: str) -> bool:
    """Whether the client gave this field itself."""
    return name in vars(values)


def check_names(table: type[FieldTable], given: Mapping[str, Any], at: str = "") -> None:
    """Raise InvalidRequest for a name that the table lacks, unless its value is null or the table
    is open, and for a refused one, unless its value asks for nothing."""
    if not table.OPEN and not given.keys() <= table.FIELDS.keys():
        for name, value in given.items():
            if name not in table.FIELDS and value is not None:
                raise _unknown_name(table, name, at)
    if not table.REFUSED.isdisjoint(given):
        for name, value in given.items():
            if name in table.REFUSED and value is not None:
                table.FIELDS[name].kind.read(f"{at}.{name}" if at else name, value)


def obeyed_members(table: type[FieldTable], given: Json) -> Json:
    """The members of an object that the server does something with."""
    fields = table.FIELDS
    return {
        name: value
        for name, value in given.items()
        if name in fields and fields[name].use == "obeyed"
    }


def schema_of(table: type[FieldTable]) -> Json:
    """The JSON schema of an object that the table describes."""
    schema: Json = {
        "type": "object",
        "properties": {name: row.schema for name, row in table.FIELDS.items()},
    }
    if table.NEEDED:
        schema["required"] = list(table.NEEDED)
    if not table.OPEN:
        schema |= NOTHING_ELSE
    rules = [schema for rule in table.RULES for schema in rule.schemas]
    return schema | ({"allOf": rules} if rules else {})


def plain_text(remark: str) -> str:
    """The remark without links."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", remark)


def _unknown_name(table: type[FieldTable], name: str, at: str) -> InvalidRequest:
    shown = name if len(name) <= SHOWN else name[:SHOWN] + "..."
    param = f"{at}.{shown}" if at else shown
    message = f"{param!r} is not a field of {table.ROUTE or at}"
    others = [] if at else [other.ROUTE for other in _bodies(table) if name in other.FIELDS]
    others.sort(key=lambda route: SequenceMatcher(None, route, table.ROUTE).ratio(), reverse=True)
    meant = [known for known in table.FIELDS if known not in table.REFUSED]
    if others:
        message += f" but of {' and '.join(others[:MOST_ROUTES])}; leave it out"
    elif close := get_close_matches(name[:SHOWN], meant, n=1, cutoff=ALIKE):
        message += f"; did you mean {close[0]!r}?"
    else:
        message += "; leave it out"
    return InvalidRequest(message, param=param, code="unknown_parameter")


def _bodies(table: type[FieldTable]) -> Iterator[type[FieldTable]]:
    """The tables of all other bodies, of those that this process has imported."""
    tables = [FieldTable]
    while tables:
        other = tables.pop(0)
        tables += other.__subclasses__()
        if other.ROUTE and other is not table:
            yield other

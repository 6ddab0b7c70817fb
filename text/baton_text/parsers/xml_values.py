"""Convert arguments that a family writes one by one as plain text to JSON, by their schema."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from baton_text.parsers.parser import Piece, Tools, whole
from baton_text.parsers.source import Source

_INSIDE = re.compile(r'(?:[^"\\\x00-\x1f]|\\.)*+')  # a part of a JSON string
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # templates may render Python values


class Arguments:
    """Pieces for the arguments of one call, one by one. An incomplete call yields `{"a": 1`."""

    def __init__(self, tools: Tools, name: str, number: int) -> None:
        self._schema = tools.get(name, {})
        self._number = number
        self._keys: set[str] = set()

    def value(self, source: Source, key: str, end: str) -> Generator[None, None, tuple[str, bool]]:
        """Read the value of `key` up to `end`; return it and whether `end` was found.

        An `end` within a JSON string belongs to the value, unless the value may be plain text."""
        text, marker = yield from whole(source.until(end))
        parts = [text]
        if "string" not in self._types(key) and text.lstrip().startswith(("[", "{", '"')):
            inside = _ends_inside(text, False)
            while inside and marker is not None:
                text, marker = yield from whole(source.until(end))
                parts.append(end + text)
                inside = _ends_inside(parts[-1], inside)
        return "".join(parts), marker is not None

    def add(self, key: str, text: str) -> Iterator[Piece]:
        """No key stands twice: of a repeated one the first value stays, as it may be sent."""
        if key in self._keys:
            return
        separator = ", " if self._keys else "{"
        self._keys.add(key)
        value = _json_of(text, self._types(key))
        yield Piece("arguments", f"{separator}{_string(key)}: {value}", self._number)

    def close(self) -> Piece:
        return Piece("arguments", "}" if self._keys else "{}", self._number)

    def _types(self, key: str) -> frozenset[str]:
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return types_of(schema, self._schema)


def _json_of(text: str, types: frozenset[str]) -> str:
    bare = text.strip()
    if "string" in types and not ("null" in types and bare in ("null", "None")):
        return _string(text)
    bare = _PYTHON.get(bare, bare)
    try:
        json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _string(text)
    return bare


def _ends_inside(text: str, inside: bool) -> bool:
    """Whether `text`, which starts `inside` a JSON string or not, ends inside one."""
    at = 0
    while True:
        if inside:
            match = _INSIDE.match(text, at)
            at = match.end() if match else at
            if not text.startswith('"', at):
                return at == len(text)
        else:
            at = text.find('"', at)
            if at < 0:
                return False
        at, inside = at + 1, not inside


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema within `root` allows; empty if it names none.

    Each part is read once, so the time is linear also if references form cycles."""
    types: set[str] = set()
    pending, seen = [schema], set[int]()
    while pending:
        part = pending.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        types |= _own_types(part)
        for keyword in ("anyOf", "oneOf", "allOf"):
            options = part.get(keyword)
            pending += options if isinstance(options, list) else []
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            target: object = root
            for key in reference[2:].split("/"):
                target = target.get(key) if isinstance(target, Mapping) else None
            pending.append(target)
    return frozenset(types)


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema itself names, apart from its options."""
    named = schema.get("type")
    types = [named] if isinstance(named, str) else named
    if isinstance(types, list) and types:
        return {name for name in types if isinstance(name, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(one, str) for one in values):
        return {"string"}
    return set()


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

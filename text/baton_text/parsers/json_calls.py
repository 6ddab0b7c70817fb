"""Calls that are JSON objects: {"name": "weather", "arguments": {"city": "Paris"}}."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator

from baton_text.parsers.parser import Piece, as_pieces
from baton_text.parsers.source import Source, Texts

NAMES = ("name", "function")
ARGUMENTS = ("arguments", "parameters")
_NAME = re.compile(r"[^\s<>{}\"]+")


def json_calls(
    source: Source,
    number: int,
    *markers: str,
    known: Collection[str] | None = None,
    before: str = "",
) -> Generator[Piece | None, None, int]:
    """Read one object, or a list of objects, as calls from `number` on; return the next number.

    A list ends behind its last object that is a call. For the rest, see json_call.
    """
    bracket = yield from source.starts_with("[")
    if bracket is None:
        return number + (yield from json_call(source, number, *markers, known=known, before=before))
    before += bracket + (yield from source.skip_space())
    while (yield from json_call(source, number, *markers, known=known, before=before)):
        number += 1
        before = ""
        yield from source.skip_space()
        comma = (yield from source.starts_with(",", "]")) == ","
        yield from source.skip_space()
        if not comma:
            break
    return number


def json_call(
    source: Source,
    number: int,
    *markers: str,
    known: Collection[str] | None = None,
    before: str = "",
) -> Generator[Piece | None, None, bool]:
    """Read one object as call `number`, which begins as soon as its name is known, and return
    whether it is one. It ends before one of `markers` at the latest.

    Where it is none, `before` and what was read of it are content. `known`: only these names make a
    call.
    """
    read = [before] if before else []  # until it is a call
    held = ""  # the arguments, where they come before the name
    called = False
    whole = False

    def texts(parts: Texts[bool]) -> Generator[None, None, bool]:
        while True:
            try:
                text = next(parts)
            except StopIteration as stop:
                return bool(stop.value)
            if text is None:
                yield None
            else:
                read.append(text)

    separator = yield from source.starts_with("{")
    while separator is not None:
        read += separator, (yield from source.skip_space())
        if separator == "{" and (yield from source.starts_with("}")):
            read.append("}")
            break
        key = yield from source.json_string()
        if key is None:
            break
        read += key, (yield from source.skip_space())
        if (yield from source.starts_with(":")) is None:
            break
        read += ":", (yield from source.skip_space())
        match _loaded(key):
            case name if name in NAMES and not called:
                text = yield from source.json_string()
                if text is None:
                    break
                read.append(text)
                function = _loaded(text)
                if not function or (known is not None and function not in known):
                    break
                yield Piece("call", function, number)
                called = True
                if held:
                    yield Piece("arguments", held, number)
            case name if name in ARGUMENTS and called and not held:
                held = "{}"
                if not (yield from as_pieces("arguments", source.json_value(*markers), number)):
                    return True
            case name if name in ARGUMENTS and not held:
                begun = len(read)
                if not (yield from texts(source.json_value(*markers))):
                    break
                held = "".join(read[begun:])
            case _:
                if not (yield from texts(source.json_value(*markers))):
                    break
        read.append((yield from source.skip_space()))
        separator = yield from source.starts_with(",", "}")
        if separator == "}":
            read.append(separator)
            whole = True
            break
    if called and not held and whole:
        yield Piece("arguments", "{}", number)
    elif not called and any(read):
        yield Piece("content", "".join(read))
    return called


def arguments_call(
    source: Source, name: str, number: int, *markers: str
) -> Generator[Piece | None, None, bool]:
    """Read the arguments of a call whose name came before them, up to one of `markers` at the
    latest, which stays unread, and return whether it is a call. What is not is content: the name
    too, if something else than an object follows."""
    space = yield from source.skip_space()
    if (yield from source.over()):
        yield Piece("call", name, number)
        return True
    next_text = yield from source.starts_with("{", *markers)
    if next_text is None:
        yield Piece("content", name + space)
        return False
    source.put_back(next_text)
    yield Piece("call", name, number)
    if next_text == "{":
        yield from as_pieces("arguments", source.json_value(*markers), number)
    else:
        yield Piece("arguments", "{}", number)
    return True


def is_name(text: str) -> bool:
    """Whether a text may be a function's name, where nothing but its place says so."""
    return _NAME.fullmatch(text) is not None


def _loaded(text: str) -> str:
    """What a JSON string says; empty where it says nothing that can be sent on."""
    try:
        value: str = json.loads(text)
        value.encode()
    except ValueError:
        return ""
    return value

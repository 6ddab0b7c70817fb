"""Calls that are JSON objects: {"name": "weather", "arguments": {"city": "Paris"}}."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator

from baton_text.parsers.parser import Piece, as_pieces
from baton_text.parsers.source import Source, Texts

NAMES = ("name", "function")
ARGUMENTS = ("arguments", "parameters")


def json_call(
    source: Source, number: int, *markers: str, known: Collection[str] | None = None
) -> Generator[Piece | None, None, bool]:
    """Read one object as call `number`, which begins as soon as its name is known, and return
    whether it is one. It ends before one of `markers` at the latest.

    Where it is none, what was read of it is content. `known`: only these names make a call.
    """
    read: list[str] = []  # of the object, until it is a call
    held = ""  # the arguments, where they come before the name
    called = False
    whole = False

    def keep(text: str | None) -> None:
        if text is not None:
            read.append(text)

    def texts(parts: Texts[bool]) -> Generator[None, None, bool]:
        while True:
            try:
                text = next(parts)
            except StopIteration as stop:
                return bool(stop.value)
            keep(text)
            if text is None:
                yield None

    separator = yield from source.starts_with("{")
    while separator is not None:
        keep(separator)
        yield from _space(source, read)
        if separator == "{" and (end := (yield from source.starts_with("}"))) is not None:
            keep(end)
            break
        key = yield from source.json_string()
        if key is None:
            break
        keep(key)
        yield from _space(source, read)
        colon = yield from source.starts_with(":")
        if colon is None:
            break
        keep(colon)
        yield from _space(source, read)
        match _loaded(key):
            case name if name in NAMES and not called:
                text = yield from source.json_string()
                if text is None:
                    break
                keep(text)
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
        yield from _space(source, read)
        separator = yield from source.starts_with(",", "}")
        if separator == "}":
            keep(separator)
            whole = True
            break
    if called and not held and whole:
        yield Piece("arguments", "{}", number)
    elif not called and read:
        yield Piece("content", "".join(read))
    return called


def _space(source: Source, read: list[str]) -> Generator[None, None, None]:
    while not (yield from source.over()) and source.unread[0] in " \t\r\n":
        read.append(source.take(1))


def _loaded(text: str) -> str:
    """What a JSON string says; empty where it says nothing that can be sent on."""
    try:
        value: str = json.loads(text)
        value.encode()
    except ValueError:
        return ""
    return value

"""Calls that are JSON objects: {"name": "weather", "arguments": {"city": "Paris"}}."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator

from baton_text.parsers.parser import CallForm, Piece, as_pieces, listed_calls, whole
from baton_text.parsers.source import Source

NAMES = ("name", "function")
ARGUMENTS = ("arguments", "parameters")
_NAME = re.compile(r"[^\s<>{}\"]+")


def json_form(
    before: str = "",
    after: str = "",
    *,
    arguments: str = "arguments",
    open: str = "",
    between: str = "",
    close: str = "",
    also: tuple[tuple[str, str], ...] = (),
    other_start: str = "",
) -> CallForm:
    """The form of calls that are JSON objects, each between `before` and `after`. `arguments` is
    the object's key for the arguments; the rest is as in CallForm."""
    return CallForm(
        before_name=f'{before}{{"name": "',
        before_arguments=f'", "{arguments}": ',
        after_arguments=f"}}{after}",
        open=open,
        between=between,
        close=close,
        also=also,
        other_start=other_start,
    )


def json_calls(
    source: Source,
    number: int,
    *markers: str,
    known: Collection[str] | None = None,
    before: str = "",
) -> Generator[Piece | None, None, int]:
    """Read one call or a JSON list of calls, numbered from `number`; return the next free number.

    The list ends after its last object that is a call. For the other parameters see json_call.
    """

    def call(number: int, before: str) -> Generator[Piece | None, None, bool]:
        return json_call(source, number, *markers, known=known, before=before)

    if (yield from source.starts_with("[")):
        return (yield from listed_calls(source, number, before, call))
    return number + (yield from call(number, before))


def json_call(
    source: Source,
    number: int,
    *markers: str,
    known: Collection[str] | None = None,
    before: str = "",
) -> Generator[Piece | None, None, bool]:
    """Read one JSON object as call `number`; return whether it is a call.

    Yield the call as soon as its name is read. A marker of `markers` outside of strings ends the
    object. If the object is not a call, yield `before` and the text read so far as content. With
    `known`, only an object with one of these names is a call.
    """
    read = [before] if before else []  # text to yield as content if this is not a call
    held = ""  # arguments that precede the name; not empty once the arguments are read
    called = False
    closed = False

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
            case name:
                text, complete = yield from whole(source.json_value(*markers))
                read.append(text)
                if not complete:
                    break
                if name in ARGUMENTS and not held:
                    held = text
        read.append((yield from source.skip_space()))
        separator = yield from source.starts_with(",", "}")
        if separator == "}":
            read.append(separator)
            closed = True
            break
    if called and not held and closed:
        yield Piece("arguments", "{}", number)
    elif not called and any(read):
        yield Piece("content", "".join(read))
    return called


def arguments_call(
    source: Source, name: str, number: int, *markers: str
) -> Generator[Piece | None, None, bool]:
    """Read the arguments that follow a function's name; return whether this is a call.

    The arguments are a JSON object. One of `markers` ends them and stays unread; a marker in their
    place means that the call has none. If other text follows, yield `name` as content."""
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
    """Whether `text`, which stands where a function's name is expected, can be one."""
    return _NAME.fullmatch(text) is not None


def _loaded(text: str) -> str:
    """The value of a JSON string; empty if it is not valid JSON or not encodable as UTF-8."""
    try:
        value: str = json.loads(text)
        value.encode()
    except ValueError:
        return ""
    return value

"""Decodes JSON that may be large, in small steps and within a bound of memory.

In: bytes of a body. Out: what msgspec makes of them. msgspec keeps the interpreter to itself until
it is done, which takes up to 150 ms for a text of 16 MB: in a thread, it would still stop every
stream meanwhile. So long strings are decoded in slices. And a body of 16 MB may hold 8 million
values, of 72 bytes each: how many they are is counted before they are made.
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from baton_protocol.errors import TooLarge

# Of a body: each takes up to 72 bytes, however few it has as JSON. Hardly a context is longer.
MAX_VALUES = 1 << 20
SLICE = 1 << 18  # bytes; a step takes up to 3 ms
_QUOTE, _BACKSLASH = b'"', ord("\\")
_ESCAPE_BYTES = 12  # at most: two halves of one character
# Where an escape begins that is not the second half of a character.
_ESCAPE = re.compile(rb"(?<!\\)(?:\\\\)*(?<!\\u[dD][89abAB][0-9a-fA-F]{2})(?=\\)")


def check_size(data: bytes | bytearray, most: int = MAX_VALUES) -> None:
    """Raise TooLarge for JSON with more than `most` lists, objects and members of them."""
    count, at = 0, 0
    for start, end in (*_strings(data), (len(data), len(data))):
        for begin in range(at, start, SLICE):
            until = min(start, begin + SLICE)
            count += sum(data.count(sign, begin, until) for sign in (b",", b"[", b"{"))
        if count > most:
            raise TooLarge(
                f"the body holds more than {most} values; send fewer ids or prompts at a time"
            )
        at = end


def decode(data: bytes | bytearray, size: int = SLICE) -> Any:
    """As msgspec.json.decode, which it is for what has no string of more than `size` bytes."""
    if len(data) <= size:
        return msgspec.json.decode(data)
    long = [(start, end) for start, end in _strings(data) if end - start > size]
    if not long:
        return msgspec.json.decode(data)
    mark, at = secrets.token_hex(16), 0
    rest: list[bytes | bytearray] = []
    texts = {}
    for number, (start, end) in enumerate(long):
        name = f"{mark}{number}"
        texts[name] = "".join(_decoded(data, start, end, size))
        rest += [data[at:start], name.encode()]
        at = end
    value = msgspec.json.decode(b"".join([*rest, data[at:]]))
    return _with_texts(value, texts)


def _strings(data: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Where strings begin and end, without their quotes."""
    at = 0
    while (quote := data.find(_QUOTE, at)) >= 0:
        at = _string_end(data, quote + 1)
        yield quote + 1, at - 1


def _string_end(data: bytes | bytearray, at: int) -> int:
    """Behind the quote that ends the string which `at` is in."""
    while (end := data.find(_QUOTE, at)) >= 0:
        first = end
        while data[first - 1] == _BACKSLASH:
            first -= 1
        at = end + 1
        if (end - first) % 2 == 0:
            return at
    return len(data) + 1


def _decoded(data: bytes | bytearray, start: int, end: int, size: int) -> Iterator[str]:
    while start < end:
        cut = end if end - start <= size else _cut(data, start, start + size)
        part = b"".join((_QUOTE, data[start : cut or end], _QUOTE))
        yield msgspec.json.decode(part, type=str)
        start = cut or end


def _cut(data: bytes | bytearray, start: int, end: int) -> int:
    """A place before `end` that is within no character and no escape; 0 where there is none."""
    while end > start and data[end] & 0xC0 == 0x80:
        end -= 1
    if end == start:
        return 0
    near = max(start, end - 8 * _ESCAPE_BYTES)
    if data.find(b"\\", max(near, end - _ESCAPE_BYTES), end) < 0:
        return end
    last = 0
    for found in _ESCAPE.finditer(data, near, end):
        last = found.end()
    return last if last > start else 0


def _with_texts(value: Any, texts: dict[str, str]) -> Any:
    """The value with each name of a text replaced by it. They are few, so most of a value need not
    be looked at: where all have been found, it ends."""
    whole = [value]
    left = set(texts)
    looking: deque[Any] = deque([whole])
    while looking and left:
        within = looking.popleft()
        items = within.items() if isinstance(within, dict) else enumerate(within)
        for key, one in list(items):
            if isinstance(one, str) and one in texts:
                within[key] = texts[one]
                left.discard(one)
            elif isinstance(one, list | dict):
                looking.append(one)
            if isinstance(key, str) and key in texts:
                within[texts[key]] = within.pop(key)
                left.discard(key)
    return whole[0]

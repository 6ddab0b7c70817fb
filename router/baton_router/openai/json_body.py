"""Decodes a request's body: large JSON in short steps and bounded memory.

In: the bytes of a body. Out: what it holds, after its size was checked. A text of 16 MB must stop
no stream while it is decoded, and one of a million brackets must not fill the memory.
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from baton_protocol.errors import MalformedBody, TooLarge
from baton_router.openai.fields.errors import show

# Limit per body: each value takes up to 72 bytes, however short its JSON. Few contexts are longer.
MAX_VALUES = 1 << 20
SLICE = 1 << 18  # bytes; a slice takes up to 3 ms to decode
_QUOTE, _BACKSLASH = b'"', ord("\\")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors and shells put it before a text
_ESCAPE_BYTES = 12  # at most: a surrogate pair
# Start of an escape that is not the second half of a surrogate pair.
_ESCAPE = re.compile(rb"(?<!\\)(?:\\\\)*(?<!\\u[dD][89abAB][0-9a-fA-F]{2})(?=\\)")


def check_size(data: bytes | bytearray, most: int = MAX_VALUES) -> None:
    """Raise TooLarge for JSON with more than `most` values, counted by commas and brackets."""
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


def decode_object(data: bytes | bytearray) -> dict[str, Any]:
    """The JSON object of a body, with or without a byte order mark. Raise MalformedBody."""
    if data.startswith(_BYTE_ORDER_MARK):
        data = data[len(_BYTE_ORDER_MARK) :]
    try:
        body = decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBody(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise MalformedBody(f"the body is {show(body)}; it must be a JSON object")
    return body


def decode_optional_object(data: bytes | bytearray) -> dict[str, Any]:
    """The same for a body that may be empty: then it has no members."""
    return decode_object(data) if data.strip() else {}


def decode(data: bytes | bytearray, size: int = SLICE) -> Any:
    """Decode JSON that may be large, in short steps and within bounded memory.

    In: the bytes of a body. Out: what msgspec makes of them. msgspec holds the interpreter lock
    until it is done, up to 150 ms for a text of 16 MB, which would stop every stream even from a
    thread. Strings longer than `size` bytes are therefore decoded in slices. Call check_size()
    first: a body of 16 MB may hold 8 million values of 72 bytes each.

    Without such strings it equals msgspec.json.decode.
    """
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
    """Start and end of each string, without its quotes."""
    at = 0
    while (quote := data.find(_QUOTE, at)) >= 0:
        at = _string_end(data, quote + 1)
        yield quote + 1, at - 1


def _string_end(data: bytes | bytearray, at: int) -> int:
    """The offset after the quote that ends the string which contains offset `at`."""
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
    """An offset up to `end` that is inside no character and no escape; 0 if none exists."""
    while end > start and data[end] & 0xC0 == 0x80:
        end -= 1
    if end == start:
        return 0
    near = max(start, end - 8 * _ESCAPE_BYTES)
    if data.find(b"\\", max(near, end - _ESCAPE_BYTES), end) < 0:
        return end
    last = 0
    for escape in _ESCAPE.finditer(data, near, end):
        last = escape.end()
    return last if last > start else 0


def _with_texts(value: Any, texts: dict[str, str]) -> Any:
    """Replace each placeholder in the value by its text. There are few, so the search stops as soon
    as all are found."""
    whole = [value]
    left = set(texts)
    looking: deque[Any] = deque([whole])
    while looking and left:
        within = looking.popleft()
        items = within.items() if isinstance(within, dict) else enumerate(within)
        for key, item in list(items):
            if isinstance(item, str) and item in texts:
                within[key] = texts[item]
                left.discard(item)
            elif isinstance(item, list | dict):
                looking.append(item)
            if isinstance(key, str) and key in texts:
                within[texts[key]] = within.pop(key)
                left.discard(key)
    return whole[0]

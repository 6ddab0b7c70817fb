"""Random bytes that a broken or hostile client may write to a router's socket.

In: a seeded random generator. Out: the pieces that one connection writes one after another. Most
are not valid requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

Pieces = list[bytes]
_METHODS = (b"GET", b"POST", b"PUT", b"OPTIONS", b"", b"G\x00T", b"get", b"POST" * 40)
_PATHS = (
    *(b"/health", b"/v1/models", b"/v1/completions", b"/v1/chat/completions", b"/metrics"),
    *(b"", b"*", b"//", b"/%", b"/%ff%00", b"/v1/models/%2e%2e", b"http://[::1", b"/\xff\xfe"),
)
_VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"HTTP", b"", b"HTTP/1.1 HTTP/1.1")
_LENGTHS = (b"0", b"5", b"-1", b"+5", b"5, 6", b"0x5", b"99999999999999999999", b"", b"5\x00", b" ")
_NAMES = (b"Host", b"X-A", b"Expect", b"Upgrade", b"Connection", b"Content-Encoding", b"a b", b"")
_VALUES = (b"x", b"100-continue", b"websocket", b"close", b"gzip", b"\xff\x00", b"\r", b"x" * 300)
_HEADERS = (b"Host: localhost", b"Content-Type: application/json")
_BODY = b'{"prompt": "x", "max_tokens": 1}'


def connection(rng: random.Random) -> Pieces:
    kind = rng.choice(_KINDS)
    data = kind(rng)
    if rng.random() < 0.2:
        data = data[: rng.randrange(len(data) + 1)]
    if rng.random() < 0.2:
        data += rng.choice(_KINDS)(rng)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(3)))
    ends = [0, *cuts, len(data)]
    return [data[start:end] for start, end in pairwise(ends)]


def _request(rng: random.Random, *headers: bytes, body: bytes = b"") -> bytes:
    line = b" ".join((rng.choice(_METHODS[:2]), rng.choice(_PATHS[:5]), b"HTTP/1.1"))
    return b"\r\n".join((line, *_HEADERS, *headers, b"", b"")) + body


def _broken_line(rng: random.Random) -> bytes:
    parts = (rng.choice(_METHODS), rng.choice(_PATHS), rng.choice(_VERSIONS))
    return rng.choice((b" ", b"\t", b"  ")).join(parts) + rng.choice((b"\r\n\r\n", b"\n\n", b"\r"))


def _broken_headers(rng: random.Random) -> bytes:
    count = rng.choice((1, 3, 20, 300))
    lines = [rng.choice(_NAMES) + b": " + rng.choice(_VALUES) for _ in range(count)]
    return _request(rng, *lines)


def _huge_header(rng: random.Random) -> bytes:
    size = rng.choice((8_000, 9_000, 70_000, 300_000))
    return _request(rng, rng.choice((b"X-A: ", b"X-A", b"Authorization: Bearer ")) + b"a" * size)


def _many_lengths(rng: random.Random) -> bytes:
    lines = [b"Content-Length: " + rng.choice(_LENGTHS) for _ in range(rng.randrange(1, 5))]
    if rng.random() < 0.3:
        lines.append(b"Transfer-Encoding: " + rng.choice((b"chunked", b"gzip, chunked", b"x")))
    return _request(rng, *lines, body=_BODY)


def _wrong_chunks(rng: random.Random) -> bytes:
    sizes = (b"5", b"5;x=y", b"zz", b"-1", b"ffffffffffffffffff", b"", b"5\r")
    parts = [rng.choice(sizes) + b"\r\nhello" + rng.choice((b"\r\n", b"", b"\n")) for _ in range(3)]
    end = rng.choice((b"0\r\n\r\n", b"0\r\n", b"", b"0\r\nX: y\r\n\r\n"))
    return _request(rng, b"Transfer-Encoding: chunked", body=b"".join(parts) + end)


def _half_body(rng: random.Random) -> bytes:
    return _request(rng, b"Content-Length: %d" % (len(_BODY) + rng.randrange(9)), body=_BODY)


def _wrong_encoding(rng: random.Random) -> bytes:
    kind = rng.choice((b"gzip", b"deflate", b"br", b"x", b"gzip, gzip"))
    length = b"Content-Length: %d" % len(_BODY)
    return _request(rng, b"Content-Encoding: " + kind, length, body=_BODY)


def _noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 20, 2_000, 100_000)))


def _pipelined(rng: random.Random) -> bytes:
    valid = _request(rng, b"Content-Length: %d" % len(_BODY), body=_BODY)
    return valid * rng.randrange(1, 6) + rng.randbytes(rng.randrange(50))


_KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    _broken_line,
    _broken_headers,
    _huge_header,
    _many_lengths,
    _wrong_chunks,
    _half_body,
    _wrong_encoding,
    _noise,
    _pipelined,
)

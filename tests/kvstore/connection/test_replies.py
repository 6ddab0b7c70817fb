"""ReplyReader: replies split at any byte, and invalid bytes."""

from __future__ import annotations

import pytest

from baton_kvstore.connection.resp import ReplyReader, pack
from baton_kvstore.errors import ProtocolBroken, ServerRefused


@pytest.mark.parametrize(
    ("data", "reply"),
    [
        (b"+OK\r\n", b"OK"),
        (b":42\r\n", 42),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"$0\r\n\r\n", b""),
        (b"$6\r\na\r\n$-1\r\n", b"a\r\n$-1"),
        (b"*0\r\n", []),
        (b"*2\r\n$-1\r\n$-1\r\n", [None, None]),
        (b"*4\r\n$2\r\nab\r\n$2\r\n\r\n\r\n$-1\r\n$2\r\n$2\r\n", [b"ab", b"\r\n", None, b"$2"]),
        (
            b"*3\r\n$1\r\na\r\n$12\r\n$1\r\nb\r\n$1\r\nc\r\n$1\r\nd\r\n",
            [b"a", b"$1\r\nb\r\n$1\r\nc", b"d"],
        ),
    ],
)
def test_a_reply_may_be_split_at_any_byte(data: bytes, reply: object) -> None:
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            reader = ReplyReader("label")
            pieces = [data[:first], data[first:second], data[second:]]
            ends = [reader.feed(piece) for piece in pieces if piece]
            assert ends == [False] * (len(ends) - 1) + [True]
            assert reader.reply == reply


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"*x\r\n",
        b"*9999999999\r\n",
        b"$9999999999\r\n",
        b"*1\r\n:1\r\n",
        b"*1\r\n*1\r\n$1\r\na\r\n",
        b"*1\r\n-ERR no\r\n",
        b"%1\r\n+a\r\n+b\r\n",
        b"#t\r\n",
        b"*1\r\n$x\r\n",
        b"+OK\r\n+OK\r\n",
        b"*1\r\n$1\r\na\r\n$1\r\n",
    ],
)
def test_an_invalid_reply_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolBroken, match="label"):
        ReplyReader("label").feed(data)


def test_an_error_reply_raises_server_refused_with_its_code() -> None:
    with pytest.raises(ServerRefused, match=r"OOM full \[label\]") as caught:
        ReplyReader("label").feed(b"-OOM full\r\n")
    assert caught.value.code == "OOM"


def test_a_reply_over_the_limit_is_refused() -> None:
    for data in (
        b"+" + b"x" * 200,
        b"$100\r\n" + b"x" * 100,
        b"*9\r\n" + b"$10\r\n0123456789\r\n" * 9,
    ):
        reader = ReplyReader("label", most_bytes=100)
        reader.feed(data[:100])
        with pytest.raises(ProtocolBroken, match="label sent a reply that is too long"):
            reader.feed(data[100:])
    exact = b"$93\r\n" + b"x" * 93 + b"\r\n"
    assert ReplyReader("label", most_bytes=len(exact)).feed(exact)


@pytest.mark.parametrize("head", [b"*7654321", b"*1\r\n*7654321", b"*2\r\n$-1\r\n>7654321"])
def test_the_header_of_a_huge_list_is_refused_at_any_depth_and_split_at_any_byte(
    head: bytes,
) -> None:
    for cut in range(len(head)):
        reader = ReplyReader("label")
        if cut:
            assert not reader.feed(head[:cut])
        with pytest.raises(ProtocolBroken, match="label sent a list that is too long"):
            reader.feed(head[cut:])


def test_a_value_may_contain_bytes_like_a_list_header() -> None:
    value = b"\r\n*123456\r\n"
    reader = ReplyReader("label")
    assert reader.feed(b"$%d\r\n%b\r\n" % (len(value), value))
    assert reader.reply == value


def test_a_command_is_packed_as_a_list_of_strings() -> None:
    assert pack(b"GET", b"") == b"*2\r\n$3\r\nGET\r\n$0\r\n\r\n"

"""RESP2, the format of Redis: how a command is packed, and how a small reply is parsed.

hiredis parses the replies, piece by piece as they arrive (ReplyReader). The server need not be
trusted: a reply is bounded before hiredis allocates memory for it. `resp_connection` and
`async_resp` are the connections that use it.
"""

from __future__ import annotations

import hiredis

from baton_kvstore.errors import (
    ProtocolBroken,
    ServerRefused,
)

Reply = bytes | int | None | list[bytes | None]
MOST_BYTES = 256 << 20
# hiredis allocates a list as soon as it has parsed the list's header, also inside another list: 8
# bytes for each item that the header declares, and freeing 500 million items takes 2 s. So a header
# with more digits than this never reaches hiredis.
MOST_ITEMS_DIGITS = 6
LONGEST_STRING_DIGITS = 7  # of the length of a reply that is a single string
LIST_HEADS = (b"\r\n*", b"\r\n>")
OVERLAP = len(LIST_HEADS[0]) + MOST_ITEMS_DIGITS  # a header may arrive in two pieces
STRINGS = {bytes, type(None)}


def pack(*args: bytes) -> bytes:
    """Encode a command in RESP."""
    parts = [b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args]
    return b"*%d\r\n%b" % (len(args), b"".join(parts))


class ReplyReader:
    """Parses one reply of a Redis server with hiredis, piece by piece as it arrives.

    A reply is a line, a number, a string or a list of strings. The server need not be trusted: a
    reply may have at most `most_bytes`, and the memory for it is bounded. `label` names the server
    in errors.
    """

    def __init__(self, label: str, most_bytes: int = MOST_BYTES) -> None:
        self._label = label
        self._left = most_bytes
        self._parser = hiredis.Reader()
        self._before = b"\r\n"  # the last OVERLAP bytes that were fed
        self.reply: Reply = None

    def feed(self, piece: bytes) -> bool:
        """Add bytes. Return True once `reply` is complete.

        Raise ServerRefused for an error reply, ProtocolBroken for an invalid or too long reply.
        """
        self._left -= len(piece)
        if self._left < 0:
            raise ProtocolBroken(f"{self._label} sent a reply that is too long")
        self._check_heads(piece)
        try:
            self._parser.feed(piece)
            reply = self._parser.gets()
        except hiredis.ProtocolError as error:
            raise ProtocolBroken(f"{self._label} sent an invalid Redis reply: {error}") from error
        if reply is False:
            return False
        if self._parser.has_data():
            raise ProtocolBroken(f"{self._label} sent data after its reply")
        self.reply = self._checked(reply)
        return True

    def _check_heads(self, piece: bytes) -> None:
        seen = self._before + piece
        self._before = seen[-OVERLAP:]
        long = len(piece) > LONGEST_STRING_DIGITS and piece[1 : 2 + LONGEST_STRING_DIGITS].isdigit()
        if seen.startswith(b"\r\n$") and long and len(seen) == len(piece) + 2:
            raise ProtocolBroken(f"{self._label} sent a string that is too long: {piece!r:.60}")
        for head in LIST_HEADS:
            at = seen.find(head)
            while at >= 0:
                digits = seen[at + len(head) : at + len(head) + MOST_ITEMS_DIGITS + 1]
                if len(digits) > MOST_ITEMS_DIGITS and digits.isdigit():
                    raise ProtocolBroken(
                        f"{self._label} sent a list that is too long: {digits!r}..."
                    )
                at = seen.find(head, at + 1)

    def _checked(self, reply: object) -> Reply:
        match reply:
            case hiredis.ReplyError():
                raise ServerRefused(f"{reply} [{self._label}]")
            case list() if set(map(type, reply)) <= STRINGS:
                return reply
            case bytes() | int() | None if not isinstance(reply, bool):
                return reply
        raise ProtocolBroken(f"{self._label} sent a reply of an unexpected type: {reply!r:.60}")

"""One reply of a Redis server, from pieces as they come, parsed by hiredis.

In: bytes of a RESP2 reply: a line, a number, a string, or a list of strings. Out: the reply, or an
error of the StoreUnavailable branch. The server need not be trusted: what is read of a reply, and
the memory that it takes, is bounded.

Large values do not come through here: hiredis would copy them, and the data plane receives them in
place (see `resp`).
"""

from __future__ import annotations

import hiredis

from baton_kvstore.errors import ProtocolBroken, ServerRefused

Reply = bytes | int | None | list[bytes | None]

MOST_BYTES = 256 << 20
# hiredis allocates a list when it has read its head, also within another list: at 8 bytes for each
# item that the head promises, and it takes 2 s to free 500 million. So a head of more digits than
# these is not shown to it.
MOST_ITEMS_DIGITS = 6
LONGEST_STRING_DIGITS = 7  # of a reply that is one string
LIST_HEADS = (b"\r\n*", b"\r\n>")
OVERLAP = len(LIST_HEADS[0]) + MOST_ITEMS_DIGITS  # a head may come in two pieces
STRINGS = {bytes, type(None)}


def pack(*args: bytes) -> bytes:
    """A command as it is sent."""
    parts = [b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args]
    return b"*%d\r\n%b" % (len(args), b"".join(parts))


class ReplyReader:
    """One reply of at most `most_bytes`. `label` names the server in errors."""

    def __init__(self, label: str, most_bytes: int = MOST_BYTES) -> None:
        self._label = label
        self._left = most_bytes
        self._parser = hiredis.Reader()
        self._before = b"\r\n"  # the end of what has come before
        self.reply: Reply = None

    def feed(self, piece: bytes) -> bool:
        """True once `reply` is there. Raise ServerRefused for an error reply, ProtocolBroken for
        what is none, or is longer than allowed."""
        self._left -= len(piece)
        if self._left < 0:
            raise ProtocolBroken(f"{self._label} sent more than is read of it")
        self._check_heads(piece)
        try:
            self._parser.feed(piece)
            reply = self._parser.gets()
        except hiredis.ProtocolError as error:
            raise ProtocolBroken(f"{self._label}: not a Redis reply: {error}") from error
        if reply is False:
            return False
        if self._parser.has_data():
            raise ProtocolBroken(f"{self._label} sent more than was asked for")
        self.reply = self._checked(reply)
        return True

    def _check_heads(self, piece: bytes) -> None:
        seen = self._before + piece
        self._before = seen[-OVERLAP:]
        long = len(piece) > LONGEST_STRING_DIGITS and piece[1 : 2 + LONGEST_STRING_DIGITS].isdigit()
        if seen.startswith(b"\r\n$") and long and len(seen) == len(piece) + 2:
            raise ProtocolBroken(f"{self._label}: a string that is too long: {piece!r:.60}")
        for head in LIST_HEADS:
            at = seen.find(head)
            while at >= 0:
                digits = seen[at + len(head) : at + len(head) + MOST_ITEMS_DIGITS + 1]
                if len(digits) > MOST_ITEMS_DIGITS and digits.isdigit():
                    raise ProtocolBroken(f"{self._label}: a list that is too long: {digits!r}...")
                at = seen.find(head, at + 1)

    def _checked(self, reply: object) -> Reply:
        match reply:
            case hiredis.ReplyError():
                raise ServerRefused(f"{reply} [{self._label}]")
            case list() if set(map(type, reply)) <= STRINGS:
                return reply
            case bytes() | int() | None if not isinstance(reply, bool):
                return reply
        raise ProtocolBroken(f"{self._label}: not the reply of a command: {reply!r:.60}")

"""What can go wrong with the store.

    StoreError
    |-- StoreMisconfigured   final: a URL, a size or a layout that can never work
    |-- ServerMissing        final: no redis-server to start an embedded store with
    |-- ServerFailed         final: an embedded redis-server did not come up
    `-- StoreUnavailable     retryable: the store is down, slow, full or talks nonsense
        |-- LinkBroken       the connection was cut
        |-- LinkTimeout      an operation passed its deadline
        |-- ProtocolBroken   bytes that are no RESP2 reply
        |   `-- ValueTooLong  a value that cannot be what was asked for; it was not read
        `-- ServerRefused    an error reply: `code` is its first word (OOM, NOAUTH, ...)

Messages name servers by `Endpoint.label`, which holds no credentials.
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of the tree; the message is one line a user can act on."""


class StoreMisconfigured(StoreError):
    pass


class ServerMissing(StoreError):
    pass


class ServerFailed(StoreError):
    pass


class StoreUnavailable(StoreError):
    pass


class LinkBroken(StoreUnavailable):
    pass


class LinkTimeout(StoreUnavailable):
    pass


class ProtocolBroken(StoreUnavailable):
    pass


class ValueTooLong(ProtocolBroken):
    pass


class ServerRefused(StoreUnavailable):
    """The server answered with an error."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.split(" ", 1)[0]

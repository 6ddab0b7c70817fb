"""The errors of the store.

    StoreError
    |-- StoreMisconfigured   final: a URL, a size or a layout that can never work
    |-- ServerMissing        final: no redis-server binary for an embedded store
    |-- ServerFailed         final: an embedded redis-server did not start
    `-- StoreUnavailable     retryable: the store is down, slow, full or sends invalid replies
        |-- LinkBroken       the connection failed or was closed
        |-- LinkTimeout      an operation passed its deadline
        |-- ProtocolBroken   bytes that are not a valid RESP2 reply
        |   `-- ValueTooLong  a value longer than expected; it was not read
        `-- ServerRefused    an error reply: `code` is its first word (OOM, NOAUTH, ...)

Messages name servers by `Endpoint.label`, which holds no credentials.
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of the tree. The message is one line that a user can act on."""


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

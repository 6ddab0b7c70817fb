"""The router's own exceptions.

StartError      the router cannot start; one line for the user's terminal
ListenError     it cannot listen at its address, which another process may have
RequestFailed   a request ended in an error that a node, or the loss of one, caused
"""

from __future__ import annotations

import errno

from baton_protocol.errors import BatonError, ErrorRecord, InternalError


class StartError(OSError):
    """The router cannot start. The message is one line with the problem and what to do."""


class ListenError(StartError):
    """The router cannot listen at its address. Unlike after other errors, the same start may
    succeed later."""

    def __init__(self, address: str, cause: OSError) -> None:
        port = address.rpartition(":")[2]
        taken = cause.errno == errno.EADDRINUSE and port.isdecimal()
        hint = f"; `baton doctor --port {port}` says which process has it" if taken else ""
        super().__init__(f"cannot listen on {address}: {cause.strerror or cause}{hint}")


class RequestFailed(Exception):
    """A request failed; carries the error record for the client."""

    def __init__(self, error: ErrorRecord) -> None:
        super().__init__(error.message)
        self.error = error


def error_record(error: BatonError | RequestFailed) -> ErrorRecord:
    """The error as its client receives it."""
    return error.record() if isinstance(error, BatonError) else error.error


def router_failed(request_id: str) -> ErrorRecord:
    """The error for a client whose request met a bug of the router, which the caller has logged."""
    return InternalError(
        f"the router failed; its log has the cause under request {request_id}"
    ).record()

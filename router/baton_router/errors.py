"""Failures of the router itself, and how any failure becomes OpenAI's error shape.

StartError      the router cannot start; one line for the user's terminal
RequestFailed   a request ended in an error that a node, or its loss, caused
"""

from __future__ import annotations

from baton_protocol.errors import ErrorRecord


class StartError(OSError):
    """The message is one line that says what is wrong and what to do."""


class RequestFailed(Exception):
    """Carries the record that the client is to see."""

    def __init__(self, error: ErrorRecord) -> None:
        super().__init__(error.message)
        self.error = error

"""Why a node cannot start or go on. The message is one line for the user, the exit code 1.

SetupError       the node cannot start
`-- EngineLost   the engine process has ended; the node ends too
"""

from __future__ import annotations


class SetupError(Exception):
    """The node cannot start. The message names the wrong value and how to correct it."""


class EngineLost(SetupError):
    """The engine process has ended. The message says how."""

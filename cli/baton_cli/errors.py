"""Errors that a command reports to its user.

CommandError        one clear line on stderr, exit 1
`-- UsageError      a flag, a variable or a combination of them is wrong, exit 2
"""

from __future__ import annotations


class CommandError(Exception):
    """The message is one line that names the offending value and what to do."""

    exit_code = 1


class UsageError(CommandError):
    exit_code = 2

"""Finding: one thing that a check has seen, how bad it is, and what to do.

ok        as it should be
note      unusual or slow, and nothing fails for it
warning   something fails later, or for some requests
error     something does not start or serve
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Severity = Literal["ok", "note", "warning", "error"]

# Exit codes of the command. 2 is a wrong flag, as of all commands.
CLEAN, ERRORS, WARNINGS = 0, 1, 3


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`found` has the value, `why` the reason why it matters, `remedy` what to do. `commands` do
    it, one after the other; empty if no command can."""

    check: str
    severity: Severity
    found: str
    why: str = ""
    remedy: str = ""
    commands: tuple[str, ...] = ()


def exit_code(findings: Iterable[Finding]) -> int:
    """The worst finding decides. Notes are no failure."""
    severities = {finding.severity for finding in findings}
    if "error" in severities:
        return ERRORS
    return WARNINGS if "warning" in severities else CLEAN


def of_error(
    check: str, error: Exception, *, why: str, remedy: str = "", severity: Severity = "error"
) -> Finding:
    """A finding with the text of the error that also ends a start. What follows its last semicolon
    is the remedy; `remedy` is for an error that names none."""
    found, _, named = str(error).rpartition("; ")
    return Finding(
        check=check,
        severity=severity,
        found=found or named,
        why=why,
        remedy=named if found else remedy,
    )

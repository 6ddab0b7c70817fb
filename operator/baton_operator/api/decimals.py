"""Decimal numbers of a spec."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from baton_operator.api.cel import CelRule, quoted, ruled

_DECIMAL = r"[0-9]{1,4}(\.[0-9]{1,3})?"
# Strings are allowed because the Kubernetes API conventions advise against floating-point numbers.
Decimal = Annotated[
    int | Annotated[str, Meta(max_length=8)],
    ruled(
        CelRule(
            f"string(self).matches({quoted(f'^{_DECIMAL}$')})",
            'not a decimal; write a number as a text, such as "0.5" or "2"',
        )
    ),
]


def number_cel(path: str) -> str:
    """CEL that converts a Decimal to a number. The Decimal's own rule rejects anything else."""
    return f"double(string(self.{path}))"


def check_decimal(name: str, number: int | str | None) -> None:
    try:
        float(number or 0)
    except ValueError as error:
        raise ValueError(
            f'{name}: {number!r} is not a decimal; write a number as a text, such as "0.5"'
        ) from error

"""Kubernetes' quantities as numbers, in every spelling that the API server takes."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

_QUANTITY = re.compile(
    r"(\+?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?[0-9]{1,2}))?"
)
_UNITS = {"": Decimal(1)}
_UNITS |= {f"{unit}i": Decimal(1 << 10 * power) for power, unit in enumerate("KMGTPE", start=1)}
_UNITS |= {unit: Decimal(10) ** (3 * power) for power, unit in enumerate("kMGTPE", start=1)}
_UNITS |= {unit: Decimal(10) ** (-3 * power) for power, unit in enumerate("mun", start=1)}


def quantity_bytes(quantity: int | str) -> int:
    """Kubernetes' quantity as a number, rounded up; raise ValueError."""
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        raise ValueError(f"{quantity!r} is no quantity; write 1Gi, 512Mi or bytes")
    number, unit, exponent = match.groups()
    value = Decimal(number) * _UNITS[unit or ""] * Decimal(10) ** int(exponent or 0)
    return int(value.to_integral_value(ROUND_CEILING))


def check_quantity(name: str, quantity: int | str) -> None:
    """For a __post_init__."""
    try:
        quantity_bytes(quantity)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error

"""Typed reads of a GGUF file's metadata. Errors name the file, the key and the value."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from baton_text.gguf.header import GgufError, Header, shown

MOST_INTEGER = 2**31 - 1
# The largest finite float32.
MOST_NUMBER = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class Metadata:
    header: Header

    def __contains__(self, key: str) -> bool:
        return key in self.header.metadata

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # of all layers
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(key, value, "one integer, the same for all layers")
        if not least <= value <= MOST_INTEGER:
            raise self.wrong(key, value, f"an integer from {least} to {MOST_INTEGER}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 in the file gives the shortest number that is rounded to it."""
        value = self._get(key, default)
        if isinstance(value, (list, str, bool)) or not 0 < value <= MOST_NUMBER:
            raise self.wrong(key, value, "a positive number that a float32 can hold")
        spelled = (float(f"{value:.{digits}g}") for digits in range(6, 10))
        return next((each for each in spelled if _float32(each) == value), float(value))

    def text(self, key: str) -> str | None:
        value = self.header.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.header.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.wrong(key, value, "an array of strings")
        return value

    def numbers(self, key: str, count: int) -> list[float]:
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != count or isinstance(value[0], str):
            raise self.wrong(key, value, f"an array of {count} numbers")
        return value

    def wrong(self, key: str, value: object, expected: str) -> GgufError:
        return GgufError(f"{self.header.path}: {key} is {shown(value)}; expected {expected}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.header.metadata.get(key, default)
        if value is None:
            raise GgufError(f"{self.header.path} has no {key}")
        return value


def _float32(number: float) -> float:
    [rounded] = struct.unpack("<f", struct.pack("<f", number))
    return float(rounded)

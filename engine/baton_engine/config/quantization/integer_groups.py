"""What the configs of GPTQ, AWQ and auto-round have in common: integers by groups of inputs. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.quantization.scheme import Numbers
from baton_engine.errors import UnsupportedModel

NAMES = "a list of strings, or of lists of strings"


def numbers_of(fields: ConfigFields, method: str, supported: Sequence[int]) -> Numbers:
    bits = fields.integer("bits", most=64)
    if bits not in supported:
        raise UnsupportedModel(
            f"quantization_config: {method} with bits {bits} is not supported; supported: "
            f"{', '.join(map(str, supported))}"
        )
    return "int4" if bits == 4 else "int8"


def group_of(fields: ConfigFields) -> int | None:
    """Inputs per scale; None, which files spell -1, if a scale is for all inputs of an output."""
    size = fields.integer("group_size", least=-1)
    if size == 0:
        raise fields.wrong("group_size", size, "-1 or an integer from 1")
    return None if size == -1 else size


def texts_within(fields: ConfigFields, key: str, value: Any) -> tuple[str, ...]:
    """The strings of a list whose items may be lists of strings; () for None."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise fields.wrong(key, value, NAMES)
    names = [name for item in value for name in (item if isinstance(item, list) else [item])]
    if not all(isinstance(name, str) for name in names):
        raise fields.wrong(key, value, NAMES)
    return tuple(names)

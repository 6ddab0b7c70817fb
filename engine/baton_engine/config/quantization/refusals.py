"""Errors of the values of a quantization_config. No torch."""

from __future__ import annotations

from typing import Any

from baton_engine.config.config_json import shown
from baton_engine.errors import UnsupportedModel

# The place of the values, for errors.
FILE = "config.json, quantization_config"


def refused(method: str, key: str, value: Any, supported: str) -> UnsupportedModel:
    """The error for a value that changes how weights are stored."""
    return UnsupportedModel(
        f"quantization_config: {method} with {key} {shown(value)} is not supported; supported: "
        f"{supported}"
    )

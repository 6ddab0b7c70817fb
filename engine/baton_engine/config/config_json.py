"""Typed reads of config.json and generation_config.json, and parts that all families have. No
torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from baton_engine.errors import ModelError, UnsupportedModel

DTYPES = ("float32", "bfloat16", "float16")
# The two spellings of rope settings.
ROPE_PARTS = ("rope_scaling", "rope_parameters")
# Keys of config.json that cannot change KV.
NO_KV_KEYS = frozenset(
    {
        "_name_or_path",  # where the checkpoint was saved from
        "attention_dropout",  # training only
        "bos_token_id",  # requests have token ids, and no layer treats an id specially
        "eos_token_id",
        "pad_token_id",
        "dtype",  # see NO_KV_FIELDS; transformers 4 spells it torch_dtype
        "torch_dtype",
        "initializer_range",  # training only
        "transformers_version",  # which version wrote the file
        "use_cache",  # whether transformers keeps KV at all
    }
)


class ConfigFields:
    """Typed reads of a JSON object. Errors name a key that is missing or of the wrong type."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(
                f"config.json: {key} is {value!r}; expected an integer of at least {least}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return _positive(key, self._get(key, default))

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._get(key, None)
        if not isinstance(value, list):
            raise ModelError(f"config.json: {key} is {value!r}; expected a list of numbers")
        return tuple(_positive(key, item) for item in value)

    def integers(self, key: str, *, least: int = 1) -> tuple[int, ...]:
        """() if the key is missing."""
        value = self._values.get(key)
        value = [] if value is None else value
        if not isinstance(value, list):
            raise ModelError(f"config.json: {key} is {value!r}; expected a list of integers")
        return tuple(ConfigFields({key: item}).integer(key, least=least) for item in value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {key} is {value!r}; expected true or false")
        return value

    def _get(self, key: str, default: float | None) -> Any:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"config.json has no {key}")
        return value


def _positive(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"config.json: {key} is {value!r}; expected a positive number")
    return float(value)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file does not exist. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__}; expected an object")
    return values


def unread(
    values: Mapping[str, Any], keys: Collection[str], rope_keys: Collection[str]
) -> tuple[tuple[str, str], ...]:
    """The keys of config.json, as canonical JSON, that a family does not read and that may change
    KV. The family reads `keys`, and `rope_keys` inside the rope settings."""
    rest = {key: values[key] for key in values.keys() - keys - NO_KV_KEYS}
    for part in ROPE_PARTS:
        spelled = values.get(part) or {}
        # Both are spellings of the same setting.
        rest |= {f"rope.{key}": spelled[key] for key in spelled.keys() - rope_keys}
    return tuple((key, json.dumps(rest[key], sort_keys=True)) for key in sorted(rest))


def eos_ids(values: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS ids. generation_config.json has precedence, because chat models list their end-of-turn id
    only there."""
    for source in (generation, values):
        named = source.get("eos_token_id")
        if named is not None:
            ids = named if isinstance(named, list) else [named]
            return tuple(int(item) for item in ids)
    return ()


def checkpoint_dtype(values: Mapping[str, Any]) -> str:
    """The checkpoint's dtype. transformers 5 writes `dtype`, transformers 4 wrote `torch_dtype`."""
    named = values.get("dtype") or values.get("torch_dtype") or "float32"
    dtype = str(named).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r} of the checkpoint is not one of {DTYPES}")
    return dtype

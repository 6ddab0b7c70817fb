"""Typed reads of config.json and generation_config.json, and parts that all families have. No
torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from reprlib import Repr
from typing import Any

from baton_engine.errors import ModelError, UnsupportedModel

CONFIG, GENERATION = "config.json", "generation_config.json"
DTYPES = ("float32", "bfloat16", "float16")
# transformers 5 writes the first key, transformers 4 wrote the second.
DTYPE_KEYS = ("dtype", "torch_dtype")
# The largest integer of a config that is read. Sizes are below it, and so are token ids and
# positions, which are int32 in kernels.
MOST_INTEGER = 2**31 - 1
# Layers have entries in tables of their own. The deepest models have some hundred.
MOST_LAYERS = 10_000
# The largest finite float32.
MOST_NUMBER = 3.4028234663852886e38
POSITIVE = "a positive number that a float32 can hold"
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
    """Typed reads of a JSON object. Errors name a key that is missing or has a wrong value. As in
    transformers, null is a wrong value and not a missing one, where a key has a default. `file` is
    the object's file, for errors."""

    def __init__(self, values: Mapping[str, Any], file: str = CONFIG) -> None:
        self._values = values
        self._file = file

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST_INTEGER
    ) -> int:
        value = self._get(key, default)
        if not _is_integer(value) or not least <= value <= most:
            raise self.wrong(key, value, f"an integer from {least} to {most}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not _is_positive(value):
            raise self.wrong(key, value, POSITIVE)
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        values = self._get(key, None)
        if not isinstance(values, list) or not all(map(_is_positive, values)):
            raise self.wrong(key, values, f"a list of which each item is {POSITIVE}")
        return tuple(map(float, values))

    def integers(self, key: str, *, least: int = 1) -> tuple[int, ...]:
        """() if the key is missing."""
        values = self._values.get(key)
        if values is None:
            return ()
        if not isinstance(values, list) or not all(
            _is_integer(each) and least <= each <= MOST_INTEGER for each in values
        ):
            raise self.wrong(key, values, f"a list of integers from {least} to {MOST_INTEGER}")
        return tuple(values)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def texts(self, key: str) -> list[str] | None:
        values = self._values.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            raise self.wrong(key, values, "a list of strings")
        return values

    def part(self, key: str) -> Mapping[str, Any]:
        """The object inside this one; empty if it is missing."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return value or {}

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        """An id or a list of ids; None if the key is missing."""
        value = self._values.get(key)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if not all(_is_integer(each) and 0 <= each <= MOST_INTEGER for each in ids):
            raise self.wrong(key, value, "a token id or a list of token ids")
        return tuple(ids)

    def wrong(self, key: str, value: object, expected: str) -> ModelError:
        return ModelError(f"{self._file}: {key} is {shown(value)}; expected {expected}")

    def _get(self, key: str, default: float | None) -> Any:
        value = self._values.get(key, default)
        if value is None and default is None:
            raise ModelError(f"{self._file} has no {key}")
        return value


def read_head_dim(values: Mapping[str, Any], default: int | None = None) -> int:
    """head_dim. If the family has no default, a head_dim that is missing or null is the hidden size
    divided by the heads."""
    fields = ConfigFields(values)
    if default is None and values.get("head_dim") is None:
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if hidden % heads:
            raise ModelError(
                f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads},"
                " and there is no head_dim"
            )
        return hidden // heads
    return fields.integer("head_dim", default)


def shown(value: object) -> str:
    """The value for an error: on one line, and short also for a long list or text."""
    short = Repr()
    short.maxstring = short.maxother = 60
    return short.repr(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    """False for NaN and infinity, too."""
    number = isinstance(value, float) or _is_integer(value)
    return number and 0 < value <= MOST_NUMBER


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file does not exist. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
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
        spelled = ConfigFields(values).part(part)
        # Both are spellings of the same setting.
        rest |= {f"rope.{key}": spelled[key] for key in spelled.keys() - rope_keys}
    return tuple((key, json.dumps(rest[key], sort_keys=True)) for key in sorted(rest))


def eos_ids(values: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS ids. generation_config.json has precedence, because chat models list their end-of-turn id
    only there."""
    for file, source in ((GENERATION, generation), (CONFIG, values)):
        ids = ConfigFields(source, file).token_ids("eos_token_id")
        if ids is not None:
            return ids
    return ()


def checkpoint_dtype(values: Mapping[str, Any]) -> str:
    for key in DTYPE_KEYS:
        named = ConfigFields(values).text(key)
        if named is not None:
            dtype = named.removeprefix("torch.")
            if dtype not in DTYPES:
                raise UnsupportedModel(
                    f"{key} {shown(named)} is not supported; supported: {', '.join(DTYPES)}"
                )
            return dtype
    return "float32"

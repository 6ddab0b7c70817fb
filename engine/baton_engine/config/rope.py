"""Read the rope settings of a config.json. No torch.

Both spellings are read: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton_engine.config.config_json import ROPE_PARTS, ConfigFields, read_head_dim, shown
from baton_engine.config.model_config import RopeConfig
from baton_engine.errors import ModelError, UnsupportedModel

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
PARTIAL = "partial_rotary_factor"
# Settings that transformers 4 wrote beside `rope_scaling`.
TOP_KEYS = ("rope_theta", PARTIAL)


def rope_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of both spellings in one object; values of `rope_parameters` win. Raises
    UnsupportedModel for settings per type of layer."""
    settings = {key: values[key] for key in TOP_KEYS if values.get(key) is not None}
    for part in ROPE_PARTS:
        settings |= ConfigFields(values).part(part)
    for key, value in settings.items():
        if isinstance(value, dict):
            raise UnsupportedModel(
                f"{key} {shown(value)} inside the rope settings is not supported; only one rope "
                "for all layers"
            )
    return settings


def rope_type(settings: Mapping[str, Any], supported: Sequence[str]) -> str:
    """Raises UnsupportedModel for a type that is not in `supported`."""
    named = [key for key in ("rope_type", "type") if key in settings]
    kind = ConfigFields(settings).text(named[0]) if named else "default"
    if kind not in supported:
        raise UnsupportedModel(
            f"{named[0]} {shown(kind)} of rope is not supported; supported: {', '.join(supported)}"
        )
    return str(kind)


def read_rope(values: Mapping[str, Any]) -> RopeConfig:
    """Rope of a family without partial rotation. Raises UnsupportedModel for a type other than
    ROPE_TYPES."""
    settings = rope_settings(values)
    kind = rope_type(settings, ROPE_TYPES)
    fields = ConfigFields(settings)
    partial = fields.number("partial_rotary_factor", 1.0)
    if partial != 1:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported; only 1")
    theta = fields.number("rope_theta", 10000.0)
    if kind == "default":
        return RopeConfig(type=kind, theta=theta)
    if kind == "linear":
        return RopeConfig(type=kind, theta=theta, factor=fields.number("factor"))
    if kind == "yarn":
        return _read_yarn(settings, values, theta)
    return RopeConfig(
        type=kind,
        theta=theta,
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_positions=fields.integer(
            "original_max_position_embeddings", values.get("max_position_embeddings")
        ),
    )


def _read_yarn(settings: Mapping[str, Any], values: Mapping[str, Any], theta: float) -> RopeConfig:
    """Some models have `original_max_position_embeddings` beside the rope settings, which wins."""
    fields, beside = ConfigFields(settings), ConfigFields(values)
    original = beside.integer(
        "original_max_position_embeddings",
        fields.integer("original_max_position_embeddings", values.get("max_position_embeddings")),
    )
    if "factor" in settings and settings["factor"] is None:
        ratio = beside.integer("max_position_embeddings") / original
        fields = ConfigFields({**settings, "factor": ratio})
    truncate = settings.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelError(f"config.json: truncate is {truncate!r}; expected true or false")
    if theta <= 1:
        raise ModelError(f"config.json: rope_theta is {theta}; yarn needs more than 1")
    return RopeConfig(
        type="yarn",
        theta=theta,
        factor=fields.number("factor"),
        original_max_positions=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=truncate,
        attention_factor=_yarn_attention_factor(settings, fields.number("factor")),
    )


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    """By default it grows with `factor`; with `mscale` and `mscale_all_dim`, it is the quotient of
    what each of these gives."""
    fields = ConfigFields(settings)
    if settings.get("attention_factor") is not None:
        return fields.number("attention_factor")
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        over, under = (fields.number(key) for key in ("mscale", "mscale_all_dim"))
        return yarn_scale(factor, over) / yarn_scale(factor, under)
    return yarn_scale(factor)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """What yarn multiplies q and k by for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_partial_rope(values: Mapping[str, Any], default: float) -> RopeConfig:
    """Rope of a family that rotates only a part of each head, by default this part."""
    partial = ConfigFields(rope_settings(values)).number(PARTIAL, default)
    without = {
        part: {key: value for key, value in (values.get(part) or {}).items() if key != PARTIAL}
        for part in ROPE_PARTS
    }
    rope = replace(read_rope({**values, PARTIAL: None, **without}), partial=partial)
    check_rotary_dim(values, rope)
    return rope


def check_rotary_dim(values: Mapping[str, Any], rope: RopeConfig) -> int:
    """The number of dimensions of a head that are rotated. Raises ModelError unless it is even, at
    least 2 and at most what a head has."""
    rotary_dim = rope.rotary_dim(read_head_dim(values))
    if rope.partial > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"config.json: {PARTIAL} {rope.partial} rotates {rotary_dim} numbers of "
            "each head; expected an even number of at most head_dim"
        )
    return rotary_dim

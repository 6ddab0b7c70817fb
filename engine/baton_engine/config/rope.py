"""Read the rope settings of a config.json. No torch.

Both spellings are read: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton_engine.config.config_json import ROPE_PARTS, ConfigFields
from baton_engine.config.model_config import RopeConfig
from baton_engine.errors import ModelError, UnsupportedModel

ROPE_TYPES = ("default", "linear", "llama3")
PARTIAL = "partial_rotary_factor"


def rope_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of both spellings in one object; values of `rope_parameters` win."""
    settings = {"rope_theta": values.get("rope_theta")}
    for part in ROPE_PARTS:
        settings |= values.get(part) or {}
    return settings


def rope_type(settings: Mapping[str, Any], supported: Sequence[str]) -> str:
    """Raises UnsupportedModel for a type that is not in `supported`."""
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    if kind not in supported:
        raise UnsupportedModel(
            f"rope type {kind!r} is not supported; supported: {', '.join(supported)}"
        )
    return kind


def read_rope(values: Mapping[str, Any]) -> RopeConfig:
    """Rope of a family without partial rotation. Raises UnsupportedModel for a type other than
    ROPE_TYPES."""
    settings = rope_settings(values)
    kind = rope_type(settings, ROPE_TYPES)
    partial = settings.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported; only 1")
    fields = ConfigFields(settings)
    theta = fields.number("rope_theta", 10000.0)
    if kind == "default":
        return RopeConfig(type=kind, theta=theta)
    if kind == "linear":
        return RopeConfig(type=kind, theta=theta, factor=fields.number("factor"))
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


def read_partial_rope(values: Mapping[str, Any], default: float) -> RopeConfig:
    """Rope of a family that rotates only a part of each head, by default this part."""
    given = ConfigFields({PARTIAL: values.get(PARTIAL), **rope_settings(values)})
    partial = given.number(PARTIAL, default)
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
    fields = ConfigFields(values)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    rotary_dim = rope.rotary_dim(fields.integer("head_dim", hidden // heads))
    if rope.partial > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"config.json: {PARTIAL} {rope.partial} rotates {rotary_dim} numbers of "
            "each head; expected an even number of at most head_dim"
        )
    return rotary_dim

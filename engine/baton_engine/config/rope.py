"""Read the rope settings of a config.json. No torch.

Both spellings are read: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton_engine.config.config_json import ROPE_PARTS, ConfigFields, shown
from baton_engine.config.model_config import RopeConfig
from baton_engine.errors import UnsupportedModel

ROPE_TYPES = ("default", "linear", "llama3")
# Settings that transformers 4 wrote beside `rope_scaling`.
TOP_KEYS = ("rope_theta", "partial_rotary_factor")


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

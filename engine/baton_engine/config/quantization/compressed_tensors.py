"""The quantization_config of compressed-tensors, as llm-compressor writes it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_engine.config.config_json import ConfigFields, shown
from baton_engine.config.quantization.patterns import ANY, name_patterns
from baton_engine.config.quantization.scheme import Numbers, QuantizationConfig, WeightScheme
from baton_engine.errors import UnsupportedModel

METHOD = "compressed-tensors"
FILE = "config.json, quantization_config"
# Class of layers, in place of names.
ALL_LINEARS = "Linear"
# (type, num_bits) of weights -> their numbers and, by the name of the format, their layout.
INTEGERS = "int"
SUPPORTED = (
    "int weights of 4 or 8 bits (pack-quantized), int weights of 8 bits with or without int8 "
    "activations (int-quantized)"
)


def read(values: Mapping[str, Any]) -> QuantizationConfig:
    fields = ConfigFields(values, FILE)
    schemes: list[tuple[str, WeightScheme]] = []
    for name, group in fields.part("config_groups").items():
        if not isinstance(group, dict):
            raise fields.wrong("config_groups", {name: group}, "an object of objects")
        group_fields = ConfigFields(group, f"{FILE}, {name}")
        scheme = _scheme(group_fields, group_fields.text("format") or fields.text("format"))
        targets = group_fields.texts("targets") or []
        patterns = [ANY] if ALL_LINEARS in targets else name_patterns(targets, "targets")
        schemes += [(pattern, scheme) for pattern in patterns]
    if not schemes:
        raise fields.wrong("config_groups", values.get("config_groups"), "at least one group")
    ignored = name_patterns(fields.texts("ignore") or [], "ignore")
    # Named targets go before whole classes.
    schemes.sort(key=lambda item: item[0] == ANY)
    return QuantizationConfig(method=METHOD, schemes=tuple(schemes), ignored=ignored)


def _scheme(group: ConfigFields, layout: str | None) -> WeightScheme:
    weights, inputs = group.part("weights"), group.part("input_activations")
    fields = ConfigFields(weights, f"{FILE}, weights")
    kind, bits = fields.text("type") or INTEGERS, fields.integer("num_bits", 8, most=16)
    known: Mapping[tuple[str | None, str, int], Numbers] = {
        ("pack-quantized", INTEGERS, 4): "int4",
        ("pack-quantized", INTEGERS, 8): "int8",
        ("int-quantized", INTEGERS, 8): "int8",
    }
    numbers = known.get((layout, kind, bits))
    if numbers is None:
        raise UnsupportedModel(
            f"quantization_config: {METHOD} with format {shown(layout)} and {kind} weights of "
            f"{bits} bits is not supported; supported: {SUPPORTED}"
        )
    return WeightScheme(
        layout=f"{METHOD} {layout}",
        numbers=numbers,
        outputs=None if fields.text("strategy") == "tensor" else 1,
        inputs=_group_size(fields),
        shifted=not fields.flag("symmetric", True),
        ordered=fields.text("actorder") in ("group", "static") if "actorder" in weights else False,
        activations=_activations(inputs),
        static=bool(inputs) and not ConfigFields(inputs, FILE).flag("dynamic", False),
    )


def _group_size(fields: ConfigFields) -> int | None:
    """Inputs per scale; None if a scale is for all inputs of an output, or for a whole weight."""
    strategy = fields.text("strategy") or "tensor"
    if strategy not in ("tensor", "channel", "group"):
        raise UnsupportedModel(
            f"quantization_config: strategy {shown(strategy)} is not supported; supported: tensor, "
            "channel, group"
        )
    return fields.integer("group_size") if strategy == "group" else None


def _activations(inputs: Mapping[str, Any]) -> Numbers | None:
    if not inputs:
        return None
    fields = ConfigFields(inputs, f"{FILE}, input_activations")
    kind, bits = fields.text("type") or INTEGERS, fields.integer("num_bits", 8, most=16)
    if (kind, bits) != (INTEGERS, 8) or not fields.flag("symmetric", True):
        raise UnsupportedModel(
            f"quantization_config: {kind} activations of {bits} bits are not supported; supported: "
            "symmetric int activations of 8 bits"
        )
    return "int8"

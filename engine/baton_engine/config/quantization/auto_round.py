"""The quantization_config of auto-round. No torch.

The tensors are those of GPTQ or AWQ, as the packing format says. `extra_config` has other values
for some layers, by their names or by regular expressions of parts of names. An export for
compressed-tensors has a config of compressed-tensors instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.quantization import awq, gptq
from baton_engine.config.quantization.integer_groups import texts_within
from baton_engine.config.quantization.patterns import (
    ANY,
    HEAD,
    ROUTERS,
    beginning_patterns,
    regular_expression,
)
from baton_engine.config.quantization.refusals import FILE, refused
from baton_engine.config.quantization.scheme import QuantizationConfig, WeightScheme

METHOD = "auto-round"
# A packing format is one of these words, often with the prefix, and may name a kernel after it.
# word -> checkpoint_format of GPTQ, or AWQ's version. Without a word, zero points are stored as
# they are.
PREFIX = "auto_round"
PACKINGS: Mapping[str, str] = {
    "": "gptq_v2",
    "auto_awq": awq.VERSION,
    "auto_gptq": "gptq",
    "awq": awq.VERSION,
    "exllamav2": "gptq_v2",
    "gptq": "gptq",
    "gptqmodel": "gptq_v2",
    "tritonv2": "gptq_v2",
}
DEFAULT_PACKING = "auto_round:auto_gptq"
# Layers with more bits are plain.
MOST_BITS = 8
PLAIN = 16
# Keys of extra_config with one of these characters are regular expressions.
SPECIAL = frozenset("*+?^$()[]{}|\\")
# The newest of these keys that a config has counts.
BLOCKS = ("block_name_to_quantize", "to_quant_block_names", "quant_block_list")


def read(values: Mapping[str, Any]) -> QuantizationConfig:
    fields = ConfigFields(values, FILE)
    if values.get("rotation_config"):
        raise refused(METHOD, "rotation_config", values["rotation_config"], "null")
    named: dict[str, WeightScheme | None] = {}
    rules: list[tuple[str, WeightScheme | None]] = []
    for name, changes in fields.part("extra_config").items():
        if not isinstance(changes, dict):
            raise fields.wrong("extra_config", {name: changes}, "an object of objects")
        if not changes:
            continue
        scheme = _scheme({**values, **changes}, f"{FILE}, extra_config")
        if SPECIAL.isdisjoint(name):
            named[name] = scheme
        else:
            rules.append((regular_expression(f".*?(?:{name})", "extra_config"), scheme))
    rules += [(HEAD, None), (ROUTERS, None)]
    scheme = _scheme(values, FILE)
    blocks = _blocks(fields, values)
    rules += [(pattern, scheme) for pattern in (beginning_patterns(blocks) or (ANY,))]
    return QuantizationConfig(method=METHOD, schemes=tuple(rules), named=tuple(named.items()))


def _scheme(values: Mapping[str, Any], where: str) -> WeightScheme | None:
    fields = ConfigFields(values, where)
    if fields.integer("bits", most=64) > MOST_BITS:
        return None
    if (kind := fields.text("data_type")) not in (None, "int"):
        raise refused(METHOD, "data_type", kind, "int")
    if values.get("act_bits") is not None and (bits := fields.integer("act_bits")) < PLAIN:
        raise refused(METHOD, "act_bits", bits, f"{PLAIN}, null")
    if not isinstance(values.get("sym"), bool):
        raise fields.wrong("sym", values.get("sym"), "true or false")
    packing = _packing(fields)
    as_written = {
        "bits": values["bits"],
        "group_size": values.get("group_size"),
        "sym": values["sym"],
        "checkpoint_format": packing,
    }
    if packing == awq.VERSION:
        return awq.scheme_of({**as_written, "zero_point": not values["sym"]}, where)
    return gptq.scheme_of(as_written, where)


def _packing(fields: ConfigFields) -> str:
    """The first versions have the packing format under the key `backend`."""
    name = fields.text("packing_format")
    key = "packing_format" if name is not None else "backend"
    name = name if name is not None else fields.text("backend")
    if name in (None, "auto"):
        name = DEFAULT_PACKING
    words = [word for word in str(name).split(":") if word != PREFIX]
    word = words[0] if words else ""
    if word not in PACKINGS:
        spelled = ", ".join(f"{PREFIX}:{each}" if each else PREFIX for each in PACKINGS)
        raise refused(METHOD, key, name, spelled)
    return PACKINGS[word]


def _blocks(fields: ConfigFields, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Beginnings of the names of layers that are quantized; () if all are."""
    for key in BLOCKS:
        value = values.get(key)
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        if value is not None:
            return texts_within(fields, key, value)
    return ()

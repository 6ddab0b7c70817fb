"""The quantization_config of bitsandbytes, as transformers writes it. No torch.

Inputs are not rounded. The method for int8 of the tool itself rounds all but the largest inputs,
which it chooses by all rows of a step; the bits of a row may not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.quantization.patterns import ANY, HEAD, module_patterns
from baton_engine.config.quantization.refusals import FILE, refused
from baton_engine.config.quantization.scheme import QuantizationConfig, WeightScheme
from baton_engine.errors import ModelError

METHOD = "bitsandbytes"
INT8, NF4, DOUBLE = "bitsandbytes int8", "bitsandbytes nf4", "bitsandbytes nf4 double"
# The tool's default on most devices. Other sizes are in tensors of other shapes.
GROUP = 64
IGNORED = "llm_int8_skip_modules"


def read(values: Mapping[str, Any]) -> QuantizationConfig:
    fields = ConfigFields(values, FILE)
    names = fields.texts(IGNORED)
    # With a list, the head is plain only if the list has it.
    names = [HEAD] if names is None else names
    return QuantizationConfig(
        method=METHOD,
        schemes=((ANY, _scheme(fields, values)),),
        ignored=module_patterns(names, IGNORED),
    )


def _scheme(fields: ConfigFields, values: Mapping[str, Any]) -> WeightScheme:
    in_4_bits, in_8_bits = (_flag(fields, key) for key in ("load_in_4bit", "load_in_8bit"))
    if in_4_bits == in_8_bits:
        raise ModelError(
            f"{FILE}: load_in_4bit (or _load_in_4bit) is {in_4_bits}, and load_in_8bit (or "
            f"_load_in_8bit) is {in_8_bits}; expected true for one of them"
        )
    if not in_4_bits:
        if fields.flag("llm_int8_has_fp16_weight", False):
            raise refused(METHOD, "llm_int8_has_fp16_weight", True, "false")
        return WeightScheme(layout=INT8, numbers="int8")
    kind = fields.text("bnb_4bit_quant_type") or "fp4"
    if kind != "nf4":
        raise refused(METHOD, "bnb_4bit_quant_type", kind, "nf4, or load_in_8bit")
    if (storage := fields.text("bnb_4bit_quant_storage")) not in (None, "uint8"):
        raise refused(METHOD, "bnb_4bit_quant_storage", storage, "uint8")
    double = fields.flag("bnb_4bit_use_double_quant", False)
    return WeightScheme(layout=DOUBLE if double else NF4, numbers="nf4", inputs=GROUP)


def _flag(fields: ConfigFields, key: str) -> bool:
    """Of which some versions write the key with an underscore before it."""
    return fields.flag(f"_{key}", False) or fields.flag(key, False)

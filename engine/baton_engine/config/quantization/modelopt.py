"""The quantization_config of ModelOpt. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.quantization.kv_cache import read_kv_cache
from baton_engine.config.quantization.patterns import ANY
from baton_engine.config.quantization.refusals import FILE, refused
from baton_engine.config.quantization.scheme import QuantizationConfig, WeightScheme

METHOD = "modelopt"
FP8 = WeightScheme(
    layout="modelopt fp8", numbers="fp8", outputs=None, activations="fp8", static=True
)
# Inputs are not rounded to 4 bits.
FP4 = WeightScheme(layout="modelopt nvfp4", numbers="fp4", inputs=16)
# quant_algo -> the scheme of all layers.
SCHEMES: Mapping[str | None, WeightScheme] = {"FP8": FP8, "NVFP4": FP4, "W4A16_NVFP4": FP4}
IGNORED = ("ignore", "exclude_modules")


def read(values: Mapping[str, Any]) -> QuantizationConfig:
    fields = ConfigFields(values, FILE)
    algorithm = fields.text("quant_algo")
    if algorithm not in SCHEMES:
        raise refused(METHOD, "quant_algo", algorithm, ", ".join(map(str, SCHEMES)))
    names = [name for key in IGNORED for name in fields.texts(key) or []]
    return QuantizationConfig(
        method=METHOD,
        schemes=((ANY, SCHEMES[algorithm]),),
        ignored=tuple(_pattern(name) for name in names),
        kv_cache=read_kv_cache(values, METHOD),
    )


def _pattern(name: str) -> str:
    """`name` has `*` for any characters, and is a layer's or that of a module around layers."""
    return rf"{ANY.join(re.escape(part) for part in name.split('*'))}(?:[.]{ANY})?"

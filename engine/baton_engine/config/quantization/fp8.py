"""The quantization_config of FP8, as transformers, DeepSeek and AutoFP8 write it. No torch.

A weight has one scale, or one for each block of outputs and inputs. Inputs are rounded to FP8, by
the checkpoint's scale or by one of each row. With scales of blocks, inputs are not rounded: the
products are nearer to those of the plain model then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.quantization.kv_cache import read_kv_cache
from baton_engine.config.quantization.patterns import ANY, HEAD, ROUTERS, module_patterns
from baton_engine.config.quantization.refusals import FILE, refused
from baton_engine.config.quantization.scheme import QuantizationConfig, WeightScheme

METHOD = "fp8"
LAYOUT = "fp8"
FORMATS = ("e4m3", "float8_e4m3fn")
DYNAMIC, STATIC = "dynamic", "static"
# AutoFP8 has the second name.
IGNORED = ("modules_to_not_convert", "ignored_layers")
# Keys that change the model, and the values that do not.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "expert_dtype": (None, "fp8"),
    "modules_to_convert": (None, []),
}


def read(values: Mapping[str, Any]) -> QuantizationConfig:
    fields = ConfigFields(values, FILE)
    for key, harmless in HARMLESS.items():
        if values.get(key) not in harmless:
            raise refused(METHOD, key, values[key], " or ".join(str(each) for each in harmless))
    if (kind := fields.text("fmt")) not in (None, *FORMATS):
        raise refused(METHOD, "fmt", kind, ", ".join(FORMATS))
    scheme = (fields.text("activation_scheme") or DYNAMIC).lower()
    if scheme not in (DYNAMIC, STATIC):
        raise refused(METHOD, "activation_scheme", scheme, f"{DYNAMIC}, {STATIC}")
    outputs, inputs = _block(fields, values)
    if outputs is not None and scheme == STATIC:
        raise refused(METHOD, "activation_scheme", scheme, f"{DYNAMIC} with weight_block_size")
    linears = WeightScheme(
        layout=LAYOUT,
        numbers="fp8",
        outputs=outputs,
        inputs=inputs,
        activations="fp8" if outputs is None else None,
        static=scheme == STATIC,
    )
    return QuantizationConfig(
        method=METHOD,
        schemes=((HEAD, None), (ROUTERS, None), (ANY, linears)),
        ignored=tuple(
            pattern for key in IGNORED for pattern in module_patterns(fields.texts(key) or [], key)
        ),
        kv_cache=read_kv_cache(values, METHOD),
    )


def _block(fields: ConfigFields, values: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The outputs and inputs of a scale; None, None if a weight has one scale."""
    if values.get("weight_block_size") is None:
        return None, None
    sizes = fields.integers("weight_block_size")
    if len(sizes) != 2:
        raise fields.wrong("weight_block_size", values["weight_block_size"], "two integers")
    return sizes[0], sizes[1]

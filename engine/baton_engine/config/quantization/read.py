"""The quantization_config of a config.json: which module reads it, by its quant_method. No torch.

Versions of ModelOpt before 0.35 write it to a file of its own.

In: the content of config.json. Out: a QuantizationConfig; None for plain weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from baton_engine.config.config_json import ConfigFields, shown
from baton_engine.config.quantization.scheme import QuantizationConfig
from baton_engine.errors import UnsupportedModel

KEY = "quantization_config"
# ModelOpt's file beside config.json, and what stands there under this key.
BESIDE, BESIDE_KEY = "hf_quant_config.json", "quantization"
# quant_method -> the function that reads its quantization_config, "module:function".
METHODS: Mapping[str, str] = {
    "auto-round": "baton_engine.config.quantization.auto_round:read",
    "awq": "baton_engine.config.quantization.awq:read",
    "bitsandbytes": "baton_engine.config.quantization.bitsandbytes:read",
    "compressed-tensors": "baton_engine.config.quantization.compressed_tensors:read",
    "fp8": "baton_engine.config.quantization.fp8:read",
    "gptq": "baton_engine.config.quantization.gptq:read",
    "intel/auto-round": "baton_engine.config.quantization.auto_round:read",
    "modelopt": "baton_engine.config.quantization.modelopt:read",
    "mxfp4": "baton_engine.config.quantization.mxfp4:read",
}


def with_file_beside(values: Mapping[str, Any], beside: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of config.json with that of BESIDE, {} without the file, which says nothing that
    a quantization_config does not say. Raises ModelError."""
    if not beside or values.get(KEY):
        return values
    fields = ConfigFields(beside, BESIDE)
    tool = ConfigFields(fields.part("producer"), f"{BESIDE}, producer").text("name")
    if tool not in (None, "modelopt"):
        raise UnsupportedModel(
            f"{BESIDE}: producer {shown(tool)} is not supported; supported: modelopt"
        )
    return {**values, KEY: {**fields.part(BESIDE_KEY), "quant_method": "modelopt"}}


def read_quantization(values: Mapping[str, Any]) -> QuantizationConfig | None:
    """Raises ModelError for an invalid value, and UnsupportedModel for a method or a scheme that is
    not supported."""
    part = ConfigFields(values).part(KEY)
    if not part:
        return None
    method = ConfigFields(part, f"config.json, {KEY}").text("quant_method")
    if method is None or method not in METHODS:
        raise UnsupportedModel(
            f"{KEY}: quant_method {shown(method)} is not supported; supported: "
            f"{', '.join(sorted(METHODS))}"
        )
    module, function = METHODS[method].split(":")
    read: Callable[[Mapping[str, Any]], QuantizationConfig] = getattr(
        import_module(module), function
    )
    return read(part)

"""The quantization_config of MXFP4, as gpt-oss has it: the experts are quantized, and nothing else.
No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.quantization.patterns import module_patterns
from baton_engine.config.quantization.refusals import FILE
from baton_engine.config.quantization.scheme import QuantizationConfig, WeightScheme

METHOD = "mxfp4"
LAYOUT = "mxfp4"
IGNORED = "modules_to_not_convert"
# The name of all experts of a layer.
EXPERTS = r".*[.]experts"
GROUP = 32
SCHEME = WeightScheme(layout=LAYOUT, numbers="fp4", inputs=GROUP)


def read(values: Mapping[str, Any]) -> QuantizationConfig:
    names = ConfigFields(values, FILE).texts(IGNORED) or []
    return QuantizationConfig(
        method=METHOD, schemes=((EXPERTS, SCHEME),), ignored=module_patterns(names, IGNORED)
    )

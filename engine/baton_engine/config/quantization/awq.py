"""The quantization_config of AWQ, as AutoAWQ, transformers and gptqmodel write it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.quantization.integer_groups import group_of, numbers_of
from baton_engine.config.quantization.patterns import ANY, HEAD, ROUTERS, part_patterns
from baton_engine.config.quantization.refusals import FILE, refused
from baton_engine.config.quantization.scheme import QuantizationConfig, WeightScheme

METHOD = "awq"
BITS = (4,)
LAYOUT = "awq gemm"
VERSION = "gemm"
# Backends are names of kernels, but this one has a packing of its own.
LLM_AWQ = "llm-awq"
# AutoAWQ has other names of keys in its own file.
OTHER_NAMES: Mapping[str, str] = {"w_bit": "bits", "q_group_size": "group_size"}


def read(values: Mapping[str, Any]) -> QuantizationConfig:
    values = {**{OTHER_NAMES.get(key, key): value for key, value in values.items()}, **values}
    fields = ConfigFields(values, FILE)
    ignored = part_patterns(fields.texts("modules_to_not_convert") or [])
    scheme = scheme_of(values, FILE)
    head = (HEAD, scheme if fields.flag("lm_head", False) else None)
    return QuantizationConfig(
        method=METHOD, schemes=(head, (ROUTERS, None), (ANY, scheme)), ignored=ignored
    )


def scheme_of(values: Mapping[str, Any], where: str) -> WeightScheme:
    """`where` is the place of the values, for errors."""
    fields = ConfigFields(values, where)
    for key in ("version", "format", "checkpoint_format"):
        version = fields.text(key)
        if version is not None and version.lower() != VERSION:
            raise refused(METHOD, key, version, VERSION)
    if fields.text("backend") == LLM_AWQ:
        raise refused(METHOD, "backend", LLM_AWQ, "autoawq")
    return WeightScheme(
        layout=LAYOUT,
        numbers=numbers_of(fields, METHOD, BITS),
        inputs=group_of(fields),
        shifted=fields.flag("zero_point", True),
    )

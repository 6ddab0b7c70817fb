"""The quantization_config of GPTQ, as AutoGPTQ, optimum and gptqmodel write it. No torch.

gptqmodel's `dynamic` has regular expressions of layer names. The first that matches the beginning
of a name applies: with the prefix `-:` the layer is not quantized, else with other values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.quantization.integer_groups import group_of, numbers_of, texts_within
from baton_engine.config.quantization.patterns import (
    ANY,
    HEAD,
    ROUTERS,
    ending_patterns,
    regular_expression,
)
from baton_engine.config.quantization.refusals import FILE, refused
from baton_engine.config.quantization.scheme import QuantizationConfig, WeightScheme
from baton_engine.errors import ModelError

METHOD = "gptq"
BITS = (4, 8)
# Values of checkpoint_format, which are names of layouts: the zero points of the first are stored
# minus one.
FORMATS = ("gptq", "gptq_v2")
IN_BLOCKS = "modules_in_block_to_quantize"
LEAVE, CHANGE = "-:", "+:"


def read(values: Mapping[str, Any]) -> QuantizationConfig:
    fields = ConfigFields(values, FILE)
    scheme = scheme_of(values, FILE)
    rules = list(_dynamic(fields, values))
    if fields.flag("lm_head", False):
        rules.append((HEAD, scheme))
    names = texts_within(fields, IN_BLOCKS, values.get(IN_BLOCKS))
    if names:
        rules += [(pattern, scheme) for pattern in ending_patterns(names)]
    else:
        rules += [(HEAD, None), (ROUTERS, None), (ANY, scheme)]
    return QuantizationConfig(method=METHOD, schemes=tuple(rules))


def scheme_of(values: Mapping[str, Any], where: str) -> WeightScheme:
    """`where` is the place of the values, for errors."""
    fields = ConfigFields(values, where)
    layout = _layout(fields)
    if fields.flag("is_marlin_format", False):
        raise refused(METHOD, "is_marlin_format", True, "false")
    if (word := fields.text("pack_dtype")) not in (None, "int32", "torch.int32"):
        raise refused(METHOD, "pack_dtype", word, "int32")
    for key in ("rotation", "adapter"):
        if values.get(key):
            raise refused(METHOD, key, values[key], "null")
    return WeightScheme(
        layout=layout,
        numbers=numbers_of(fields, METHOD, BITS),
        inputs=group_of(fields),
        shifted=not fields.flag("sym", True),
        ordered=fields.flag("desc_act", False),
    )


def _layout(fields: ConfigFields) -> str:
    """gptqmodel writes both keys, and others one or none."""
    formats = {}
    for key in ("checkpoint_format", "format"):
        name = fields.text(key)
        if name is not None:
            if name.lower() not in FORMATS:
                raise refused(METHOD, key, name, ", ".join(FORMATS))
            formats[name.lower()] = key
    if len(formats) > 1:
        raise ModelError(
            f"{FILE}: checkpoint_format and format differ; expected one of {', '.join(FORMATS)}"
        )
    return next(iter(formats), FORMATS[0])


def _dynamic(
    fields: ConfigFields, values: Mapping[str, Any]
) -> Iterator[tuple[str, WeightScheme | None]]:
    for name, changes in fields.part("dynamic").items():
        if not isinstance(changes, dict):
            raise fields.wrong("dynamic", {name: changes}, "an object of objects")
        bare = name.removeprefix(LEAVE).removeprefix(CHANGE)
        pattern = regular_expression(bare, "dynamic")
        if name.startswith(LEAVE):
            yield pattern, None
        else:
            yield pattern, scheme_of({**values, **changes}, f"{FILE}, dynamic")

"""The quantization_config of compressed-tensors, as llm-compressor writes it. No torch.

A group of layers has targets: names, regular expressions of the beginning of names, or classes of
modules, in this order of precedence. Each layer's format is that of its group, or else that of the
whole config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from baton_engine.config.config_json import ConfigFields, shown
from baton_engine.config.quantization.kv_cache import read_kv_cache
from baton_engine.config.quantization.patterns import ANY, REGEX, name_patterns
from baton_engine.config.quantization.refusals import FILE
from baton_engine.config.quantization.scheme import Numbers, QuantizationConfig, WeightScheme
from baton_engine.errors import UnsupportedModel

METHOD = "compressed-tensors"
# Class of layers, in place of names.
ALL_LINEARS = "Linear"
INTEGERS, FLOATS = "int", "float"
PACKED, PLAIN_INTEGERS, PLAIN_FLOATS = "pack-quantized", "int-quantized", "float-quantized"
# The format and type of weights with the tensors of another format.
SAME_FORMAT: Mapping[tuple[str | None, str], str] = {
    ("naive-quantized", INTEGERS): PLAIN_INTEGERS,
    ("naive-quantized", FLOATS): PLAIN_FLOATS,
}
# (format, type, num_bits) of weights -> their numbers in memory.
KNOWN: Mapping[tuple[str | None, str, int], Numbers] = {
    (PACKED, INTEGERS, 4): "int4",
    (PACKED, INTEGERS, 8): "int8",
    (PLAIN_INTEGERS, INTEGERS, 4): "int8",
    (PLAIN_INTEGERS, INTEGERS, 8): "int8",
    (PLAIN_FLOATS, FLOATS, 8): "fp8",
    ("mxfp4-pack-quantized", FLOATS, 4): "fp4",
    ("nvfp4-pack-quantized", FLOATS, 4): "fp4",
}
SUPPORTED = (
    "int weights of 4 or 8 bits in pack-quantized, int-quantized or naive-quantized, with or "
    "without int8 activations; float weights of 8 bits in float-quantized or "
    "naive-quantized, or of 4 bits in nvfp4-pack-quantized or mxfp4-pack-quantized"
)
# Numbers of weights -> the type of activations that go with them, and the numbers of these.
ACTIVATIONS: Mapping[Numbers, tuple[str, Numbers]] = {
    "int4": (INTEGERS, "int8"),
    "int8": (INTEGERS, "int8"),
    "fp8": (FLOATS, "fp8"),
}
STRATEGIES: Mapping[Numbers, tuple[str, ...]] = {
    "int4": ("tensor", "channel", "group"),
    "int8": ("tensor", "channel", "group"),
    "fp8": ("tensor", "channel", "group", "block"),
    "fp4": ("group", "tensor_group"),
}
# Keys that change the model, and the values that do not.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "sparsity_config": (None, {}),
    "moe_sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
# Values of quantization_status of files whose weights are quantized.
STATUSES = ("compressed", "frozen")
ORDERED = ("group", "dynamic")
ORDERS = (*ORDERED, "weight", "static")


def read(values: Mapping[str, Any]) -> QuantizationConfig:
    fields = ConfigFields(values, FILE)
    _check(fields, values)
    targets = [
        (target, scheme)
        for name, group in fields.part("config_groups").items()
        for target, scheme in _targets(fields, name, group)
    ]
    kv_cache = read_kv_cache(values, METHOD)
    if not targets and kv_cache == "auto":
        raise fields.wrong("config_groups", values.get("config_groups"), "at least one group")
    names = fields.texts("ignore") or []
    ignored = name_patterns([name for name in names if name.startswith(REGEX)], "ignore")
    named: dict[str, WeightScheme | None] = dict.fromkeys(
        name for name in names if not name.startswith(REGEX)
    )
    expressions: list[tuple[str, WeightScheme]] = []
    classes: list[tuple[str, WeightScheme]] = []
    for target, scheme in targets:
        if target == ALL_LINEARS:
            classes.append((ANY, scheme))
        elif target.startswith(REGEX):
            expressions.append((target, scheme))
        else:
            is_ignored = any(re.fullmatch(pattern, target) for pattern in ignored)
            named.setdefault(target, None if is_ignored else scheme)
    # The tool tries them in this order, whatever their order in the file.
    expressions.sort(key=lambda item: item[0])
    patterns = name_patterns([target for target, _ in expressions], "targets")
    schemes = zip(patterns, (scheme for _, scheme in expressions), strict=True)
    return QuantizationConfig(
        method=METHOD,
        schemes=(*schemes, *classes),
        ignored=ignored,
        named=tuple(named.items()),
        kv_cache=kv_cache,
    )


def _check(fields: ConfigFields, values: Mapping[str, Any]) -> None:
    for key, harmless in HARMLESS.items():
        value = values.get(key)
        if value not in harmless and not (key == "sparsity_config" and _dense(value)):
            raise UnsupportedModel(
                f"quantization_config: {METHOD} with {key} {shown(value)} is not supported; "
                "supported: null"
            )
    status = fields.text("quantization_status")
    if status is not None and status not in STATUSES:
        raise UnsupportedModel(
            f"quantization_config: {METHOD} with quantization_status {shown(status)} is not "
            f"supported; supported: {', '.join(STATUSES)}"
        )


def _dense(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") == "dense"


def _targets(fields: ConfigFields, name: str, group: Any) -> Iterator[tuple[str, WeightScheme]]:
    if not isinstance(group, dict):
        raise fields.wrong("config_groups", {name: group}, "an object of objects")
    inner = ConfigFields(group, f"{FILE}, config_groups, {name}")
    scheme = _scheme(inner, group, inner.text("format") or fields.text("format"))
    for target in inner.texts("targets") or []:
        yield target, scheme


def _scheme(group: ConfigFields, values: Mapping[str, Any], layout: str | None) -> WeightScheme:
    weights, inputs = group.part("weights"), group.part("input_activations")
    if not weights:
        raise group.wrong("weights", values.get("weights"), "an object")
    if group.part("output_activations"):
        raise UnsupportedModel(
            f"quantization_config: {METHOD} with output_activations is not supported; supported: "
            "null"
        )
    fields = ConfigFields(weights, f"{FILE}, weights")
    kind, bits = fields.text("type") or INTEGERS, fields.integer("num_bits", 8, most=16)
    layout = SAME_FORMAT.get((layout, kind), layout)
    numbers = KNOWN.get((layout, kind, bits))
    if numbers is None:
        raise UnsupportedModel(
            f"quantization_config: {METHOD} with format {shown(layout)}, type {shown(kind)} and "
            f"num_bits {bits} of weights is not supported; supported: {SUPPORTED}"
        )
    strategy, (rows, columns) = _strategy(fields, weights, numbers)
    symmetric = fields.flag("symmetric", True)
    if not symmetric and ((layout == PACKED and strategy == "tensor") or kind == FLOATS):
        raise UnsupportedModel(
            f"quantization_config: {METHOD} with format {layout}, strategy {strategy} and "
            "symmetric false is not supported; supported: symmetric true, or strategy channel or "
            "group of integers"
        )
    activations = None
    # Inputs by groups are not rounded, which the tools do with blocks and with 4 bits.
    if strategy != "block" and numbers != "fp4":
        activations = _activations(inputs, numbers)
    return WeightScheme(
        layout=f"{METHOD} {layout}",
        numbers=numbers,
        outputs=rows,
        inputs=columns,
        shifted=not symmetric,
        ordered=_ordered(fields, weights),
        activations=activations,
        static=activations is not None and not inputs.get("dynamic", False),
    )


def _strategy(
    fields: ConfigFields, weights: Mapping[str, Any], numbers: Numbers
) -> tuple[str, tuple[int | None, int | None]]:
    """The strategy, and the outputs and inputs of a scale (see WeightScheme). Without a strategy,
    the group size says which it is."""
    size = None
    if weights.get("group_size") is not None:
        size = fields.integer("group_size", least=-1)
    strategy = fields.text("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    supported = STRATEGIES[numbers]
    if strategy not in supported:
        raise UnsupportedModel(
            f"quantization_config: {METHOD} with {numbers} and strategy {shown(strategy)} is not "
            f"supported; supported: {', '.join(supported)}"
        )
    if strategy == "block":
        sizes = fields.integers("block_structure")
        if len(sizes) != 2:
            shape = weights.get("block_structure")
            raise fields.wrong("block_structure", shape, "a list of two integers")
        return strategy, (sizes[0], sizes[1])
    if strategy == "tensor":
        return strategy, (None, None)
    return strategy, (1, None if strategy == "channel" else fields.integer("group_size"))


def _ordered(fields: ConfigFields, weights: Mapping[str, Any]) -> bool:
    """Whether inputs are in groups by an order of their own. With actorder "weight", only the tool
    used the order."""
    value = weights.get("actorder")
    if value is None or isinstance(value, bool):
        return bool(value)
    if value not in ORDERS:
        raise fields.wrong("actorder", value, f"one of {', '.join(ORDERS)}, or null")
    return value in ORDERED


def _activations(inputs: Mapping[str, Any], numbers: Numbers) -> Numbers | None:
    if not inputs:
        return None
    supported, rounded = ACTIVATIONS[numbers]
    fields = ConfigFields(inputs, f"{FILE}, input_activations")
    kind, bits = fields.text("type") or INTEGERS, fields.integer("num_bits", 8, most=16)
    dynamic = fields.flag("dynamic", False)
    strategy = fields.text("strategy") or "tensor"
    symmetric = fields.flag("symmetric", True)
    found = (kind, bits, symmetric, strategy)
    if found != (supported, 8, True, "token" if dynamic else "tensor"):
        raise UnsupportedModel(
            f"quantization_config: input_activations with type {shown(kind)}, num_bits {bits}, "
            f"symmetric {str(symmetric).lower()}, strategy {shown(strategy)} and dynamic "
            f"{str(dynamic).lower()} are not supported; supported: symmetric {supported} of 8 "
            "bits, by token with dynamic true, by tensor with dynamic false"
        )
    return rounded

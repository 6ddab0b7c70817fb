"""The least time of a decode step, from the bytes it must read and the products it must compute.

In: a model's config, the layout of its KV, the bytes of a weight, the rows of the step and their
KV, and the speeds of a machine. Out: bytes, operations and seconds. A bench compares a measured
step with them.

A step reads all weights of its products once, whatever its number of rows, and each row reads its
own KV. So the time per step is almost constant until the products take longer than the read: that
is the number of rows in balance_rows(). Not counted: activations, logits, attention's products, and
what sequences share, whose KV a kernel may read once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_engine.config.linear_shapes import LinearShape
from baton_engine.config.model_config import ModelConfig
from baton_engine.memory.estimate import (
    count_weights,
    counts_of,
    embedding_bytes,
    head_bytes,
    quantized_part,
)
from baton_protocol.layout import KVLayout

OPERATIONS = 2  # per weight and token: a product and a sum


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes that a machine reads per second, and operations that it computes per second; None if
    that is unknown."""

    bytes_per_s: float
    operations_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """The experts of all layers: their bytes and weights, and the share that a token chooses."""

    size: int = 0
    weights: int = 0
    chosen: float = 1.0

    def unread(self, rows: int) -> float:
        """The share that none of `rows` tokens chooses, if each chooses evenly."""
        return (1 - self.chosen) ** rows


@dataclass(frozen=True, slots=True)
class DecodeRoofline:
    """What a decode step of a model reads and computes: the bytes and number of its weights, and
    the layout of its KV."""

    weight_bytes: int
    weights: int
    layout: KVLayout
    experts: ExpertShare = ExpertShare()

    @classmethod
    def of(cls, config: ModelConfig, layout: KVLayout, item: int) -> DecodeRoofline:
        """Of a model whose plain weights have `item` bytes. The embedding is not read, except as
        the head that is tied to it."""
        numbers, size = quantized_part(config)
        weights = count_weights(config)
        read = (weights - numbers) * item + size - embedding_bytes(config, item)
        if config.tied:
            read += head_bytes(config, item)
        else:
            weights -= config.vocab_size * config.hidden_size
        return cls(read, weights, layout, _experts(config, item))

    def weights_read(self, rows: int) -> float:
        """Bytes of the weights that a step of `rows` tokens reads. Of experts, it reads those that
        some token chooses."""
        return self.weight_bytes - self.experts.size * self.experts.unread(rows)

    def kv_read(self, keys: int) -> int:
        """Bytes of KV that a row reads whose sequence has `keys` tokens."""
        return kv_read(self.layout, [keys])

    def operations(self, rows: int) -> float:
        """Operations of a step's products with weights."""
        idle = self.experts.weights * (1 - self.experts.chosen)
        return OPERATIONS * rows * (self.weights - idle)

    def byte_seconds(self, machine: Machine, rows: int, kv_bytes: float) -> float:
        """The time to read the step's bytes; `kv_bytes` is the sum of kv_read() over its rows."""
        return (self.weights_read(rows) + kv_bytes) / machine.bytes_per_s

    def seconds(self, machine: Machine, rows: int, kv_bytes: float) -> float:
        """The least time of a step: of its bytes or of its operations, whichever is more."""
        read = self.byte_seconds(machine, rows, kv_bytes)
        if machine.operations_per_s is None:
            return read
        return max(read, self.operations(rows) / machine.operations_per_s)

    def balance_rows(self, machine: Machine) -> float | None:
        """The number of rows at which the products take as long as the read of the weights, KV not
        counted and all experts read; None if the speed of products is unknown."""
        if machine.operations_per_s is None:
            return None
        read = self.weight_bytes / machine.bytes_per_s
        return read * machine.operations_per_s / self.operations(1)


def kv_read(layout: KVLayout, lengths: Sequence[int]) -> int:
    """Bytes of KV that decoding sequences of these lengths read, in layers with a window as far as
    they see."""
    size, keys = 0, sum(lengths)
    for group, fields in zip(layout.kv_groups, layout.group_fields, strict=True):
        window, seen = group.window, keys
        if window is not None:
            seen = sum(min(length, window) for length in lengths)
        size += seen * len(group.layers) * sum(field.token_bytes for field in fields)
    return size


def _experts(config: ModelConfig, item: int) -> ExpertShare:
    if config.experts is None or config.bridge is not None:
        return ExpertShare()
    linears = counts_of(config).linears
    shapes = [
        shape
        for layer in range(config.num_layers)
        for shape in linears(config, layer)
        if shape.count > 1
    ]
    return ExpertShare(
        size=sum(_linear_bytes(config, shape, item) for shape in shapes),
        weights=sum(shape.count * shape.outputs * shape.inputs for shape in shapes),
        chosen=config.experts.top_k / config.experts.num_experts,
    )


def _linear_bytes(config: ModelConfig, shape: LinearShape, item: int) -> int:
    quantization = config.quantization
    scheme = None if quantization is None else quantization.scheme_of(shape.name)
    if scheme is None:
        return shape.count * shape.outputs * shape.inputs * item
    return shape.count * scheme.weight_bytes(shape.outputs, shape.inputs)

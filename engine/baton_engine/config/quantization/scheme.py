"""How the weights of a model are quantized: a scheme for each linear layer. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from baton_protocol.policies import KVCacheDType

# What the codes of a weight mean. int4 and int8 are signed integers; fp8 is E4M3, fp4 is E2M1, and
# nf4 has the 16 quantiles of a normal distribution that bitsandbytes uses.
Numbers = Literal["int4", "int8", "fp8", "fp4", "nf4"]
BITS: Mapping[Numbers, int] = {"int4": 4, "int8": 8, "fp8": 8, "fp4": 4, "nf4": 4}
SCALE_BYTES = 4
ORDER_BYTES = 8  # per input


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """How the weight of a linear layer is quantized.

    `layout` says how the checkpoint names and packs its tensors (see
    `layers.quantization.weight_format`). A scale belongs to `outputs` x `inputs` numbers of the
    weight; None means all outputs or all inputs. With `shifted`, such a group has a zero point or a
    minimum, too. With `ordered`, the checkpoint may say for each input to which group it belongs.
    `activations` are the numbers to which a layer's inputs are rounded, by a scale per row, or by
    the checkpoint's one scale with `static`.
    """

    layout: str
    numbers: Numbers
    outputs: int | None = 1
    inputs: int | None = None
    shifted: bool = False
    ordered: bool = False
    activations: Numbers | None = None
    static: bool = False

    def group(self, inputs: int) -> int:
        """Inputs per scale of a layer with this number of inputs."""
        return min(self.inputs or inputs, inputs)

    def weight_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a layer's weight in memory: codes, and a float32 scale, and perhaps a shift, for
        each group of inputs of each output."""
        codes = -(-inputs * BITS[self.numbers] // 8)
        groups = -(-inputs // self.group(inputs))
        order = ORDER_BYTES * inputs if self.ordered else 0
        return outputs * (codes + groups * SCALE_BYTES * (1 + self.shifted)) + order


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """The scheme of each linear layer of a model; None where its weight is not quantized. A layer's
    name is that of its checkpoint tensors without the last part. It may be among `named`. If it is
    not, and no regular expression of `ignored` matches the whole name, the first of `schemes` that
    matches applies. Embeddings have a scheme of their own, and so does the head that is tied to
    them; with `tied_head`, that head multiplies a quantized copy of a plain embedding. `kv_cache`
    is what --kv-cache-dtype auto stands for. `method` is the name for users."""

    method: str
    schemes: tuple[tuple[str, WeightScheme | None], ...]
    ignored: tuple[str, ...] = ()
    named: tuple[tuple[str, WeightScheme | None], ...] = ()
    embedding: WeightScheme | None = None
    kv_cache: KVCacheDType = "auto"
    tied_head: WeightScheme | None = None
    # Checkpoints may name thousands of layers.
    _by_name: Mapping[str, WeightScheme | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", dict(self.named))

    def scheme_of(self, name: str) -> WeightScheme | None:
        """The scheme of a layer; None if its weight is not quantized."""
        if name in self._by_name:
            return self._by_name[name]
        if any(_compiled(pattern).fullmatch(name) for pattern in self.ignored):
            return None
        matching = (each for pattern, each in self.schemes if _compiled(pattern).fullmatch(name))
        return next(matching, None)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)

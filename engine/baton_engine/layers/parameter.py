"""Parameters: each layer declares the checkpoint names of its weights and gets its tensors here.

Projections with the same input are stacked into one matrix, because one large product is faster
than three small ones. The checkpoint may have a tensor for each of them, which fills some rows of
the matrix, or one tensor for all. The loader loads every parameter, and treats a checkpoint name
without a parameter as an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from baton_engine.attention.exact.row_rule import Product, RowRule, row_rule, with_rule
from baton_engine.config.quantization.scheme import QuantizationConfig, WeightScheme
from baton_engine.layers.linear_method import LinearMethod, MethodOf, packed_methods
from baton_engine.layers.ops import TORCH_OPS, Ops
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight, Weight, dequantized
from baton_engine.memory.huge_pages import ask_for_huge_pages


@dataclass(frozen=True, slots=True)
class Parameter:
    """Where a tensor of the checkpoint goes: `place` is a tensor of the model, or a view of it.
    `offset` is added to the loaded values. `whole` is the shape of the checkpoint's tensor if the
    place divides its last dimension into several. The place of an `optional` tensor has its default
    where the checkpoint lacks it. One that may be `shorter` fills the beginning of its place, and
    zeros the rest. `usual` is what dummy weights have there, if random numbers are not usual."""

    place: torch.Tensor
    offset: float = 0.0
    whole: tuple[int, ...] | None = None
    optional: bool = False
    shorter: bool = False
    usual: float | torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        return tuple(self.place.shape) if self.whole is None else self.whole

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which the checkpoint's tensor is converted."""
        return self.place.dtype

    @property
    def stored(self) -> tuple[str, ...]:
        """The dtypes that the checkpoint's tensor may have, if `dtype` does not say it."""
        return ()

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the checkpoint's tensor may have this shape. A single number may have any number
        of dimensions."""
        if self.shorter:
            return len(shape) == 1 and shape[0] <= self.shape[0]
        return tuple(shape) == self.shape or math.prod(shape) == math.prod(self.shape) == 1

    def load(self, tensor: torch.Tensor) -> None:
        """Convert a tensor of any dtype on any device, and store it."""
        if self.shorter:
            self.place.zero_()[: len(tensor)].copy_(tensor)
            return
        self.place.copy_(tensor.view(self.place.shape))
        if self.offset:
            self.place.add_(self.offset)


class WeightSlots:
    """Allocates a model's tensors on one device, and has the Parameter of each checkpoint name.
    Tensors are of `dtype`, unless a layer needs another. `ops` are the operations that the model
    uses on that device, and `method_of` gives each layer's linear method."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops = TORCH_OPS,
        *,
        method_of: MethodOf = packed_methods,
        exact_rows: int | None = None,
        quantization: QuantizationConfig | None = None,
    ) -> None:
        """`exact_rows` is the number of rows of the largest step, if products are to be tested and
        made exact (see product()). `quantization` says which weights are quantized."""
        self.dtype = dtype
        self._quantization = quantization
        self._exact_rows = exact_rows
        self.device = device
        self.ops = ops
        self._method_of = method_of
        self.parameters: dict[str, Parameter] = {}
        # What tests found about products, by method, the weight's shape, its dtype or kind, and
        # whether there is a bias.
        self.row_rules: dict[tuple[LinearMethod, tuple[int, ...], object, bool], RowRule] = {}
        self._then: list[Callable[[], None]] = []
        self._spellings: list[tuple[Collection[str], Mapping[str, Parameter]]] = []

    def scheme_of(self, name: str) -> WeightScheme | None:
        """How the weight of the layer `name` is quantized; None if it is not."""
        return None if self._quantization is None else self._quantization.scheme_of(name)

    @property
    def embedding_scheme(self) -> WeightScheme | None:
        """How the embedding is quantized; None if it is not."""
        return None if self._quantization is None else self._quantization.embedding

    @property
    def tied_head_scheme(self) -> WeightScheme | None:
        """How the copy of a plain embedding is quantized that a tied head multiplies; None if it is
        not."""
        return None if self._quantization is None else self._quantization.tied_head

    def tensor(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype | None = None,
        offset: float = 0.0,
        default: float | None = None,
        usual: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A tensor of the given shape that one checkpoint entry fills, or the number `default` if
        there is no such entry."""
        whole = self._allocated(*shape, dtype=dtype)
        if default is not None:
            whole.fill_(default)
        self.declare(name, Parameter(whole, offset, optional=default is not None, usual=usual))
        return whole

    def octets(self, name: str, most: int, usual: bytes) -> torch.Tensor:
        """The bytes of one checkpoint entry, uint8 [most], with zeros after the last."""
        place = torch.zeros(most, dtype=torch.uint8, device=self.device)
        content = torch.tensor(list(usual.ljust(most, b"\0")), dtype=torch.uint8)
        self.declare(name, Parameter(place, shorter=True, usual=content))
        return place

    def stacked(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        *tail: int,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A tensor [sum(rows), *tail] whose consecutive row ranges are filled by `names`."""
        whole = self._allocated(sum(rows), *tail, dtype=dtype)
        begin = 0
        for name, count in zip(names, rows, strict=True):
            self.declare(name, Parameter(whole[begin : begin + count]))
            begin += count
        return whole

    def also_spelled(self, names: Collection[str], whole: Mapping[str, Parameter]) -> None:
        """A checkpoint may have the tensors `whole`, by name, instead of those of `names`."""
        self._spellings.append((names, whole))

    def use_spelling(self, found: Collection[str]) -> None:
        """Expect the tensors that a checkpoint with the names `found` has (see also_spelled())."""
        for names, whole in self._spellings:
            if not whole.keys().isdisjoint(found):
                for name in names:
                    del self.parameters[name]
                for name, parameter in whole.items():
                    self.declare(name, parameter)

    def declare(self, name: str, parameter: Parameter) -> None:
        """Declare where the checkpoint entry `name` goes."""
        if name in self.parameters:
            raise AssertionError(f"parameter {name} declared twice")
        self.parameters[name] = parameter

    def empty(self, *shape: int) -> torch.Tensor:
        """A tensor whose views fill() declares."""
        return self._allocated(*shape)

    def _allocated(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)
        if self.device.type == "cpu":
            ask_for_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def fill(
        self,
        name: str,
        place: torch.Tensor,
        whole: tuple[int, ...] | None = None,
        usual: float | None = None,
    ) -> None:
        """Declare that one checkpoint entry fills a view of a tensor; see Parameter."""
        self.declare(name, Parameter(place, whole=whole, usual=usual))

    def product(
        self,
        name: str,
        weight_OI: Weight,
        bias_O: torch.Tensor | None = None,
        method: LinearMethod | None = None,
    ) -> Product:
        """The product of the layer `name`. A row has the same bits for any number of rows, if that
        is wanted and possible (see `row_rule`). Products of equal shapes are tested once. The
        weight of the method HEADS is [N, O, I], without a bias."""
        method = self._method_of(name, weight_OI) if method is None else method
        product = method.product(weight_OI, bias_O)
        if self._exact_rows is None:
            return product
        # Nodes with smaller steps must choose the same rule: 256 rows are always tested.
        most = max(256, self._exact_rows)
        some = [count for count in method.counts if count <= most]
        kind = weight_OI.kind if isinstance(weight_OI, QuantizedWeight) else weight_OI.dtype
        key = (method, tuple(weight_OI.shape), kind, bias_O is not None)
        if key not in self.row_rules:
            self.row_rules[key] = row_rule(product, as_dense(weight_OI, self.dtype), bias_O, some)
        rule = self.row_rules[key]
        if method.any_rows and len(rule.counts) == len(some):
            return product
        return with_rule(product, rule)

    @property
    def bits(self) -> str:
        """Identifies the bits of the tested products; "" unless all give a row the same bits for
        any number of rows."""
        rules = self.row_rules.values()
        if not all(rule.counts for rule in rules):
            return ""
        return "-".join(rule.digest[:8] for rule in rules)

    def when_filled(self, act: Callable[[], None]) -> None:
        """Register a callback for finish(), for what a layer derives from its weights."""
        self._then.append(act)

    def finish(self) -> None:
        """Call the registered callbacks; all parameters must be loaded. The parameters are dropped
        first. A layer that replaces its weight then frees it at once, and loading never needs the
        model's memory twice."""
        self.parameters.clear()
        self._spellings.clear()
        acts, self._then = self._then, []
        for act in acts:
            act()


def as_dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight's numbers; those of a quantized weight in `dtype`."""
    return dequantized(weight, dtype) if isinstance(weight, QuantizedWeight) else weight

"""Products of linear layers, plain or with a weight packed for this CPU, and the product of the
head, which is float32 for weights of any dtype.

Our own kernel computes the product on CPUs where it is faster than a library (see
multiplies_by_kernel()). Elsewhere oneDNN does. It reorders a weight into blocks for each product,
unless the weight is already packed. Packing once makes a decode step of 4-16 rows 15-40 % faster,
and a prefill step 10 % (fp32 and bf16, AVX-512, 2 threads). torch offers packing only under private
names. They are looked up only here, and without them the plain product is used.

Logits need float32, because small differences select the token. In bf16, logits between 16 and 32
are multiples of 1/8: at 4 % of 2,040 positions of a text, the two best were exactly equal, and the
lower id won.

The bits of a row may depend on the number of rows; `row_rule` makes products without this
dependence.

Shapes: T rows, O and I a linear's output and input size, N heads with a weight of their own; for
the head S rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from baton_engine.attention.cpu_bf16 import multiplies_bf16
from baton_engine.attention.exact.row_rule import HEAD_ROW_COUNTS, ROW_COUNTS, Product
from baton_engine.cpu_kernels.quantized import multiplies_plain, multiply_rows, pack_plain
from baton_engine.layers.quantization.cpu_products import quantized_product
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight, Weight

# Number of rows of the head that a CPU multiplies at a time if it reads them twice. With 576
# columns these are 9 MB, which the second read finds in the cache. One input row took 4.7 ms
# instead of 5.7 ms for the whole head at once, and 16 rows 7.6 instead of 10.3 ms (2 threads,
# 49,152 x 576).
HEAD_ROWS = 8192
# The head's name, also if its weight is the embedding's.
HEAD = "lm_head"


def plain_product(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Product:
    return lambda x_TI: F.linear(x_TI, weight_OI, bias_O)


def packed_product(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Product:
    """The product with a packed copy of the weight, or the plain product if the weight cannot be
    packed."""
    if not packable(weight_OI):
        return plain_product(weight_OI, bias_O)
    packed = _packed(weight_OI)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x_TI: multiply(x_TI, packed, bias_O, "none", [], "")


def kernel_product(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Product:
    """The product by our kernel, with a packed copy of the weight (see multiplies_by_kernel())."""
    packed = pack_plain(weight_OI, bias_O)
    return lambda x_TI: multiply_rows(x_TI, packed, x_TI.dtype)


def multiplies_by_kernel(weight_OI: torch.Tensor) -> bool:
    """Whether our kernel multiplies the weight faster than a library, as it does on some CPUs. For
    the rows of a prompt oneDNN is as fast. 16 rows with weights of 4,608 x 768 that are in no cache
    took 0.35 instead of 0.49 ms in bfloat16, and 0.64 instead of 0.95 to 1.0 in float32; one row
    0.20 instead of 0.26, and 0.39 instead of 0.55 (Zen 5, one thread)."""
    return (
        multiplies_plain()
        and weight_OI.device.type == "cpu"
        and weight_OI.dtype in (torch.bfloat16, torch.float32)
        and weight_OI.shape[1] % 2 == 0
    )


def head_product(weight_VD: torch.Tensor, bias_V: torch.Tensor | None = None) -> Product:
    """A product that gives float32 logits without a float32 copy of the weight. Logits have float32
    precision but where twice_product() computes them, which is 16 bits. The head has no bias."""
    assert bias_V is None
    if multiplies_by_kernel(weight_VD):
        packed = pack_plain(weight_VD)
        return lambda x_SD: multiply_rows(x_SD, packed, torch.float32)
    if weight_VD.dtype == torch.float32:
        return packed_product(weight_VD, None)
    if weight_VD.device.type == "cuda":
        return lambda x_SD: torch.mm(x_SD, weight_VD.t(), out_dtype=torch.float32)
    if multiplies_bf16() and packable(weight_VD):
        return twice_product(weight_VD)
    return widened_product(weight_VD)


def twice_product(weight_VD: torch.Tensor) -> Product:
    """Compute the product twice, on CPUs for which our kernel is not the faster way (see
    multiplies_plain()). A CPU adds bf16 products in float32, but torch returns the sums
    rounded to bf16. The second time, the first result is subtracted before rounding, which leaves
    the part that rounding lost (see `attention.cpu_bf16`)."""
    multiply = torch.ops.mkldnn._linear_pointwise
    vocab = len(weight_VD)
    parts = [(slice(begin, begin + len(part)), _packed(part)) for begin, part in _parts(weight_VD)]

    def product(x_SD: torch.Tensor) -> torch.Tensor:
        logits_SV = torch.empty(len(x_SD), vocab)
        for columns, packed in parts:
            near = multiply(x_SD, packed, None, "none", [], "")
            lost = multiply.binary(x_SD, near, packed, None, "sub")
            logits_SV[:, columns].copy_(near).add_(lost)
        return logits_SV

    return product


def widened_product(weight_VD: torch.Tensor) -> Product:
    """The product for a CPU without fast bf16 products. Converts HEAD_ROWS rows of the weight to
    float32 at a time."""

    def product(x_SD: torch.Tensor) -> torch.Tensor:
        wide_SD = x_SD.float()
        return torch.cat([F.linear(wide_SD, part.float()) for _, part in _parts(weight_VD)], 1)

    return product


@dataclass(frozen=True, slots=True)
class LinearMethod:
    """How a layer computes its product, which is made from its weight and bias. A method takes
    either dense weights or quantized ones (see Weight).

    With `any_rows`, a row has the same bits for any number of rows by construction. A test at the
    start compares the numbers of rows in `counts` even so (see `row_rule`).
    """

    product: Callable[[Any, torch.Tensor | None], Product]
    any_rows: bool = False
    counts: Sequence[int] = ROW_COUNTS


# Gives the method of a layer, by its name in the checkpoint, the first of several if the layer
# stacks them, and its weight. Other methods are those of `triton_matmul` and `triton_quantized`.
MethodOf = Callable[[str, Weight], LinearMethod]

PACKED = LinearMethod(packed_product)
BY_KERNEL = LinearMethod(kernel_product, any_rows=True)
PACKED_HEAD = LinearMethod(head_product, counts=HEAD_ROW_COUNTS)
HEAD_BY_KERNEL = LinearMethod(head_product, any_rows=True, counts=HEAD_ROW_COUNTS)


def heads_product(weight_NOI: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """A product per head: [T, N I] to [T, N O]."""
    assert bias is None
    weight_NIO = weight_NOI.transpose(1, 2)

    def product(x_TM: torch.Tensor) -> torch.Tensor:
        x_NTI = x_TM.view(len(x_TM), len(weight_NIO), -1).transpose(0, 1)
        return torch.bmm(x_NTI, weight_NIO).transpose(0, 1).flatten(1)

    return product


HEADS = LinearMethod(heads_product)


QUANTIZED = LinearMethod(quantized_product, any_rows=True)
QUANTIZED_HEAD = LinearMethod(
    lambda weight_VD, bias_V: quantized_product(weight_VD, bias_V, torch.float32),
    any_rows=True,
    counts=HEAD_ROW_COUNTS,
)


def packed_methods(name: str, weight: Weight) -> LinearMethod:
    if isinstance(weight, QuantizedWeight):
        return QUANTIZED_HEAD if name == HEAD else QUANTIZED
    by_kernel = multiplies_by_kernel(weight)
    if name == HEAD:
        return HEAD_BY_KERNEL if by_kernel else PACKED_HEAD
    return BY_KERNEL if by_kernel else PACKED


def _parts(weight_VD: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Parts of HEAD_ROWS rows of the head, each with its first row's index."""
    for begin in range(0, len(weight_VD), HEAD_ROWS):
        yield begin, weight_VD[begin : begin + HEAD_ROWS]


def packable(weight_OI: torch.Tensor) -> bool:
    ops = torch.ops.mkldnn
    return (
        weight_OI.device.type == "cpu"
        and weight_OI.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
    )


def _packed(weight_OI: torch.Tensor) -> torch.Tensor:
    # The second argument is the expected number of rows; products were as fast with 16 as with 256.
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, 16)
    return packed

"""Products of linear layers, plain or with a weight packed for this CPU, and the product of the
head, which is float32 for weights of any dtype.

oneDNN reorders a weight into blocks for each product, unless the weight is already packed. Packing
once makes a decode step of 4-16 rows 15-40 % faster, and a prefill step 10 % (fp32 and bf16,
AVX-512, 2 threads). torch offers packing only under private names. They are looked up only here,
and without them the plain product is used.

Logits need float32, because small differences select the token. In bf16, logits between 16 and 32
are multiples of 1/8: at 4 % of 2,040 positions of a text, the two best were exactly equal, and the
lower id won.

A row of a product should have the same bits whatever other rows are computed with it; then a
token's value does not depend on the batch. `row_rule` tests this when an engine starts. oneDNN's
packed products in float32 pass from 2 rows on; in bfloat16 they pass on CPUs without AMX. Where
they do not pass, tokens have equal values up to rounding.

Shapes: T rows, O and I a linear's output and input size; for the head S rows, D hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from baton_engine.attention.cpu_bf16 import multiplies_bf16

Product = Callable[[torch.Tensor], torch.Tensor]

CPU = torch.device("cpu")

# Number of rows of the head that a CPU multiplies at a time if it reads them twice. With 576
# columns these are 9 MB, which the second read finds in the cache. One input row took 4.7 ms
# instead of 5.7 ms for the whole head at once, and 16 rows 7.6 instead of 10.3 ms (2 threads,
# 49,152 x 576).
HEAD_ROWS = 8192
# Numbers of rows at which libraries choose other instructions or divide the work otherwise.
ROWS_TESTED = (1, 2, 3, 5, 8, 16, 17, 32, 33, 64, 96, 192)


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


def head_product(weight_VD: torch.Tensor) -> Product:
    """A product that gives float32 logits without a float32 copy of the weight. Logits have float32
    precision on CUDA and for float32 weights, and 16 bits for bf16 weights on a CPU with bf16
    products."""
    if weight_VD.dtype == torch.float32:
        return packed_product(weight_VD, None)
    if weight_VD.device.type == "cuda":
        return lambda x_SD: torch.mm(x_SD, weight_VD.t(), out_dtype=torch.float32)
    if multiplies_bf16() and packable(weight_VD):
        return twice_product(weight_VD)
    return widened_product(weight_VD)


def twice_product(weight_VD: torch.Tensor) -> Product:
    """Compute the product twice. A CPU adds bf16 products in float32, but torch returns the sums
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
    """How an engine computes products: `product` is made from a weight and a bias, `head` from the
    head's weight. Another method is `triton_matmul.FIXED_TILE`."""

    product: Callable[[torch.Tensor, torch.Tensor | None], Product]
    head: Callable[[torch.Tensor], Product]


PACKED = LinearMethod(packed_product, head_product)


@dataclass(frozen=True, slots=True)
class RowRule:
    """From `least` rows on, each row of a product has the same bits for any number of rows; or, if
    not `exact`, for none that was tested."""

    least: int
    exact: bool


def row_rule(
    product: Product, width: int, dtype: torch.dtype, device: torch.device = CPU
) -> RowRule:
    """Test a product of `width` inputs on random numbers. The order of additions depends only on
    shapes, so they show every difference. Takes some milliseconds for a small matrix, and about as
    long as a step of 600 tokens."""
    noise = torch.Generator().manual_seed(0)
    x_TI = torch.randn(max(ROWS_TESTED), width, generator=noise).to(device, dtype)
    whole_TO = product(x_TI)
    bad = [rows for rows in ROWS_TESTED if not torch.equal(product(x_TI[:rows]), whole_TO[:rows])]
    if not bad:
        return RowRule(1, exact=True)
    return RowRule(2, exact=True) if bad == [1] else RowRule(1, exact=False)


def with_rule(product: Product, rule: RowRule) -> Product:
    """The product with rows of zeros added to inputs of fewer rows than the rule's `least`."""
    if rule.least == 1:
        return product

    def padded(x_TI: torch.Tensor) -> torch.Tensor:
        rows = len(x_TI)
        if rows >= rule.least:
            return product(x_TI)
        padded_TI = x_TI.new_zeros(rule.least, x_TI.shape[1])
        padded_TI[:rows] = x_TI
        return product(padded_TI)[:rows]

    return padded


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

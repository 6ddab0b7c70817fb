"""How a linear layer multiplies: plainly, or with its weight packed for this CPU; and how the head
does, whose product is float32 whatever the weights are.

oneDNN reorders a weight into blocks for each product unless it is given one that is packed already.
Packing once makes a decode step of 4-16 rows 15-40 % faster and a prefill step 10 % (fp32 and bf16,
AVX-512, 2 threads). torch offers it only under private names, so they are looked up here, in one
place, and without them the plain product is used.

Logits near each other decide what is said. Rounded to bf16, logits of 16 to 32 are multiples of
1/8: of 2,040 positions of a text, 4 % ended in an exact tie of the two best, and the lower id won.

Shapes: T rows, O and I a linear's out and in; of the head S rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from baton_engine.attention.cpu_bf16 import multiplies_bf16

Product = Callable[[torch.Tensor], torch.Tensor]

# Rows of the head that a CPU multiplies at a time where it needs them twice: 9 MB of 576 columns,
# which the second time come from its cache. One row took 4.7 ms, with all at once 5.7; 16 rows took
# 7.6 instead of 10.3 (2 threads, 49,152 x 576).
HEAD_ROWS = 8192


def plain_product(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Product:
    return lambda x_TI: F.linear(x_TI, weight_OI, bias_O)


def packed_product(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Product:
    """The product with a packed copy of the weight; the plain one where nothing can be packed."""
    if not packable(weight_OI):
        return plain_product(weight_OI, bias_O)
    packed = _packed(weight_OI)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x_TI: multiply(x_TI, packed, bias_O, "none", [], "")


def head_product(weight_VD: torch.Tensor) -> Product:
    """Logits in float32, without a copy of the weight in float32. They are exact to float32 on CUDA
    and of float32 weights, and to 16 bits of bf16 weights on a CPU."""
    if weight_VD.dtype == torch.float32:
        return packed_product(weight_VD, None)
    if weight_VD.device.type == "cuda":
        return lambda x_SD: torch.mm(x_SD, weight_VD.t(), out_dtype=torch.float32)
    if multiplies_bf16() and packable(weight_VD):
        return twice_product(weight_VD)
    return widened_product(weight_VD)


def twice_product(weight_VD: torch.Tensor) -> Product:
    """A CPU adds products of bf16 in float32, but torch hands sums out rounded to bf16. So each is
    computed twice: the second time what the first one said is subtracted before it is rounded, and
    what is left is what rounding had lost (see `bf16_products`)."""
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
    """For a CPU without products of bf16, on which they are slow anyway. Only some rows of the
    weight are there in float32 at a time."""

    def product(x_SD: torch.Tensor) -> torch.Tensor:
        wide_SD = x_SD.float()
        return torch.cat([F.linear(wide_SD, part.float()) for _, part in _parts(weight_VD)], 1)

    return product


def _parts(weight_VD: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """So many rows of the head at a time, and where they begin."""
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
    # The second argument is the usual number of rows; the packing was as fast for 16 as for 256.
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, 16)
    return packed

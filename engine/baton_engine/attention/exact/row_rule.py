"""Products of linear layers whose bits for a row do not depend on the other rows.

In: a product and its weight. Out: the numbers of rows with which the product may be computed, and a
product that computes any number of rows in such pieces.

A library chooses by the number of rows in which order it adds. oneDNN's packed products of 1 row
differ in float32. In bfloat16 on CPUs with AMX, from 33 rows on the inputs of a row are added in
several groups instead of one, and the groups depend on the number of rows. So when an engine
starts, it computes the same rows with each number of ROW_COUNTS, and keeps numbers that give equal
bits. A product is only ever called with a tested number of rows: it gets additional rows, or its
rows are divided.

Measured with 16 rows on a CPU with AMX (116M parameters, bfloat16, one thread): all products of a
step took 5 to 10 % longer with 40 rows than with 16, because reading the weights takes most of the
time.

Shapes: T rows of a step, R rows of a test, O and I a linear's output and input size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Product = Callable[[torch.Tensor], torch.Tensor]

# Numbers of rows that are tested, at most a quarter apart, and fewer for the head, which is large.
ROW_COUNTS = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64),
    *(80, 96, 112, 128, 160, 192, 224, 256, 512),
)
HEAD_ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
# Reading the weights for a product takes as long as computing this number of rows.
READING_ROWS = 64
# Numbers of rows of usual steps, for the choice between numbers that give different bits.
USUAL_ROWS = (1, 4, 16, 64, 256)
# Rows of a test. No number of ROW_COUNTS is a multiple, so that each row comes to different places.
TEST_ROWS = 11
# How many outputs of a test row are almost 0, at most.
TEST_OUTPUTS = 64


@dataclass(frozen=True, slots=True)
class RowRule:
    """A product gives a row the same bits with each number of rows in `counts` (ascending) and at
    any place among them; with no number if `counts` is empty. `digest` identifies these bits."""

    counts: tuple[int, ...]
    digest: str = ""

    def pieces(self, rows: int) -> list[int]:
        """The numbers of rows with which `rows` rows are computed one after the other. The last
        piece may be larger than what is left."""
        pieces = []
        while rows > 0:
            fitting = [count for count in self.counts if count <= rows]
            padded = [count for count in self.counts if rows <= count]
            if padded and (not fitting or padded[0] - rows <= READING_ROWS):
                pieces.append(padded[0])
            else:
                pieces.append(fitting[-1])
            rows -= pieces[-1]
        return pieces

    @property
    def cost(self) -> float:
        """The time of products with USUAL_ROWS, compared with products without a rule."""
        return sum(
            sum(READING_ROWS + count for count in self.pieces(rows)) / (READING_ROWS + rows)
            for rows in USUAL_ROWS
        )


def row_rule(
    product: Product,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    counts: Sequence[int] = ROW_COUNTS,
) -> RowRule:
    """The rule of a linear layer. The order of additions depends only on shapes and the number of
    threads, so products of equal shapes have the same rule.

    Takes as long as a step of all `counts` tokens together: 0.1 s for a weight of 3,072 x 576.
    """
    return find_rule(product, _test_rows(weight_OI, bias_O), counts)


def find_rule(product: Product, x_RI: torch.Tensor, counts: Sequence[int]) -> RowRule:
    """The rule of lowest cost, found with the rows `x_RI`."""
    kinds: list[tuple[torch.Tensor, list[int]]] = []
    for count in counts:
        y_RO = _outputs(product, x_RI, count)
        if y_RO is None:
            continue
        same = [members for other_RO, members in kinds if torch.equal(other_RO, y_RO)]
        if same:
            same[0].append(count)
        else:
            kinds.append((y_RO, [count]))
    rules = [RowRule(tuple(members), _digest(y_RO)) for y_RO, members in kinds]
    return min(rules, key=lambda rule: rule.cost, default=RowRule(()))


def with_rule(product: Product, rule: RowRule) -> Product:
    """The product, called only with numbers of rows that the rule permits."""
    counts = frozenset(rule.counts)

    def exact_product(x_TI: torch.Tensor) -> torch.Tensor:
        if len(x_TI) in counts:
            return product(x_TI)
        parts, begin = [], 0
        for count in rule.pieces(len(x_TI)):
            part = x_TI[begin : begin + count]
            missing = count - len(part)
            if missing:
                # The other rows may hold anything.
                padded_TI = x_TI.new_empty(count, x_TI.shape[1])
                padded_TI[: len(part)] = part
                parts.append(product(padded_TI)[: len(part)])
            else:
                parts.append(product(part))
            begin += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return exact_product


def _test_rows(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """Random rows [R, I]; in bfloat16, rows with some outputs that are almost 0.

    Another order of additions changes the last bits of a float32 sum, and a result in bfloat16 does
    not show these. Where large numbers cancel, the result is what rounding left of them.

    With a weight per head, each head gets the rows of the first.
    """
    if weight_OI.dim() == 3:
        return _test_rows(weight_OI[0], None).repeat(1, len(weight_OI))
    outputs, inputs = weight_OI.shape
    noise = torch.Generator().manual_seed(0)
    x_IR = torch.randn(inputs, TEST_ROWS, generator=noise, dtype=torch.float64)
    if weight_OI.dtype == torch.bfloat16:
        some = torch.linspace(0, outputs - 1, max(1, min(TEST_OUTPUTS, outputs, inputs // 8)))
        # In float64, so that machines with other libraries find the same rows.
        weight_SI = weight_OI[some.long()].double().cpu()
        bias_S = 0.0 if bias_O is None else bias_O[some.long()].double().cpu()[:, None]
        # Every fourth input is small. These remove what rounding the others left.
        coarse = torch.arange(inputs) % 4 != 0
        x_IR[~coarse] = 0.0
        for now in (coarse, ~coarse):
            x_IR[now] -= torch.linalg.pinv(weight_SI[:, now]) @ (weight_SI @ x_IR + bias_S)
            x_IR = x_IR.bfloat16().double()
    return x_IR.t().to(weight_OI.device, weight_OI.dtype).contiguous()


def _outputs(product: Product, x_RI: torch.Tensor, count: int) -> torch.Tensor | None:
    """The outputs [R, O] of the rows from products of `count` rows, in which each row comes twice
    or more. None if a row has different bits at different places."""
    rows = len(x_RI)
    places_T = torch.arange(-(-2 * rows // count) * count) % rows
    y_TO = torch.cat([product(part) for part in torch.split(x_RI[places_T], count)])
    y_RO = y_TO[:rows]
    return y_RO.clone() if torch.equal(y_TO, y_RO[places_T]) else None


def _digest(y_RO: torch.Tensor) -> str:
    return hashlib.sha256(y_RO.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()

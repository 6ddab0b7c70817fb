"""Attention of one-token rows, which kernels compute or torch.

In: rows with their blocks, and per layer their queries. Out: attention outputs.

Compiled kernels read K and V in the blocks of the pool (`PagedRows`). On a CPU whose library adds
in an order that the kernels do not have, and for block and head sizes that these do not support, K
and V are copied out of their blocks (`CopiedRows`).
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_engine.attention.exact.batched_products import BatchedProducts
from baton_engine.attention.exact.copied_rows import CopiedRows
from baton_engine.attention.exact.paged_products import can_compute
from baton_engine.attention.exact.paged_rows import PagedRows
from baton_engine.attention.exact.pages import PagedKV
from baton_engine.attention.exact.row_groups import PrefixGroup
from baton_engine.attention.exact.splits import Splits
from baton_engine.attention.interface import TableRow


def has_kernels(kv: PagedKV, products: BatchedProducts) -> bool:
    """Whether kernels compute one-token rows."""
    shapes = kv.dtype, kv.head_dim, kv.value_dim, kv.block_size
    return products.orders is not None and can_compute(*shapes)


def decode_rows(
    kv: PagedKV,
    products: BatchedProducts,
    rows: Sequence[TableRow],
    places: Sequence[int],
    splits: Splits,
    groups: Sequence[PrefixGroup],
) -> PagedRows | CopiedRows:
    """The rows at `places` of the step. Together the groups have each of them. Without kernels
    there is one group."""
    orders = products.orders
    if orders is not None and has_kernels(kv, products):
        return PagedRows(kv, orders, rows, places, splits, groups)
    [group] = groups
    return CopiedRows(kv, products, rows, places, splits, group.shared)

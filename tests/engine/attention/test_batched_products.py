"""The test of attention's products at an engine's start: it finds kernels whose bits depend on the
number of rows, keys, matrices or threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from baton_engine.attention.exact import batched_products
from baton_engine.attention.exact.batched_products import BatchedProducts, _tested
from baton_engine.attention.exact.paged_products import Orders
from baton_engine.attention.exact.row_rule import ROW_COUNTS
from baton_engine.config.model_config import AttentionSpec
from baton_engine.cpu_kernels.attention_task import Order

CPU = torch.device("cpu")
DIM, KEYS = 32, 64
SPEC = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=DIM, scale=0.5)
DTYPES = [torch.float32, torch.bfloat16]
COUNTS = tuple(count for count in ROW_COUNTS if count <= 64)


@pytest.fixture(autouse=True)
def tested_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(batched_products, "ROW_COUNTS", COUNTS)
    _tested.cache_clear()
    yield
    _tested.cache_clear()


def products_of(dtype: torch.dtype, keys: int = KEYS) -> BatchedProducts:
    return BatchedProducts.for_heads(dtype, CPU, DIM, value_dim=DIM, keys=keys)


def replace_bmm(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[torch.Tensor, torch.Tensor], bool]
) -> None:
    """Replace torch.bmm by plain sums, which add in two groups if `broken`."""

    def bmm(a_XMI: torch.Tensor, b_XIN: torch.Tensor) -> torch.Tensor:
        groups = 2 if broken(a_XMI, b_XIN) else 1
        parts = zip(a_XMI.float().chunk(groups, 2), b_XIN.float().chunk(groups, 1), strict=True)
        sums = [(a[..., None] * b[:, None]).sum(2) for a, b in parts]
        return torch.stack(sums).sum(0).to(a_XMI.dtype)

    monkeypatch.setattr(torch, "bmm", bmm)


def check_exact(products: BatchedProducts, dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(1)
    q_XMH = torch.randn(2, 70, DIM, generator=noise).to(dtype)
    kv_XLH = torch.randn(2, 3 * KEYS, DIM, generator=noise).to(dtype)
    w_XMCS = torch.rand(2, 70, 3, KEYS, generator=noise)
    scores_XML = products.scores(q_XMH, kv_XLH, SPEC)
    sums_XMCH = products.sums(w_XMCS, kv_XLH)
    for count in range(1, 70):
        some = slice(70 - count, 70)
        assert torch.equal(products.scores(q_XMH[:, some], kv_XLH, SPEC), scores_XML[:, some])
        assert torch.equal(products.sums(w_XMCS[:, some], kv_XLH), sums_XMCH[:, some])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_number_of_rows(dtype: torch.dtype) -> None:
    check_exact(products_of(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 16, 48])
def test_a_number_of_rows_with_another_order_of_additions_is_found(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_bmm(monkeypatch, lambda a_XMI, _: a_XMI.shape[1] == count)
    if dtype == torch.bfloat16:
        monkeypatch.setattr("baton_engine.attention.cpu_bf16.multiplies_bf16", lambda: False)
    products = products_of(dtype)
    assert set(products.rule.counts) == set(COUNTS) - {count}
    check_exact(products, dtype)


@pytest.mark.parametrize("keys", [63, 65, 128])
def test_a_split_of_another_size_is_tested_by_itself(
    keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only sums over this number of keys are broken, with 5 rows."""
    replace_bmm(monkeypatch, lambda a_XMI, _: a_XMI.shape[1:] == (5, keys))
    assert 5 in products_of(torch.float32, KEYS).rule.counts
    assert 5 not in products_of(torch.float32, keys).rule.counts


def test_numbers_of_columns_and_matrices_that_change_the_bits_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_bmm(monkeypatch, lambda a_XMI, b_XIN: len(a_XMI) == 1 and a_XMI.shape[1] == 8)
    assert 8 not in products_of(torch.float32).rule.counts
    _tested.cache_clear()
    replace_bmm(monkeypatch, lambda a_XMI, b_XIN: b_XIN.shape[2] > KEYS)
    assert not products_of(torch.float32).exact


def test_each_number_of_threads_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    replace_bmm(monkeypatch, lambda a_XMI, _: threads == 2 and a_XMI.shape[1] == 16)
    assert 16 in products_of(torch.float32).rule.counts
    threads = 2
    assert 16 not in products_of(torch.float32).rule.counts


def test_pages_are_read_in_place_only_if_that_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert products_of(torch.float32).orders == Orders(Order.IN_TURN, Order.IN_TURN)
    _tested.cache_clear()
    replace_bmm(monkeypatch, lambda a_XMI, b_XIN: True)
    products = products_of(torch.float32)
    assert products.exact
    assert products.orders is None

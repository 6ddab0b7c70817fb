"""The kernels that read K and V in place add in each of their orders as it is defined, to the last
bit, on any CPU and with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton_engine.attention.exact import paged_products
from baton_engine.attention.exact.paged_products import Arrays, Orders, PagedMatrices
from baton_engine.attention.layer_kv import LayerKV
from baton_engine.cpu_kernels import openmp
from baton_engine.cpu_kernels.attention_task import Order, Part

Numbers = npt.NDArray[np.float32]
# Matrices, rows, pages, keys of a page and of a split, inputs of a head.
X, M, P, B, S, H = 3, 5, 6, 16, 32, 64
KEYS = P * B


def in_order(products: Numbers, order: Order) -> Numbers:
    """The sum of products [inputs, ...] of bfloat16 numbers. Such products are exact in float32, so
    a fused multiply-add rounds as these additions do."""
    total = np.zeros(products.shape[1:], np.float32)
    if order == Order.TILES:
        for tile in range(0, len(products), 32):
            some = products[tile : tile + 32]
            total += in_order(some[::2], Order.IN_TURN) + in_order(some[1::2], Order.IN_TURN)
        return total
    indexes = np.arange(len(products))
    for index in indexes ^ 1 if order == Order.PAIRS else indexes:
        total += products[index]
    return total


def rounded(numbers: Numbers) -> Numbers:
    array: Numbers = torch.from_numpy(numbers).bfloat16().float().numpy()
    return array


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def matrices_of(order: Order, seen_X2: npt.NDArray[np.int64]) -> PagedMatrices:
    """Each matrix has pages of its own, in reverse order, and rows of its own."""
    return PagedMatrices(
        np.arange(X * P)[::-1].reshape(X, P),
        np.zeros(X, np.int32),
        np.arange(X * M).reshape(X, M),
        seen_X2,
        split=S,
        orders=Orders(order, order),
    )


def pages_of(seed: int) -> tuple[torch.Tensor, Numbers]:
    """Random pages, and the same as the keys of each matrix [X, KEYS, H]."""
    noise = torch.Generator().manual_seed(seed)
    pages = torch.randn(X * P, B * H, generator=noise).bfloat16()
    return pages, pages.float().numpy()[::-1].reshape(X, KEYS, H)


def arrays_of(k_pages: torch.Tensor, v_pages: torch.Tensor | None = None, seed: int = 1) -> Arrays:
    """Random queries, and no scores, sums or output yet."""
    noise = torch.Generator().manual_seed(seed)
    queries_QH = torch.randn(X * M, H, generator=noise).to(k_pages.dtype)
    v_pages = k_pages if v_pages is None else v_pages
    return Arrays(
        kv=LayerKV(*(pages.view(-1, 1, B, H) for pages in (k_pages, v_pages))),
        queries_QH=queries_QH,
        scores_QL=torch.full((X * M, KEYS), torch.nan),
        sums_QV=torch.full((X * M, H), torch.nan),
        output_QV=torch.full_like(queries_QH, torch.nan),
    )


SEEN = np.array([[0, KEYS], [5, 70], [33, 34]])


def is_seen() -> npt.NDArray[np.bool_]:
    keys_L = np.arange(KEYS)
    seen: npt.NDArray[np.bool_] = (keys_L >= SEEN[:, :1]) & (keys_L < SEEN[:, 1:])
    return seen


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("order", Order)
def test_scores_are_added_in_the_given_order(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_products, "multiplies_bf16", lambda: True)
    pages, keys_XLH = pages_of(0)
    arrays = arrays_of(pages)
    matrices_of(order, SEEN).compute(Part.SCORES, arrays, 0.25)
    q_XMH = arrays.queries_QH.float().numpy().reshape(X, M, H)
    sums_XML = in_order(np.einsum("xmh,xlh->hxml", q_XMH, keys_XLH), order)
    near_XML = rounded(sums_XML)
    expected = (near_XML + rounded(sums_XML - near_XML)) * np.float32(0.25)
    expected = np.where(is_seen()[:, None], expected, -np.inf)
    np.testing.assert_array_equal(arrays.scores_QL.numpy().reshape(X, M, KEYS), expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("order", Order)
def test_values_are_added_in_the_given_order_split_by_split(order: Order) -> None:
    pages, values_XLH = pages_of(2)
    weights_XML = np.random.default_rng(3).random((X, M, KEYS), np.float32)
    weights_XML *= is_seen()[:, None]
    # Memory that no token has written may hold NaN.
    hidden = np.flip(~is_seen().reshape(X * P, B), 0)
    pages.view(X * P, B, H)[torch.from_numpy(hidden.copy())] = torch.nan
    arrays = arrays_of(pages)
    arrays.scores_QL.copy_(torch.from_numpy(weights_XML.reshape(X * M, KEYS)))
    matrices_of(order, SEEN).compute(Part.NO_SUMS | Part.SUMS, arrays, 1.0)
    expected = np.zeros((X, M, H), np.float32)
    for first in range(0, KEYS, S):
        some = slice(first, first + S)
        weights = rounded(weights_XML[:, :, some])
        products = np.einsum("xms,xsh->sxmh", weights, values_XLH[:, some])
        expected += rounded(in_order(products, order))
    np.testing.assert_array_equal(arrays.sums_QV.numpy().reshape(X, M, H), expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_parts_at_once_give_the_bits_of_the_parts_in_turn(dtype: torch.dtype) -> None:
    k_pages, v_pages = (pages_of(seed)[0].to(dtype) for seed in (4, 5))
    found = []
    for parts in ([Part.ALL], [part for part in Part if part in Part.ALL]):
        arrays = arrays_of(k_pages, v_pages)
        for part in parts:
            matrices_of(Order.IN_TURN, SEEN).compute(part, arrays, 0.25)
        found.append(arrays)
    at_once, in_turn = found
    assert torch.equal(at_once.output_QV, in_turn.output_QV)
    weights_QL = in_turn.scores_QL
    torch.testing.assert_close(weights_QL.sum(1), torch.ones(X * M), rtol=1e-5, atol=0)
    assert torch.equal(in_turn.output_QV, in_turn.sums_QV.to(dtype))


def test_kernels_run_on_one_thread_beside_another_openmp_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages, _ = pages_of(0)
    found = []
    for parallel in (openmp._parallel(), None):
        monkeypatch.setattr(openmp, "_parallel", lambda there=parallel: there)
        arrays = arrays_of(pages)
        matrices_of(Order.IN_TURN, SEEN).compute(Part.ALL, arrays, 1.0)
        found.append(arrays.output_QV)
    assert torch.equal(*found)

"""The paged attention kernels against attention computed from its definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from baton_engine.attention.layer_kv import LayerKV
from baton_engine.attention.triton_paged_attention import (
    MAX_PROGRAMS,
    OneTokenTile,
    StepRows,
    paged_attention,
    programs_for,
    tile_shape,
)
from tests.support.engines.kernels import DEVICE, poisoned
from tests.support.engines.launches import launches
from tests.support.engines.paged import Case, Inputs, assert_near, make_inputs
from tests.support.engines.small_pool import attention_of
from tests.support.needs import needs

# Rows as (start, tokens).
DECODE = [(82, 1), (17, 1), (63, 1), (64, 1), (0, 1)]
MIXED = [(82, 1), (0, 1), (13, 5), (0, 18), (42, 37)]


def attend(inputs: Inputs, window: int | None = None, programs: int = 1) -> torch.Tensor:
    q_TNH = inputs.q_TNH
    with poisoned():
        shape = (*q_TNH.shape[:2], inputs.kv.v_PKBV.shape[3])
        out_TNV = torch.empty(shape, dtype=q_TNH.dtype, device=DEVICE)
        paged_attention(
            *(q_TNH, inputs.kv, inputs.rows, out_TNV),
            window=window,
            sinks_N=inputs.sinks_N,
            programs=programs,
        )
    return out_TNV


CASES = {
    "one-token rows": Case(spans=DECODE),
    "a mix": Case(spans=MIXED),
    "a prompt longer than a tile of queries": Case(spans=[(0, 70)], heads=(4, 1)),
    "chunked prefill that starts and ends inside a block": Case(spans=[(3, 7), (31, 2), (30, 3)]),
    "as many kv heads as heads": Case(spans=MIXED, heads=(4, 4)),
    "four heads per kv head": Case(spans=MIXED, heads=(8, 2)),
    "five heads per kv head": Case(spans=MIXED, heads=(5, 1)),
    "five heads per kv head, one-token rows": Case(spans=DECODE, heads=(5, 1)),
    "more heads per kv head than a tile's rows": Case(spans=DECODE, heads=(20, 1)),
    "head_dim 64": Case(spans=MIXED, dim=64),
    "head_dim 128": Case(spans=MIXED, dim=128),
    "head_dim 24": Case(spans=MIXED, dim=24),
    "head_dim 8": Case(spans=MIXED, dim=8),
    "heads of v of 16": Case(spans=MIXED, value_dim=16),
    "heads of v of 72, one-token rows": Case(spans=DECODE, value_dim=72),
    "latent rows": Case(spans=MIXED, heads=(6, 1), dim=48, value_dim=32, latent=True),
    "latent rows, one-token rows": Case(
        spans=DECODE, heads=(20, 1), dim=40, value_dim=24, latent=True
    ),
    "latent rows for two programs": Case(
        spans=DECODE, heads=(96, 1), dim=24, value_dim=16, latent=True
    ),
    "blocks of 7 tokens": Case(spans=MIXED, block=7),
    "blocks longer than a tile of keys": Case(spans=MIXED, block=80),
    "a window, one-token rows": Case(spans=DECODE, window=20),
    "a window, a mix": Case(spans=MIXED, window=20),
    "a window of one": Case(spans=[(5, 1), (0, 9)], window=1),
    "a window that ends with the tile": Case(spans=[(127, 1), (100, 30)], window=64),
    "a window longer than all rows": Case(spans=MIXED, window=500),
    "sinks, one-token rows": Case(spans=DECODE, sinks=True),
    "sinks and a window, a mix": Case(spans=MIXED, heads=(6, 2), window=20, sinks=True),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_in_float32_equals_the_definition(name: str) -> None:
    inputs = make_inputs(CASES[name])
    assert_near(attend(inputs, CASES[name].window), inputs.expected_TNH)


@pytest.mark.parametrize(
    "name",
    [
        "one-token rows",
        "a mix",
        "a prompt longer than a tile of queries",
        "head_dim 128",
        "a window, a mix",
        "sinks and a window, a mix",
    ],
)
def test_attention_in_float16_equals_the_definition(name: str) -> None:
    case = replace(CASES[name], dtype=torch.float16)
    inputs = make_inputs(case)
    assert_near(attend(inputs, case.window), inputs.expected_TNH)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_attention_in_bfloat16_equals_the_definition(name: str) -> None:
    needs("gpu")
    case = replace(CASES[name], dtype=torch.bfloat16)
    inputs = make_inputs(case)
    for programs in (1, 4):
        assert_near(attend(inputs, case.window, programs), inputs.expected_TNH)


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (200, False), (None, True)])
@pytest.mark.parametrize("programs", [2, 8])
def test_split_keys_give_the_same_attention(programs: int, window: int | None, sinks: bool) -> None:
    spans = [(470, 1), (256, 1), (128, 1), (127, 1), (0, 1)]  # most have splits without keys
    inputs = make_inputs(Case(spans=spans, heads=(2, 1), window=window, sinks=sinks))
    assert_near(attend(inputs, window, programs), inputs.expected_TNH)


def test_the_keys_of_one_token_rows_can_be_split_in_a_step_with_longer_rows() -> None:
    case = Case(spans=[(0, 19), (300, 1), (290, 3), (150, 1)], heads=(2, 1), dtype=torch.float16)
    inputs = make_inputs(case)
    assert_near(attend(inputs, programs=4), inputs.expected_TNH)


@pytest.mark.parametrize("programs", [1, 2])
def test_rows_of_length_0_are_padding(programs: int) -> None:
    inputs = make_inputs(Case(spans=[(140, 1), (9, 1), (200, 1)]))
    lengths_R = inputs.rows.lengths_R.clone()
    lengths_R[1] = 0
    actual = attend(
        replace(inputs, rows=replace(inputs.rows, lengths_R=lengths_R)), programs=programs
    )
    assert actual[1].isnan().all()
    assert_near(actual[[0, 2]], inputs.expected_TNH[[0, 2]])


def test_a_pool_can_have_more_elements_than_int32_can_count() -> None:
    kv_heads, block, dim, stride = 1, 16, 32, 1 << 30
    noise = torch.Generator().manual_seed(1)
    # On a CPU only the pages that the test touches take memory.
    size = 3 * stride
    flat = torch.from_numpy(np.zeros(size, np.float16)) if DEVICE.type == "cpu" else None
    if flat is None:
        flat = torch.zeros(size, dtype=torch.float16, device=DEVICE)
    shape = (3, 2, kv_heads, block, dim)
    pool = flat.as_strided(shape, (stride, block * dim, block * dim, dim, 1))
    kv = torch.randn(2, kv_heads, 20, dim, generator=noise).half()
    pool[2], pool[1, :, :, :4] = kv[:, :, :16].to(DEVICE), kv[:, :, 16:].to(DEVICE)
    q = torch.randn(1, 2, dim, generator=noise).half()
    where = ([0, 1], [20], [[2, 1]])
    starts, lengths, table = (torch.tensor(each).int().to(DEVICE) for each in where)
    inputs = Inputs(
        q.to(DEVICE),
        LayerKV(pool[:, 0], pool[:, 1]),
        StepRows(starts, lengths, table, one_token=True),
        attention_of(q, kv[0], kv[1], 19, None),
    )
    assert_near(attend(inputs), inputs.expected_TNH)


def far_apart(line: torch.Tensor, rows: int) -> torch.Tensor:
    """`line` [rows, N] again, with the rows so far apart that int32 cannot count the elements. On a
    CPU only the pages that hold the rows take memory."""
    stride = 2**31 // (rows - 1)
    size = (rows - 1) * stride + line.shape[1]
    kind = {torch.float16: np.float16, torch.int32: np.int32}[line.dtype]
    flat = torch.from_numpy(np.zeros(size, kind)) if DEVICE.type == "cpu" else None
    if flat is None:
        flat = torch.zeros(size, dtype=line.dtype, device=DEVICE)
    spread = flat.as_strided(line.shape, (stride, 1))
    spread.copy_(line)
    return spread


@pytest.mark.parametrize("spans", [DECODE, MIXED], ids=["one-token rows", "a mix"])
@pytest.mark.parametrize("tensor", ["queries", "table"])
def test_a_step_can_have_more_elements_than_int32_can_count(
    tensor: str, spans: list[tuple[int, int]]
) -> None:
    inputs = make_inputs(Case(spans=spans, dtype=torch.float16))
    if tensor == "queries":
        q_TNH = inputs.q_TNH
        far = far_apart(q_TNH.reshape(len(q_TNH), -1), len(q_TNH)).view(q_TNH.shape)
        inputs = replace(inputs, q_TNH=far)
    else:
        far = far_apart(inputs.rows.table_RM, len(spans))
        inputs = replace(inputs, rows=replace(inputs.rows, table_RM=far))
    assert_near(attend(inputs), inputs.expected_TNH)


@pytest.mark.parametrize("keys", [16, 64])
def test_another_tile_of_one_token_rows_gives_the_same_attention(keys: int) -> None:
    inputs, tile = make_inputs(Case(spans=DECODE)), OneTokenTile(keys=keys, stages=6, warps=2)
    out_TNH = torch.empty(inputs.q_TNH.shape, dtype=inputs.q_TNH.dtype, device=DEVICE)
    with launches() as found:
        paged_attention(inputs.q_TNH, inputs.kv, inputs.rows, out_TNH, tile=tile)
    [launched] = found
    used = {name: launched.constants[name] for name in ("KEYS", "num_stages", "num_warps")}
    assert used == {"KEYS": keys, "num_stages": 6, "num_warps": 2}
    assert_near(out_TNH, inputs.expected_TNH)


def test_the_tile_of_one_token_rows_changes_no_other_tile() -> None:
    tile = OneTokenTile(keys=16, stages=7, warps=1)
    for one_token, exact in ((False, False), (False, True), (True, True)):
        usual, changed = (
            tile_shape(one_token, 2, 128, 2, exact=exact, tile=each)
            for each in (OneTokenTile(), tile)
        )
        assert usual == changed


def test_keys_are_split_only_when_there_are_too_few_rows_for_the_device() -> None:
    assert programs_for(rows=256, kv_heads=8, longest=4096, processors=132) == 1
    assert programs_for(rows=32, kv_heads=8, longest=4096, processors=132) == 2
    assert programs_for(rows=8, kv_heads=8, longest=4096, processors=132) == 8
    assert programs_for(rows=1, kv_heads=8, longest=100_000, processors=132) == MAX_PROGRAMS
    assert programs_for(rows=1, kv_heads=8, longest=256, processors=132) == 2
    assert programs_for(rows=1, kv_heads=8, longest=1, processors=132) == 1

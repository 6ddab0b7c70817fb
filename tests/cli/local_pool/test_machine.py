"""How engines share a machine's cores, and which dtype a pool uses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_cli.local_pool.machine import cores, cpu_flags, decide_dtype, share_cores
from baton_engine.config.engine_config import Device
from baton_protocol.policies import DType

AVX = frozenset({"avx2", "avx512_bf16"})
OLD = frozenset({"avx2"})


@given(st.integers(1, 256), st.integers(1, 64))
def test_all_cores_are_shared_and_every_engine_gets_at_least_one(
    available: int, engines: int
) -> None:
    shares = share_cores(available, engines)
    assert len(shares) == engines
    assert min(shares) >= 1
    assert sum(shares) == max(available, engines)
    assert shares == sorted(shares, reverse=True)


def test_one_prefill_and_one_decode_node_on_two_cores_get_one_each() -> None:
    assert share_cores(2, 2) == [1, 1]


def test_a_left_over_core_goes_to_the_first_prefill_node() -> None:
    assert share_cores(4, 3) == [2, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "device", "config", "flags", "decided"),
    [
        ("float32", "cuda", {}, AVX, "float32"),
        ("bfloat16", "cpu", {"dtype": "float32"}, OLD, "bfloat16"),
        ("float16", "cuda", {"dtype": "bfloat16"}, OLD, "float16"),
        ("auto", "cpu", {"dtype": "bfloat16"}, AVX, "bfloat16"),
        ("auto", "cpu", {"dtype": "bfloat16"}, frozenset({"amx_bf16"}), "bfloat16"),
        ("auto", "cpu", {"dtype": "bfloat16"}, OLD, "float32"),
        ("auto", "cuda", {}, OLD, "bfloat16"),
        ("auto", "cuda:1", {}, OLD, "bfloat16"),
        ("auto", "cuda", {"torch_dtype": "float32"}, AVX, "float32"),
        ("auto", "cpu", {"dtype": "float32"}, AVX, "float32"),
    ],
)
def test_dtype_auto_is_bfloat16_only_with_native_support(
    dtype: DType, device: Device, config: dict[str, Any], flags: frozenset[str], decided: DType
) -> None:
    assert decide_dtype(dtype, device, config, flags) == decided


def test_cores_and_cpu_flags_of_this_machine_are_read() -> None:
    assert cores() >= 1
    assert isinstance(cpu_flags(), frozenset)

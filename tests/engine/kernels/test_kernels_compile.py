"""Kernels compile, and fit a GPU's registers and shared memory. The interpreter shows neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.engines.kernel_compiler import ARCHITECTURES

pytestmark = pytest.mark.integration

# The least shared memory that a program can use on a GPU since Ampere.
SHARED_BYTES = 99 << 10
# ptxas stores a few values of a thread in memory where that lets another program run beside it. A
# tile that is too large takes hundreds of bytes.
SPILLED_BYTES = 64
MOST_REGISTERS = 255
KERNELS = {
    *("_activation_mul", "_add_norm", "_attend", "_draw", "_join", "_matmul", "_pick"),
    *("_put_sampled", "_rotate_store", "_shape", "_store_kv"),
}


Found = list[dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[["--quick"], pytest.param([], marks=pytest.mark.long)],
    ids=["quick", "all"],
)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The kernels as kernel_compiler.Compiled's fields."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.engines.kernel_compiler", "--json", *request.param],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: Found = json.loads(done.stdout)
    return found


def test_kernels_compile_with_the_arguments_of_launches_and_fit_gpus(compiled: Found) -> None:
    assert {each["kernel"] for each in compiled} == KERNELS
    assert {each["arch"] for each in compiled} == set(ARCHITECTURES)
    too_large = [
        each
        for each in compiled
        if each["registers"] > MOST_REGISTERS
        or each["spills"] > SPILLED_BYTES
        or each["shared"] > SHARED_BYTES
    ]
    assert not too_large


def test_variants_of_exact_attention_do_the_same_arithmetic(compiled: Found) -> None:
    """For one-token rows and mixed steps, and for splits that one program adds or _join."""
    exact = [each for each in compiled if "exact" in each["case"]]
    variants: dict[tuple[str, int], list[list[str]]] = {}
    for each in exact:
        if each["kernel"] == "_attend":
            variants.setdefault((each["case"], each["arch"]), []).append(each["layouts"])
        # In float32 the products of _attend are multiply-adds themselves.
        if each["kernel"] == "_join" or (each["kernel"] == "_attend" and each["layouts"]):
            assert not each["fused"], each
    assert variants
    for case, (one_token, mixed) in variants.items():
        assert one_token == mixed, case

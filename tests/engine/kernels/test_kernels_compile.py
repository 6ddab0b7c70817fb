"""Kernels compile, and fit a GPU's registers and shared memory. The interpreter shows neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.engines.kernel_bytes import ESTIMATES
from tests.support.engines.kernel_compiler import ARCHITECTURES
from tests.support.engines.tiny_models import CACHE

pytestmark = pytest.mark.integration

# The least shared memory that a program can use on a GPU since Ampere.
SHARED_BYTES = 99 << 10
# Latent rows of 576 numbers take more: what an A100 has, and GPUs after it for servers.
LATENT_SHARED_BYTES = 163 << 10
# ptxas stores a few values of a thread in memory where that lets another program run beside it. A
# tile that is too large takes hundreds of bytes.
SPILLED_BYTES = 64
MOST_REGISTERS = 255
KERNELS = {
    *("_activation_mul", "_add_experts", "_add_norm", "_add_splits", "_attend", "_count"),
    *(
        "_count_ties",
        "_draw",
        "_expert_inner",
        "_expert_outputs",
        "_join",
        "_limits",
        "_matmul",
        "_pick",
        "_prepare_inputs",
        "_quantized_inner",
        "_quantized_matmul",
        "_quantized_outputs",
        "_put_sampled",
        "_rotate_store",
        "_store_kv",
    ),
    "_weigh",
}


Found = list[dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[
        ["--quick", "--cache", str(CACHE / "compiled kernels")],
        pytest.param([], marks=pytest.mark.long),
    ],
    ids=["quick", "all"],
)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The kernels as kernel_compiler.Compiled's fields. The quick ones are compiled when they or
    the compiler have changed."""
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
        or each["shared"] > (LATENT_SHARED_BYTES if "latent" in each["case"] else SHARED_BYTES)
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
    for case, (one_token, *longer) in variants.items():
        assert longer, case
        assert all(each == one_token for each in longer), case


def test_a_tile_of_keys_is_loaded_while_a_one_token_row_computes_with_another(
    compiled: Found,
) -> None:
    """Triton divides the stages of a loop among loads that depend on each other."""
    found = [
        each
        for each in compiled
        if (each["kernel"], each["variant"], each["arch"]) == ("_attend", "one-token rows", 90)
    ]
    assert {"exact" in each["case"] for each in found} == {False, True}
    assert not [each for each in found if each["depth"] < 2]


def test_products_that_store_splits_do_the_arithmetic_of_those_that_add_them(
    compiled: Found,
) -> None:
    """In float32 the products are multiply-adds themselves."""
    found = [
        each
        for each in compiled
        if each["kernel"] in ("_matmul", "_quantized_matmul", "_add_splits")
        and "float32" not in each["case"]
    ]
    assert not [each for each in found if each["fused"]]
    layouts: dict[tuple[str, int], list[list[str]]] = {}
    for each in found:
        name, splits, _ = each["variant"].partition(" splits")
        if splits and each["kernel"] == "_matmul":
            layouts.setdefault((name, each["arch"]), []).append(each["layouts"])
    assert layouts
    for variant, (stored, in_a_program) in layouts.items():
        assert stored == in_a_program, variant


def test_each_kernel_states_its_bytes(compiled: Found) -> None:
    stated = {each["kernel"] for each in compiled if any(each["moved"])}
    assert stated == set(ESTIMATES)
    for each in compiled:
        pairs = zip(each["floor"], each["moved"], strict=True)
        assert all(floor <= moved for floor, moved in pairs if moved is not None), each
